"""Cut a weighted chain of items over ordered, unequal devices, so that the slowest device is as
fast as possible.

Layers along a pipeline and leaves along the Hilbert curve of an N-body box are this problem. W and
M are the prefix sums of the items' work and memory; c[k] is what a boundary before item k costs the
devices on both sides of it, in seconds, with c[0] = c[n] = 0. Device d, of speed s_d and capacity
m_d, takes the items i, ..., j - 1, where i is the end of device d - 1:

    (1)  cost_d(i, j) = (W[j] - W[i]) / s_d + c[i] + c[j], and 0 for an empty run, i = j
    (2)  M[j] - M[i] <= m_d
    (3)  minimise T = max over d of cost_d

The solution is found by bisection on T, tightened to the largest cost of every cut it finds, until
nothing smaller is feasible. T is feasible if n is among the ends that the last device can reach:

    (4)  device d reaches j from i < j if (2) holds and W[i] / s_d - c[i] >= W[j] / s_d + c[j] - T;
         for all j at once, from the maximum of the left side over the reached i in a window that
         (2) bounds and that only moves right
    (5)  if no boundary costs anything, going as far as possible is never worse: one binary search
         per device
    (6)  c >= 0, so (5) from the right and from the left bounds the end of every device, and (4)
         looks only in between: if boundaries are cheap, a small part of the chain
    (7)  if no boundary costs anything and every device must take an item, (5) with one item left
         for each device before: what it finds is leftmost, and only if it finds nothing is there
         more to try

Among several optimal cuts the one with the leftmost last boundary is returned, then the one before,
and so on. With (5) alone the result is the optimum of (1) to the last bit. With (4) it is the
optimum up to the rounding of the prefix sums, and costs that differ by less than one part in 10^12
count as equal. Memory in whole bytes is exact. The order of the devices is given; finding a better
one is not part of this problem.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from argosy.cluster.trace import FloatArray
from argosy.errors import InfeasibleError, bad_input
from argosy.units import SIZE, TIME

# One number per item or device.
Numbers = Sequence[float] | FloatArray
Boundaries = list[int]
"""0, followed by the end of each device: one more entry than there are devices."""

# A bound is moved by this share so that no rounding of sums can make it wrong.
_MARGIN = 1e-9
# Costs that differ by a smaller share count as equal in (4).
_SAME = 1e-12
# A ``repr`` lists at most this many runs.
_SHOWN = 8


@dataclass(frozen=True, repr=False)
class ChainCut:
    """The items that each device takes, and their costs."""

    ends: tuple[int, ...]
    """For each device, the first item after its own; equal to the end before if it takes none."""
    costs: tuple[float, ...]
    """Seconds of each device, by (1)."""
    bottleneck: int
    """The first of the slowest devices."""
    seconds: float
    """Seconds of the slowest device, by (3)."""

    def __repr__(self) -> str:
        starts = (0, *self.ends[:-1])
        runs = [
            f"{i}..{j - 1}" if i < j else "none" for i, j in zip(starts, self.ends, strict=True)
        ]
        if len(runs) > _SHOWN:
            runs[_SHOWN - 1 : -1] = ["..."]
        slowest = f"{TIME.format(self.seconds)} on device {self.bottleneck}"
        return f"{self.ends[-1]} items over {len(self.ends)} devices, {slowest}: {' | '.join(runs)}"


def cut_chain(
    work: Numbers,
    speeds: Numbers,
    *,
    cut: Numbers | None = None,
    memory: Numbers | None = None,
    capacity: Numbers | None = None,
    allow_empty: bool = True,
) -> ChainCut:
    """Return the cut that solves (3).

    ``work`` per item over ``speeds`` per device is seconds; ``cut`` is c, one more than there are
    items; ``memory`` per item and ``capacity`` per device are bytes, ``math.inf`` for a device
    without a limit. Without ``allow_empty`` every device takes at least one item.

    >>> cut_chain([2, 2, 2, 6], [1, 3])
    4 items over 2 devices, 3.333 s on device 1: 0..0 | 1..3
    >>> cut_chain([2, 2, 2, 6], [1, 3], cut=[0, 9, 9, 0.5, 0])
    4 items over 2 devices, 4 s on device 1: none | 0..3
    """
    chain = _checked(work, speeds, cut, memory, capacity, allow_empty)
    total = chain.work[-1]
    ceiling = (total / min(chain.speeds) + 2 * float(chain.cut.max())) * (1 + _MARGIN)
    ideal = total / sum(chain.speeds) * (1 - _MARGIN)
    uncharged = replace(chain, cut=np.zeros_like(chain.cut))
    best = _least_feasible(uncharged, _cut_greedily, ideal, ceiling)
    if best is not None and chain.cut.any():
        best = _least_feasible(chain, _cut_within_bands, best[0], ceiling, same=_SAME)
    elif best is not None and not allow_empty and _has_empty(best[1]):
        best = _least_feasible(chain, _cut_sparingly, best[0], ceiling, same=_SAME)
    if best is None:
        raise InfeasibleError(_what_binds(chain))
    return _priced(chain, best[1])


@dataclass(frozen=True)
class _Chain:
    """A problem that was checked; prefix sums are stored as lists for searching and as arrays for
    arithmetic."""

    work: list[float]
    memory: list[float]
    work_array: FloatArray
    memory_array: FloatArray
    cut: FloatArray
    speeds: list[float]
    capacity: list[float]
    allow_empty: bool

    @property
    def num_items(self) -> int:
        return len(self.work) - 1


Probe = Callable[[_Chain, float], Boundaries | None]
"""A function that returns a cut in which no device needs more than the given seconds, or None."""


def _checked(
    work: Numbers,
    speeds: Numbers,
    cut: Numbers | None,
    memory: Numbers | None,
    capacity: Numbers | None,
    allow_empty: bool,
) -> _Chain:
    if len(work) == 0:
        raise bad_input("at least one item", where="work")
    if len(speeds) == 0:
        raise bad_input("at least one device", where="speeds")
    if (memory is None) != (capacity is None):
        missing = "memory" if memory is None else "capacity"
        raise bad_input("both memory and capacity, or neither", where=missing)
    n, d = len(work), len(speeds)
    works = _amounts(work, "work", n, "items")
    rates = _amounts(speeds, "speeds", d, "devices", positive=True)
    costs = _amounts(np.zeros(n + 1) if cut is None else cut, "cut", n + 1, "boundaries")
    for end in (0, n):
        if costs[end] != 0:
            raise bad_input(
                "0, there is no boundary at an end of the chain", costs[end], where=f"cut[{end}]"
            )
    sizes = _amounts(np.zeros(n) if memory is None else memory, "memory", n, "items")
    limits = _amounts(
        np.full(d, np.inf) if capacity is None else capacity,
        "capacity",
        d,
        "devices",
        unlimited=True,
    )
    before = np.concatenate(([0.0], np.cumsum(works)))
    held = np.concatenate(([0.0], np.cumsum(sizes)))
    return _Chain(
        before.tolist(),
        held.tolist(),
        before,
        held,
        costs,
        rates.tolist(),
        limits.tolist(),
        allow_empty,
    )


def _amounts(
    values: Numbers,
    name: str,
    count: int,
    of: str,
    *,
    positive: bool = False,
    unlimited: bool = False,
) -> FloatArray:
    """Return the values as an array of ``count`` non-negative numbers; raise InputError
    otherwise."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (count,):
        raise bad_input(
            f"{count} values, one for each of the {count} {of}", len(values), where=name
        )
    good = (array > 0 if positive else array >= 0) & (array < np.inf if not unlimited else True)
    if not good.all():
        index = int(np.argmin(good))
        kind = "a number" if unlimited else "a finite number"
        raise bad_input(
            f"{kind} {'above' if positive else 'of at least'} 0",
            array[index],
            where=f"{name}[{index}]",
        )
    return array


