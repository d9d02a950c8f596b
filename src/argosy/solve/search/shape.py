"""A sub-problem of the search: how the global batch is cut, and which schedules its plans may run
under.

What a bound or a judge must know of a schedule is little. With q the stage's place from the end and
M micro-batches:

    (1)  n_q      forwards before the first backward:      q (1f1b, zero-bubble), 2q - 1 (eager), k q (kfkb), M (gpipe)
                  (``schedule.generate.usual_depth``)
    (2)  group    backwards in a row                       k (kfkb), M (gpipe), 1   (``schedule.generate.group_size``)
    (3)  gate     share of a backward that the stage before waits for: 1; half under zero-bubble, where the weights'
                  gradients come later
    (4)  held_q   micro-batches whose activations are kept at once: n_q; the number of stages under zero-bubble
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.schedule.generate import default_depth, group_size, usual_depth
from argosy.units import counted

MOST_STAGES = 32
"""Of a plan that is looked for."""
_FILL = 4
"""Stages that a pipeline has, roughly; only decides which shapes are looked at first."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What all plans of one sub-problem share."""

    num_micro_batches: int
    micro_batch_size: int
    schedules: tuple[ScheduleSpec, ...]

    def least_in_flight(self, from_end: int) -> int:
        """Micro-batches ahead under the schedule that needs least memory at the q-th stage from the
        end."""
        return min(
            usual_depth(schedule, from_end, self.num_micro_batches) for schedule in self.schedules
        )

    def most_in_flight(self, from_end: int) -> int:
        """Under the schedule that hides most."""
        return max(
            usual_depth(schedule, from_end, self.num_micro_batches) for schedule in self.schedules
        )

    @property
    def group(self) -> int:
        """The least of (2)."""
        count = self.num_micro_batches
        return min(count, *(group_size(schedule, count) for schedule in self.schedules))

    @property
    def gate(self) -> float:
        """The least of (3)."""
        return min(map(gate, self.schedules))

    def __repr__(self) -> str:
        return f"{counted(self.num_micro_batches, 'micro-batch', 'micro-batches')} of {self.micro_batch_size}"


def gate(schedule: ScheduleSpec) -> float:
    """(3)."""
    return 0.5 if schedule.kind is ScheduleKind.ZERO_BUBBLE else 1.0


def held(schedule: ScheduleSpec, num_stages: int, num_micro_batches: int) -> list[int]:
    """(4), per stage from the front."""
    if schedule.kind is ScheduleKind.ZERO_BUBBLE:
        return [min(num_stages, num_micro_batches)] * num_stages
    return list(default_depth(schedule, num_stages, num_micro_batches))


def estimated(bound: float, shape: Shape) -> float:
    """What a pipeline at the throughput bound takes with filling and draining."""
    return bound * (1 + _FILL / shape.num_micro_batches)


def hoped(bound: float, shape: Shape) -> float:
    """So slow a plan is not worth its place in the tables, unless nothing faster turns up."""
    return 2 * estimated(bound, shape)
