"""Order the computations of a schedule so that tasks can be numbered, and name them for
timelines."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.schedule import Action, ActionKind, Schedule
from argosy.schedule.check import needs
from argosy.timeline import SpanKind

# The kind of a timeline's span for every kind of computation.
SPAN_KIND = {
    ActionKind.FORWARD: SpanKind.FORWARD,
    ActionKind.BACKWARD: SpanKind.BACKWARD,
    ActionKind.INPUT_GRADIENT: SpanKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT: SpanKind.WEIGHT_GRADIENT,
}


def in_dependency_order(schedule: Schedule) -> Iterator[Action]:
    """Yield all computations of a schedule, each after everything it needs, with rows kept in
    order."""
    done: set[Action] = set()
    rows = [[action for action in row if action.kind.is_computation] for row in schedule.rows]
    position = [0] * len(rows)
    remaining = sum(map(len, rows))
    while remaining:
        before = remaining
        for worker, row in enumerate(rows):
            if position[worker] == len(row):
                continue
            action = row[position[worker]]
            if all(not done.isdisjoint(choices) for choices in needs(action, schedule.num_stages)):
                done.add(action)
                position[worker] += 1
                remaining -= 1
                yield action
        assert remaining < before, "check_schedule finds deadlocks before this"


def consumers(stage: int, micro_batch: int, *, is_gradient: bool) -> tuple[Action, ...]:
    """Return the actions of a stage that may wait for a micro-batch from a neighbouring stage."""
    kinds = (
        (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT) if is_gradient else (ActionKind.FORWARD,)
    )
    return tuple(Action(stage, kind, micro_batch) for kind in kinds)
