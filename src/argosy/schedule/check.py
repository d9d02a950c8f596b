"""Check a schedule before anything runs: is it complete, does it deadlock, how much is in flight.

Dependencies between actions, for stage s and micro-batch m:

    (1)  sF m  needs  (s-1)F m
    (2)  sB m, sI m  need  sF m, and (s+1)B m or (s+1)I m
    (3)  sW m  needs  sI m
"""

from __future__ import annotations

from collections import Counter

from argosy.errors import Problem, raise_any
from argosy.schedule.action import COMPUTATIONS, Action, ActionKind, Schedule
from argosy.schedule.generate import ScheduleSpec, build_schedule, depth_of

# Micro-batches per stage after which the peak in flight of a schedule has been reached.
_ROUNDS = 8


def needs(action: Action, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """Return the dependencies (1) to (3) of an action; each is a tuple of actions, any one of which
    satisfies it."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is ActionKind.FORWARD:
        return ((Action(stage - 1, ActionKind.FORWARD, micro_batch),),) if stage > 0 else ()
    if action.kind is ActionKind.WEIGHT_GRADIENT:
        return ((Action(stage, ActionKind.INPUT_GRADIENT, micro_batch),),)
    own: tuple[tuple[Action, ...], ...] = ((Action(stage, ActionKind.FORWARD, micro_batch),),)
    if stage + 1 == num_stages:
        return own
    gradients = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
    return (*own, tuple(Action(stage + 1, kind, micro_batch) for kind in gradients))


def check_schedule(schedule: Schedule, *, limit: tuple[int, ...] | None = None) -> None:
    """Raise an ``InputError`` unless the schedule is complete, free of deadlock and within
    ``limit`` micro-batches in flight per stage."""
    problems = [*_incomplete(schedule)]
    if not problems:
        problems += _deadlock(schedule)
    if not problems and limit is not None:
        problems += [
            Problem(f"stage {stage}", f"{held} micro-batches in flight", f"at most {allowed}")
            for stage, (held, allowed) in enumerate(zip(in_flight(schedule), limit, strict=True))
            if held > allowed
        ]
    raise_any(problems)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return, per stage, the largest number of micro-batches whose activations it holds at once.

    >>> from argosy.schedule import ScheduleKind, ScheduleSpec, build_schedule
    >>> in_flight(build_schedule(ScheduleSpec(kind=ScheduleKind.KFKB, k=2), 4, 16))
    (8, 6, 4, 2)
    """
    held = [0] * schedule.num_stages
    peak = [0] * schedule.num_stages
    for row in schedule.rows:
        for action in row:
            if action.kind is ActionKind.FORWARD:
                held[action.stage] += 1
                peak[action.stage] = max(peak[action.stage], held[action.stage])
            elif action.kind.frees_activations:
                held[action.stage] -= 1
    return tuple(peak)


def most_in_flight(spec: ScheduleSpec, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return ``in_flight`` of the schedule of a plan, in a time that does not grow with the number
    of micro-batches.

    Stages of the family (``generate.family``) hold their depth. Under the other schedules a stage
    reaches its peak while the pipeline fills, so a few rounds are enough to find it.
    """
    if spec.kind.is_family:
        return depth_of(spec, num_stages, num_micro_batches)
    few = min(num_micro_batches, _ROUNDS * num_stages)
    return in_flight(build_schedule(spec, num_stages, few))


def _incomplete(schedule: Schedule) -> list[Problem]:
    """Return a problem for each stage that does not run every micro-batch forward once and backward
    once, and for each action on a foreign worker."""
    problems = []
    seen = Counter(action for row in schedule.rows for action in row if action.kind.is_computation)
    for worker, row in enumerate(schedule.rows):
        foreign = next((a for a in row if schedule.worker_of(a.stage) != worker), None)
        if foreign is not None:
            actual, expected = str(foreign), f"only stages of worker {worker}"
            problems.append(Problem(f"worker {worker}", actual, expected))
        num_stages, num_micro_batches = schedule.num_stages, schedule.num_micro_batches
        beyond = next(
            (a for a in row if a.stage >= num_stages or a.micro_batch >= num_micro_batches), None
        )
        if beyond is not None:
            expected = (
                f"only {num_stages} stages and {num_micro_batches} micro-batches, counted from 0"
            )
            problems.append(Problem(f"worker {worker}", str(beyond), expected))
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            counts = [seen[Action(stage, kind, micro_batch)] for kind in COMPUTATIONS]
            if counts not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                actual = ", ".join(
                    f"{count} {kind}"
                    for count, kind in zip(counts, COMPUTATIONS, strict=True)
                    if count
                )
                expected = "1 F and 1 B, or 1 F, 1 I and 1 W"
                path = f"stage {stage} micro-batch {micro_batch}"
                problems.append(Problem(path, actual or "nothing", expected))
    return problems


def _deadlock(schedule: Schedule) -> list[Problem]:
    """Run the rows without durations; if they stop early, return a problem per worker with the
    action that it waits for."""
    done: set[Action] = set()
    position = [0] * schedule.num_workers
    rows = [[action for action in row if action.kind.is_computation] for row in schedule.rows]
    moved = True
    while moved:
        moved = False
        for worker, row in enumerate(rows):
            while position[worker] < len(row) and not _blocker(
                row[position[worker]], schedule, done
            ):
                done.add(row[position[worker]])
                position[worker] += 1
                moved = True
    problems = []
    for worker, row in enumerate(rows):
        if position[worker] < len(row):
            action = row[position[worker]]
            needed = _blocker(action, schedule, done)
            actual = f"{action} blocked by {needed}"
            expected = "an order without deadlock"
            problems.append(Problem(f"worker {worker}", actual, expected))
    return problems


def _blocker(action: Action, schedule: Schedule, done: set[Action]) -> Action | None:
    for choices in needs(action, schedule.num_stages):
        if done.isdisjoint(choices):
            return choices[0]
    return None
