"""The partition programme of DAPPLE's planner: stages and devices with the least largest block.

    (1)  A[j, u] = min over k, taken max( A[k, u - taken], (F + B)(k..j-1) on |taken| replicas, 2
         x_k / bandwidth )

for the first j layers on devices u (how many of every machine), where ``taken`` is what one of the
three policies gives when u - taken is in use, and x_k crosses the cut in front of the stage: inside
a machine if all devices so far sit in one, between machines otherwise. Machines of one size are
interchangeable: u is kept sorted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argosy.baselines.equal_devices import EqualDevices, Floats
from argosy.baselines.placement import Counts, placements

Stages = list[tuple[int, int, Counts]]
"""(first layer, end, devices of every machine)."""


def least_largest_block(
    view: EqualDevices, micro_batch: int, unit: int, *, straight: bool = False
) -> Stages | None:
    """(1) over all devices, ``unit`` or (unless ``straight``) a multiple of it to a stage; None
    where no partition has enough layers or samples."""
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
    """From machines in the order of how full they are to the machines themselves."""
    used = [0] * len(view.sizes)
    placed: Stages = []
    for first, end, taken in stages:
        order = (
            sorted(range(len(used)), key=lambda at: -used[at])
            if _are_alike(view)
            else range(len(used))
        )
        mine = [0] * len(used)
        for machine, number in zip(order, taken, strict=True):
            mine[machine] = number
            used[machine] += number
        placed.append((first, end, tuple(mine)))
    return placed


def _are_alike(view: EqualDevices) -> bool:
    """Equal machines are interchangeable, so that only how many are how full matters."""
    return len(set(view.sizes)) == 1


Row = tuple[Floats, NDArray[np.intp], list[tuple[Counts, Counts]]]
"""Per number of layers: the least largest block, the cut in front of the last stage, and the
devices in use before that stage with those it takes."""


def block_table(
    view: EqualDevices, micro_batch: int, unit: int, *, straight: bool = False
) -> dict[Counts, Row]:
    """(1) for all devices that the policies can reach."""
    size, alike = view.num_layers + 1, _are_alike(view)
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
                    after = tuple(sorted(after, reverse=True)) if alike else after
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
    """One more stage behind the best of ``used``."""
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