def _least_feasible(
    chain: _Chain, probe: Probe, start: float, ceiling: float, *, same: float = 0.0
) -> tuple[float, Boundaries] | None:
    """Return the smallest T that ``probe`` finds feasible, and its cut; None if even ``ceiling`` is
    infeasible. No T below ``start`` is feasible.

    The steps up from ``start`` begin small: the nearer T is to the optimum, the less (6) leaves to
    examine. A cut is the best if nothing is feasible below its own cost, minus the share ``same``;
    as the leftmost at a higher T it is also the leftmost at its own cost.
    """
    low = high = start
    step = start / 1024 or ceiling
    while (first_cut := probe(chain, high)) is None:
        if high >= ceiling:
            return None
        low, high, step = high, min(high + step, ceiling), 2 * step
    best = first_cut
    while True:
        own = _priced(chain, best).seconds
        below = min(own * (1 - same), math.nextafter(own, 0.0))
        if below < high:  # always true, except for rounding in the probe
            better = probe(chain, below) if below > low else None
            if better is None:
                return own, best
            high, best = below, better
        while low < (middle := low + (high - low) / 2) < high:
            better = probe(chain, middle)
            if better is not None:
                high, best = middle, better
                break
            low = middle
        else:
            return high, best


def _cut_greedily(chain: _Chain, seconds: float) -> Boundaries | None:
    """Return a cut by (5), or None if there is none within ``seconds``."""
    boundaries = _leftmost(chain, seconds)
    return boundaries if boundaries[0] == 0 else None


