"""Draw a schedule on a grid: a row per worker, a column per unit of time, transfers taken as
free."""

from __future__ import annotations

from collections.abc import Mapping

from argosy.schedule.action import Action, ActionKind, Schedule
from argosy.schedule.check import check_schedule, needs

UNITS = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: 2,
    ActionKind.INPUT_GRADIENT: 1,
    ActionKind.WEIGHT_GRADIENT: 1,
}
"""Durations on the grid, in columns; a backward takes as long as two forwards."""


def unit_times(
    schedule: Schedule, units: Mapping[ActionKind, int] = UNITS
) -> dict[Action, tuple[int, int]]:
    """Return start and end of every action, in columns, if only computation takes time."""
    check_schedule(schedule)
    times: dict[Action, tuple[int, int]] = {}
    free = [0] * schedule.num_workers
    pending = [[action for action in row if action.kind.is_computation] for row in schedule.rows]
    position = [0] * schedule.num_workers
    while any(position[worker] < len(row) for worker, row in enumerate(pending)):
        for worker, row in enumerate(pending):
            while position[worker] < len(row):
                action = row[position[worker]]
                dependencies = needs(action, schedule.num_stages)
                ready = [
                    min((times[a][1] for a in choices if a in times), default=None)
                    for choices in dependencies
                ]
                if any(time is None for time in ready):
                    break
                start = max([free[worker], *(time for time in ready if time is not None)])
                times[action] = (start, start + units[action.kind])
                free[worker] = times[action][1]
                position[worker] += 1
    return times


def grid(schedule: Schedule, *, width: int | None = None) -> str:
    """Return the grid as text, cut to ``width`` columns of time if that is given.

    >>> from argosy.schedule import ScheduleSpec, build_schedule
    >>> print(grid(build_schedule(ScheduleSpec(), 2, 3)))
    0 | F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
    1 | .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
    """
    times = unit_times(schedule)
    columns = max(end for _, end in times.values())
    shown = columns if width is None else min(width, columns)
    label = len(str(schedule.num_micro_batches - 1)) + (
        3 if schedule.num_workers < schedule.num_stages else 1
    )
    lines = []
    for worker, row in enumerate(schedule.rows):
        cells = ["."] * columns
        for action in (action for action in row if action.kind.is_computation):
            text = (
                str(action)
                if schedule.num_workers < schedule.num_stages
                else f"{action.kind}{action.micro_batch}"
            )
            start, end = times[action]
            cells[start:end] = [text] * (end - start)
        body = " ".join(cell.ljust(label) for cell in cells[:shown]).rstrip()
        lines.append(f"{worker} | {body}{' ...' if shown < columns else ''}")
    return "\n".join(lines)
