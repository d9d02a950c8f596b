"""Evaluate the pipeline recurrence of the stages fixed so far, in front of a rest with known bounds
only.

Closed forms consider one stage at a time; here the fixed stages also wait for each other, in the
order of the schedule:

    (1)  start = max(end of the stage's previous action, arrival of its input); a transfer is a
         delay that begins when a replica's part of the micro-batches before has been sent
    (2)  the gradient of micro-batch m returns from the rest no earlier than the forward of the last
         micro-batch of m's group (``solve.search.shape``) has left, plus the way there and back;
         the first one no earlier than R, the last one no earlier than W, of
         ``solve.search.bounds``
    (3)  the iteration ends no earlier than any fixed stage's last action and its exchange and
         update

The result is a lower bound for every plan that begins with these stages, because each number is at
its minimum and further work only delays. Without a rest it is the whole recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from argosy.schedule import ActionKind, ScheduleSpec
from argosy.schedule.generate import group_size
from argosy.sim.constant import orders_of
from argosy.sim.steady import MOST_PLAYED

Fixed = tuple[float, float, float, float, float, float, float]
"""Of a stage: forward, the backward that is waited for, the rest of it, hand-over forward and back,
exchange and update, and how long a replica sends a micro-batch to the next stage."""
FORWARD, _BACKWARD, _LATE = range(3)
_KINDS = {
    ActionKind.FORWARD: FORWARD,
    ActionKind.BACKWARD: _BACKWARD,
    ActionKind.INPUT_GRADIENT: _BACKWARD,
    ActionKind.WEIGHT_GRADIENT: _LATE,
}


@dataclass(frozen=True)
class Rest:
    """The bounds that are known about the stages that follow."""

    way: float
    """Seconds there and back of any micro-batch (P)."""
    first: float
    """Seconds from the first forward to the end of the first backward (R of
    ``solve.search.bounds``)."""
    whole: float
    """Seconds from the first forward until the last gradient is sent back (W of
    ``solve.search.bounds``)."""


class PrefixTimes(NamedTuple):
    """The results of the recurrence; every time is a lower bound, in seconds."""

    end: float
    """(3)."""
    sent: list[list[float]]
    """[stage, micro-batch]: when the output of a fixed stage begins to be sent on; empty with very
    many micro-batches."""
    returned: list[list[float]]
    """[stage, micro-batch]: when its gradient begins to be sent back to that stage."""


def prefix_times(
    schedule: ScheduleSpec,
    num_stages: int,
    num_micro_batches: int,
    fixed: Sequence[Fixed],
    rest: Rest,
) -> PrefixTimes:
    """Return the lower bound (3) and the times of transfers; with very many micro-batches, only
    the bound of each fixed stage by itself."""
    if num_micro_batches > MOST_PLAYED:
        end = max(
            num_micro_batches * (forward + backward + late) + tail
            for forward, backward, late, _, _, tail, _ in fixed
        )
        return PrefixTimes(end, [], [])
    last, free = len(fixed) - 1, [0.0] * len(fixed)
    leaving = [[0.0] * num_micro_batches for _ in fixed]
    returned = [[0.0] * num_micro_batches for _ in fixed]
    sent = [0.0] * len(fixed)
    """When everything so far has left a stage."""
    program = program_of(schedule, num_stages, len(fixed), num_micro_batches)
    for stage, kind, index, released_by in program:
        forward, backward, late, over, back, _, sending = fixed[stage]
        now = free[stage]
        if kind == FORWARD:
            if stage:
                now = max(now, leaving[stage - 1][index] + fixed[stage - 1][3])
            now += forward
            leaves = max(now, sent[stage])
            sent[stage] = leaves + sending
            leaving[stage][index] = leaves
        elif kind == _BACKWARD:
            if stage < last:
                now = max(now, returned[stage][index] + back)
            elif num_stages == len(fixed):
                now = max(now, leaving[stage][released_by])
            else:
                returned[stage][index] = _rest_ends(leaving[stage], index, released_by, over, rest)
                now = max(now, returned[stage][index] + back)
            now += backward
            if stage:
                returned[stage - 1][index] = now
        else:
            now += late
        free[stage] = now
    end = max(seconds + stage[5] for seconds, stage in zip(free, fixed, strict=True))
    return PrefixTimes(end, leaving, returned)


def _rest_ends(
    left: Sequence[float], index: int, released_by: int, over: float, rest: Rest
) -> float:
    """Return when the rest sends the gradient of a micro-batch back (2), in seconds; ``left`` has
    the times when forwards leave the last fixed stage."""
    end = left[released_by] + over + rest.way
    if index == 0:
        end = max(end, left[0] + over + rest.first)
    if index == len(left) - 1:
        end = max(end, left[0] + over + rest.whole)
    return end


def with_longer_hop(
    stages: tuple[Fixed, ...], seconds: float, sending: float = 0.0
) -> tuple[Fixed, ...]:
    """Return the stages with a transfer of the last one that takes ``seconds`` longer, both ways,
    and for which a replica sends at least for ``sending`` seconds."""
    if not seconds and not sending:
        return stages
    *front, (forward, backward, late, over, back, tail, sent) = stages
    sent = max(sent, sending)
    return (*front, (forward, backward, late, over + seconds, back + seconds, tail, sent))


@lru_cache(maxsize=512)
def program_of(
    schedule: ScheduleSpec, num_stages: int, num_fixed: int, num_micro_batches: int
) -> list[tuple[int, int, int, int]]:
    """Return (stage, kind, micro-batch, last micro-batch of its group), each after what it
    needs."""
    group = (
        min(group_size(schedule, num_micro_batches), num_micro_batches)
        if num_stages > num_fixed
        else 1
    )
    orders = orders_of(schedule, num_stages, num_micro_batches)[:num_fixed]
    position = [0] * num_fixed
    done = [[[False] * num_micro_batches for _ in range(num_fixed)] for _ in range(2)]
    program: list[tuple[int, int, int, int]] = []
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                _, kind, index = order[position[stage]]
                end = min(index - index % group + group, num_micro_batches) - 1
                if kind is ActionKind.FORWARD:
                    ready = stage == 0 or done[0][stage - 1][index]
                    done[0][stage][index] = ready
                elif kind is ActionKind.WEIGHT_GRADIENT:
                    ready = True
                else:
                    ready = (
                        done[1][stage + 1][index] if stage + 1 < num_fixed else done[0][stage][end]
                    )
                    done[1][stage][index] = ready
                if not ready:
                    break
                program.append((stage, _KINDS[kind], index, end))
                position[stage] += 1
    return program