def _cut_sparingly(chain: _Chain, seconds: float) -> Boundaries | None:
    """Return a cut by (7) in which every device takes an item, or None if there is none within
    ``seconds``."""
    boundaries = [chain.num_items]
    for device in reversed(range(len(chain.speeds))):
        start = max(_first_start(chain, device, seconds, boundaries[-1]), device)
        if start >= boundaries[-1]:
            # This item is too much for the device; fewer items for those behind might help.
            return _cut_within_bands(chain, seconds)
        boundaries.append(start)
    return boundaries[::-1] if boundaries[-1] == 0 else None


def _has_empty(boundaries: Boundaries) -> bool:
    return any(start == end for start, end in itertools.pairwise(boundaries))


def _leftmost(chain: _Chain, seconds: float) -> Boundaries:
    """Return the leftmost boundaries by (5) from the right end: no cut within ``seconds`` has a
    boundary further left. The first one is above 0 if no cut exists."""
    boundaries = [chain.num_items]
    for device in reversed(range(len(chain.speeds))):
        boundaries.append(_first_start(chain, device, seconds, boundaries[-1]))
    return boundaries[::-1]


def _rightmost(chain: _Chain, seconds: float) -> Boundaries:
    """Return the rightmost boundaries by (5) from the left end: no cut within ``seconds`` has a
    boundary further right."""
    boundaries = [0]
    for device in range(len(chain.speeds)):
        boundaries.append(_last_end(chain, device, seconds, boundaries[-1]))
    return boundaries


def _first_start(chain: _Chain, device: int, seconds: float, end: int) -> int:
    """Return the smallest i for this j under (1), without boundary costs, and (2). Both increase
    with i in floating point as well."""
    work, done, speed = chain.work, chain.work[end], chain.speeds[device]
    # Nearly the place; comparisons of rounded numbers decide.
    by_work = bisect_left(work, done - seconds * speed, hi=end)
    while by_work and (work[by_work - 1] - done) / speed >= -seconds:
        by_work -= 1
    while by_work < end and (work[by_work] - done) / speed < -seconds:
        by_work += 1
    by_memory = bisect_left(chain.memory, chain.memory[end] - chain.capacity[device], hi=end)
    return max(by_work, by_memory)


def _last_end(chain: _Chain, device: int, seconds: float, start: int) -> int:
    """Return the largest j for this i, by the same comparisons as ``_first_start``."""
    done, speed, capacity = chain.work[start], chain.speeds[device], chain.capacity[device]
    by_work = bisect_right(chain.work, seconds, lo=start, key=lambda work: (work - done) / speed)
    if capacity == math.inf:
        return by_work - 1
    by_memory = bisect_right(
        chain.memory, chain.memory[start], lo=start, key=lambda memory: memory - capacity
    )
    return min(by_work, by_memory) - 1


def _cut_within_bands(chain: _Chain, seconds: float) -> Boundaries | None:
    """Return a cut by (4) within (6), read back from the end of the chain along the leftmost
    starts; None if there is none."""
    firsts, lasts = _leftmost(chain, seconds), _rightmost(chain, seconds)
    if firsts[0] > 0:
        return None
    reached = [np.ones(1, dtype=np.bool_)]
    for device in range(len(chain.speeds)):
        band = range(firsts[device + 1], lasts[device + 1] + 1)
        reached.append(_reach(chain, device, seconds, reached[-1], firsts[device], band))
        if not reached[-1].any():
            return None
    boundaries = [chain.num_items]
    for device in reversed(range(len(chain.speeds))):
        boundaries.append(
            _leftmost_start(chain, device, seconds, reached[device], firsts[device], boundaries[-1])
        )
    return boundaries[::-1]


def _reach(
    chain: _Chain, device: int, seconds: float, reached: NDArray[np.bool_], origin: int, band: range
) -> NDArray[np.bool_]:
    """Return which boundaries of ``band`` the device reaches by (4); ``reached`` are the starts
    from ``origin`` on."""
    ends = slice(band.start, band.stop)
    offered = np.where(
        reached, _offered(chain, device, origin, slice(origin, origin + len(reached))), -np.inf
    )
    last = np.minimum(np.arange(band.start - origin, band.stop - origin) - 1, len(reached) - 1)
    oldest = chain.memory_array[ends] - chain.capacity[device]
    if oldest[-1] <= chain.memory[origin]:
        # Memory bounds nothing here, so every window begins at the origin.
        best = np.concatenate((np.maximum.accumulate(offered), [-np.inf]))[last]
    else:
        first = np.maximum(np.searchsorted(chain.memory_array, oldest) - origin, 0)
        best = _window_maximum(offered, first, last)
    result = best >= _needed(chain, device, seconds, origin, ends)
    if chain.allow_empty:
        shared = origin + len(reached) - band.start
        if shared > 0:
            result[:shared] |= reached[band.start - origin :]
    return result


