"""Solve the partition programme of DAPPLE's planner: stages and devices with the least largest
block.

    (1)  A[j, u] = min over k, taken max( A[k, u - taken], (F + B)(k..j-1) on |taken| replicas, 2
         x_k / bandwidth )

for the first j layers on devices u (a number of every machine). ``taken`` is what one of the three
policies chooses when u - taken is in use, and x_k crosses the cut before the stage: inside a
machine if all devices so far are in one, between machines otherwise. Machines of one size are
interchangeable: u is kept sorted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argosy.baselines.equal_devices import EqualDevices, Floats
from argosy.baselines.placement import Counts, placements

Stages = list[tuple[int, int, Counts]]
"""The (first layer, end, devices of every machine) of each stage."""


def least_largest_block(
    view: EqualDevices, micro_batch: int, unit: int, *, straight: bool = False
) -> Stages | None:
    """Return the stages of (1) over all devices, or None if no partition has enough layers or
    samples.

    A stage takes ``unit`` devices or, unless ``straight``, a multiple of it.
    """
    table = block_table(view, micro_batch, unit, straight=straight)
    end, used = view.num_layers, view.sizes
    if used not in table or not np.isfinite(table[used][0][end]):
        return None
    stages: Stages = []
    while end:
        _, cuts, origins = table[used]
        first, (used, taken) = int(cuts[end]), origins[end]
        stages.append((first, end, taken))
        end = first
    return _on_machines(view, stages[::-1])


def _on_machines(view: EqualDevices, stages: Stages) -> Stages:
    """Replace positions in the order of machines by fullness with the machines themselves."""
    used = [0] * len(view.sizes)
    placed: Stages = []
    for first, end, taken in stages:
        order = (
            sorted(range(len(used)), key=lambda at: -used[at])
            if _are_alike(view)
            else range(len(used))
        )
        counts = [0] * len(used)
        for machine, number in zip(order, taken, strict=True):
            counts[machine] = number
            used[machine] += number
        placed.append((first, end, tuple(counts)))
    return placed


def _are_alike(view: EqualDevices) -> bool:
    """Return whether all machines are interchangeable, so that only their fullness matters."""
    return len(set(view.sizes)) == 1


Row = tuple[Floats, NDArray[np.intp], list[tuple[Counts, Counts]]]
"""For each number of layers: the least largest block, the cut before the last stage, and the
devices in use before that stage with those it takes."""


def block_table(
    view: EqualDevices, micro_batch: int, unit: int, *, straight: bool = False
) -> dict[Counts, Row]:
    """Return the least largest block (1) for all numbers of devices that the policies can reach."""
    size, is_symmetric = view.num_layers + 1, _are_alike(view)
    empty = (0,) * len(view.sizes)
    chunk = unit if all(size % unit == 0 for size in view.sizes) else 1
    start = np.full(size, np.inf)
    start[0] = 0.0
    table: dict[Counts, Row] = {
        empty: (start, np.zeros(size, dtype=np.intp), [(empty, empty)] * size)
    }
    waiting = [{empty}, *(set[Counts]() for _ in range(view.count))]
    for total, states in enumerate(waiting):
        for used in sorted(states):
            most = min(view.count - total, micro_batch)
            for number in [unit] if straight else range(unit, most + 1, unit):
                if number > most:
                    continue
                for taken in placements(view.sizes, used, number, chunk):
                    after = tuple(a + b for a, b in zip(used, taken, strict=True))
                    after = tuple(sorted(after, reverse=True)) if is_symmetric else after
                    waiting[total + number].add(after)
                    _extend(view, micro_batch, table, used, taken, after)
    return table


def _extend(
    view: EqualDevices,
    micro_batch: int,
    table: dict[Counts, Row],
    used: Counts,
    taken: Counts,
    after: Counts,
) -> None:
    """Extend the best pipelines on ``used`` by one more stage."""
    size = view.num_layers + 1
    rate = view.between if sum(number > 0 for number in after) > 1 else view.inside
    before = np.maximum(table[used][0], 2 * micro_batch * view.outputs / rate)
    blocks = np.maximum(before[:, None], view.ranges(micro_batch, sum(taken)))
    cuts = blocks.argmin(axis=0)
    values = blocks[cuts, np.arange(size)]
    if after not in table:
        table[after] = (
            np.full(size, np.inf),
            np.zeros(size, dtype=np.intp),
            [(used, taken)] * size,
        )
    best, best_cuts, origins = table[after]
    for end in np.nonzero(values < best)[0]:
        best[end], best_cuts[end], origins[end] = values[end], cuts[end], (used, taken)
