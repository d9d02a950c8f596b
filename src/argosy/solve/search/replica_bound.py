"""Bound a complete plan with stages of unequal replicas from below, replica by replica.

The bounds of ``solve.search.bounds`` and ``solve.search.prefix`` know one replica of a stage, of a
mixed one the quickest. Here every replica r of stage s does its actions in the order of the
schedule, on its own samples of each micro-batch:

    (1)  a forward begins when the replica is free and all replicas of the stage before that hold
         samples of r have done theirs; a backward likewise, behind the stage after
    (2)  the stage exchanges gradients and updates when the last of its replicas is through

Hand-overs take no time here and links are never shared, so no plan is faster in the exact engine.
With one stage, or if all replicas of every stage are equal, it is the recurrence of
``solve.search.prefix`` without hand-overs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from argosy.schedule import ScheduleSpec
from argosy.solve.search.prefix import FORWARD, Fixed, program_of
from argosy.space.option import Option
from argosy.space.price import FloatArray

Indices = NDArray[np.intp]


def replica_seconds(
    schedule: ScheduleSpec,
    num_micro_batches: int,
    stages: Sequence[tuple[Option, int, int]],
    fixed: Sequence[Fixed],
) -> float:
    """Return the end of the last stage by (2), in seconds.

    ``stages`` has an option, a first layer and an end for each stage. The bound is 0 if no stage is
    mixed, or if more than replicas wait for each other.
    """
    options = [option for option, _, _ in stages]
    is_plain = all(
        option.context == 1 and option.expert == 1 and not option.offload for option in options
    )
    is_mixed = any(len(option.parts) > 1 for option in options)
    if (
        schedule.kind.is_split
        or not is_plain
        or not is_mixed
        or options[0].prices.chain.first_backward
    ):
        return 0.0
    times = [_times(*stage) for stage in stages]
    shares = [_samples(option) for option, _, _ in stages]
    neighbours = list(itertools.pairwise(shares))
    before = [_holders(earlier, later) for earlier, later in neighbours]
    after = [_holders(later, earlier) for earlier, later in neighbours]
    free = [np.zeros(len(share)) for share in shares]
    ends: list[dict[int, FloatArray]] = [{} for _ in stages]
    returned: list[dict[int, FloatArray]] = [{} for _ in stages]
    for stage, kind, index, _ in program_of(schedule, len(stages), len(stages), num_micro_batches):
        forward, backward = times[stage]
        if kind == FORWARD:
            if stage:
                _wait(free[stage], ends[stage - 1].pop(index), before[stage - 1])
            free[stage] += forward
            ends[stage][index] = free[stage].copy()
        else:
            if stage + 1 < len(stages):
                _wait(free[stage], returned[stage + 1].pop(index), after[stage])
            free[stage] += backward
            returned[stage][index] = free[stage].copy()
    return max(float(end.max()) + stage[5] for end, stage in zip(free, fixed, strict=True))


def _wait(free: FloatArray, arrived: FloatArray, holders: Indices) -> None:
    """Make every replica wait for those that hold its samples (1)."""
    padded = np.append(arrived, 0.0)  # an end may be one past the last
    np.maximum(free, np.maximum.reduceat(padded, holders)[::2], out=free)


def _samples(option: Option) -> list[int]:
    """Return the samples of every replica, in the order of the replicas."""
    return [
        part.samples + (at < part.extra) for part in option.parts for at in range(part.replicas)
    ]


def _times(option: Option, first: int, end: int) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of forward and backward of every replica."""
    pairs: list[tuple[float, float]] = []
    for part in option.parts:
        for samples, count in (
            (part.samples + 1, part.extra),
            (part.samples, part.replicas - part.extra),
        ):
            if count:
                forward, backward = option.sums(part, samples)
                pair = (
                    float(forward[end] - forward[first]),
                    float(backward[end] - backward[first]),
                )
                pairs += [pair] * count
    times = np.array(pairs)
    return times[:, 0], times[:, 1]


def _holders(sources: Sequence[int], targets: Sequence[int]) -> Indices:
    """Per target, the first source that holds one of its samples and one past the last, one after
    the other."""
    ends = np.cumsum(sources)
    stops = np.cumsum(targets)
    starts = stops - np.array(targets)
    first = np.searchsorted(ends, starts, side="right")
    last = np.searchsorted(ends, stops, side="left") + 1
    return np.column_stack([first, last]).ravel()