def _leftmost_start(
    chain: _Chain, device: int, seconds: float, reached: NDArray[np.bool_], origin: int, end: int
) -> int:
    """Return the first reached start from which the device reaches ``end``, by the same comparison
    as ``_reach``."""
    oldest = bisect_left(chain.memory, chain.memory[end] - chain.capacity[device])
    starts = slice(max(oldest, origin), min(end, origin + len(reached)))
    if starts.start < starts.stop:
        needed = _needed(chain, device, seconds, origin, slice(end, end + 1))
        good = _offered(chain, device, origin, starts) >= needed
        good &= reached[starts.start - origin : starts.stop - origin]
        index = int(np.argmax(good))
        if good[index]:
            return starts.start + index
    assert chain.allow_empty, "an end that was reached has a start"
    return end


def _offered(chain: _Chain, device: int, origin: int, starts: slice) -> FloatArray:
    """Return what each start offers: the left side of (4), with work counted from ``origin`` to
    keep the numbers small."""
    work = chain.work_array[starts] - chain.work[origin]
    return work / chain.speeds[device] - chain.cut[starts]


def _needed(chain: _Chain, device: int, seconds: float, origin: int, ends: slice) -> FloatArray:
    """Return what each end needs: the right side of (4)."""
    return (
        (chain.work_array[ends] - chain.work[origin]) / chain.speeds[device]
        + chain.cut[ends]
        - seconds
    )


def _window_maximum(
    values: FloatArray, first: NDArray[np.intp], last: NDArray[np.intp]
) -> FloatArray:
    """Return the largest of values[first], ..., values[last] for each window; -inf if last < first.

    Windows of 2**k to 2**(k+1) - 1 values are covered by two overlapping blocks of 2**k.
    """
    lengths = last - first + 1
    levels = np.frexp(np.maximum(lengths, 0).astype(np.float64))[1] - 1
    result = np.full(len(first), -np.inf)
    blocks = values
    for level in range(int(levels.max()) + 1):
        here = np.flatnonzero(levels == level)
        result[here] = np.maximum(blocks[first[here]], blocks[last[here] - (1 << level) + 1])
        blocks = np.maximum(blocks[: -(1 << level)], blocks[1 << level :])
    return result


def _priced(chain: _Chain, boundaries: Boundaries) -> ChainCut:
    """Return the cut with the cost (1) of every device."""
    costs = []
    for speed, i, j in zip(chain.speeds, boundaries, boundaries[1:], strict=False):
        boundary = float(chain.cut[i]), float(chain.cut[j])
        costs.append(
            (chain.work[j] - chain.work[i]) / speed + boundary[0] + boundary[1] if i < j else 0.0
        )
    seconds = max(costs)
    return ChainCut(tuple(boundaries[1:]), tuple(costs), costs.index(seconds), seconds)


def _what_binds(chain: _Chain) -> str:
    """Return which constraint no cut satisfies."""
    n, d = chain.num_items, len(chain.speeds)
    if not chain.allow_empty and n < d:
        left_over = f"allow empty devices, or leave {d - n} out"
        return f"{n} items cannot give each of {d} devices one; {left_over}"
    sizes = np.diff(chain.memory_array)
    heaviest, widest = int(np.argmax(sizes)), int(np.argmax(chain.capacity))
    if sizes[heaviest] > chain.capacity[widest]:
        needs, holds = SIZE.format(sizes[heaviest]), SIZE.format(chain.capacity[widest])
        largest = f"the largest, device {widest}, has {holds}"
        return f"item {heaviest} needs {needs}, more than any device holds; {largest}"
    if chain.memory[-1] > sum(chain.capacity):
        needs, holds = SIZE.format(chain.memory[-1]), SIZE.format(sum(chain.capacity))
        return (
            f"the {n} items need {needs}, more than the {holds} that the {d} devices hold together"
        )
    held = _rightmost(chain, math.inf)[-1]
    if held < n:
        filled = f"filled to capacity in this order, the {d} devices hold {held} of {n} items"
        return f"{filled}; item {held} no longer fits"
    return (
        f"memory leaves no cut in which each of the {d} devices takes an item; allow empty devices"
    )
