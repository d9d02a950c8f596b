"""Insert communication into a schedule of computation.

A send follows the action that produces the tensor. A receive is *posted* before the action that
needs the tensor, ``lookahead`` computations early, because a late receive delays the sender's whole
pipeline. A point-to-point channel needs sends and receives between two workers in the same order
per direction; this pass keeps that order and ``check_channels`` proves it.
"""

from __future__ import annotations

from collections import defaultdict

from argosy.errors import Problem, raise_any
from argosy.schedule.action import Action, ActionKind, Schedule

Channel = tuple[int, int, bool]
"""Sending worker, receiving worker, and whether the channel carries gradients."""


def with_communication(schedule: Schedule, *, lookahead: int = 1) -> Schedule:
    """Return the schedule with sends and receives inserted.

    >>> from argosy.schedule import ScheduleSpec, build_schedule
    >>> print(with_communication(build_schedule(ScheduleSpec(), 2, 2), lookahead=0).text())
    0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1
    1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1
    """
    rows = tuple(_communicating_row(schedule, row, lookahead) for row in schedule.rows)
    return Schedule(schedule.kind, schedule.num_stages, schedule.num_micro_batches, rows)


def _communicating_row(
    schedule: Schedule, row: tuple[Action, ...], lookahead: int
) -> tuple[Action, ...]:
    posts: dict[int, list[Action]] = defaultdict(list)
    for index, action in enumerate(row):
        received = _received(schedule, action)
        if received is not None:
            posts[max(0, index - lookahead)].append(received)
    result: list[Action] = []
    for index, action in enumerate(row):
        result += posts[index]
        result.append(action)
        sent = _sent(schedule, action)
        if sent is not None:
            result.append(sent)
    return tuple(result)


def _received(schedule: Schedule, action: Action) -> Action | None:
    stage = action.stage
    if (
        action.kind is ActionKind.FORWARD
        and stage > 0
        and not _same_worker(schedule, stage, stage - 1)
    ):
        return Action(stage, ActionKind.RECEIVE_FORWARD, action.micro_batch)
    last = schedule.num_stages - 1
    if action.kind.is_gradient and stage < last and not _same_worker(schedule, stage, stage + 1):
        return Action(stage, ActionKind.RECEIVE_BACKWARD, action.micro_batch)
    return None


def _sent(schedule: Schedule, action: Action) -> Action | None:
    stage, last = action.stage, schedule.num_stages - 1
    if (
        action.kind is ActionKind.FORWARD
        and stage < last
        and not _same_worker(schedule, stage, stage + 1)
    ):
        return Action(stage, ActionKind.SEND_FORWARD, action.micro_batch)
    if action.kind.is_gradient and stage > 0 and not _same_worker(schedule, stage, stage - 1):
        return Action(stage, ActionKind.SEND_BACKWARD, action.micro_batch)
    return None


def _same_worker(schedule: Schedule, first: int, second: int) -> bool:
    return schedule.worker_of(first) == schedule.worker_of(second)


def check_channels(schedule: Schedule) -> None:
    """Raise an ``InputError`` unless each channel is received from in the order in which it is sent
    to."""
    sent: dict[Channel, list[tuple[int, int]]] = defaultdict(list)
    received: dict[Channel, list[tuple[int, int]]] = defaultdict(list)
    for worker, row in enumerate(schedule.rows):
        for action in row:
            stage, index = action.stage, action.micro_batch
            match action.kind:
                case ActionKind.SEND_FORWARD:
                    sent[worker, schedule.worker_of(stage + 1), False].append((stage + 1, index))
                case ActionKind.SEND_BACKWARD:
                    sent[worker, schedule.worker_of(stage - 1), True].append((stage - 1, index))
                case ActionKind.RECEIVE_FORWARD:
                    received[schedule.worker_of(stage - 1), worker, False].append((stage, index))
                case ActionKind.RECEIVE_BACKWARD:
                    received[schedule.worker_of(stage + 1), worker, True].append((stage, index))
    problems = [
        Problem(
            f"{'gradients' if gradients else 'activations'} from worker {source} to {target}",
            f"receives in the order {received[source, target, gradients][:4]}...",
            f"the order of the sends {sent[source, target, gradients][:4]}...",
        )
        for source, target, gradients in sorted(sent.keys() | received.keys())
        if sent[source, target, gradients] != received[source, target, gradients]
    ]
    raise_any(problems)
