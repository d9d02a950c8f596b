"""Define a sub-problem of the search: how the global batch is cut, and the schedules of its plans.

Bounds and judges need few facts about a schedule. With q the stage's place from the end and M
micro-batches:

    (1)  n_q      forwards before the first backward: q (1f1b, zero-bubble), 2q - 1 (eager), k q
                  (kfkb), M (gpipe)   (``schedule.generate.usual_depth``)
    (2)  group    backwards in a row: k (kfkb), M (gpipe), 1   (``schedule.generate.group_size``)
    (3)  gate     share of a backward that the stage before waits for: 1; half under zero-bubble,
                  where the gradients of weights come later
    (4)  held_q   micro-batches whose activations are kept at once: n_q; the number of stages under
                  zero-bubble

A kind of schedule without a case here has the facts of 1f1b; bounds do not read lists of actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.schedule.generate import default_depth, group_size, usual_depth
from argosy.units import counted

# Plans of more stages are not searched.
MOST_STAGES = 32
# Assumed number of stages of a pipeline; it only decides which shapes are searched first.
_FILL = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A sub-problem whose plans share their micro-batches and schedules."""

    num_micro_batches: int
    micro_batch_size: int
    schedules: tuple[ScheduleSpec, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.num_micro_batches, self.micro_batch_size, self.schedules))

    def least_in_flight(self, from_end: int) -> int:
        """Return the micro-batches in flight under the schedule that needs least memory at the q-th
        stage from the end."""
        return min(
            usual_depth(schedule, from_end, self.num_micro_batches) for schedule in self.schedules
        )

    def most_in_flight(self, from_end: int) -> int:
        """Return the micro-batches in flight under the schedule that overlaps most."""
        return max(
            usual_depth(schedule, from_end, self.num_micro_batches) for schedule in self.schedules
        )

    @cached_property
    def group(self) -> int:
        """Return the least number of backwards in a row over the schedules (2)."""
        count = self.num_micro_batches
        return min(count, *(group_size(schedule, count) for schedule in self.schedules))

    @cached_property
    def gate(self) -> float:
        """Return the least share of a backward that the stage before waits for, over the schedules
        (3)."""
        return min(map(gate, self.schedules))

    def __repr__(self) -> str:
        count = counted(self.num_micro_batches, "micro-batch", "micro-batches")
        return f"{count} of {self.micro_batch_size}"


def gate(schedule: ScheduleSpec) -> float:
    """Return the share of a backward that the stage before waits for (3)."""
    return 0.5 if schedule.kind is ScheduleKind.ZERO_BUBBLE else 1.0


def held(schedule: ScheduleSpec, num_stages: int, num_micro_batches: int) -> list[int]:
    """Return the micro-batches held by each stage from the front (4)."""
    if schedule.kind is ScheduleKind.ZERO_BUBBLE:
        return [min(num_stages, num_micro_batches)] * num_stages
    return list(default_depth(schedule, num_stages, num_micro_batches))


def estimated(bound: float, shape: Shape) -> float:
    """Return the seconds of a pipeline at the throughput bound, with filling and draining."""
    return bound * (1 + _FILL / shape.num_micro_batches)


def hoped(bound: float, shape: Shape) -> float:
    """Return the seconds above which a plan is omitted from the tables, unless nothing faster is
    found."""
    return 2 * estimated(bound, shape)
