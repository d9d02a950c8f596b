"""Compute with regions of a tensor, or of a layer's weights: which are missing, and who sends them
to whom.

A region is an interval in every dim: rows and columns of a matrix, a part of a layer between 0 and
1, or an empty tuple for a number, which has no dims. This module does not need torch.

    (1)  the part of a region that is outside another is at most two regions for each dim
    (2)  a target receives what it wants and does not hold, each element once, from a holder that is
         chosen for the first missing element and then sends as much as it holds
    (3)  of several sets of holders, the first that has an element sends it
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

Interval = tuple[float, float]
"""Begin and end."""
Region = tuple[Interval, ...]
"""Intervals by dim."""
Holder = TypeVar("Holder", int, str)


def overlap(first: Region, second: Region) -> Region | None:
    """Return the region that lies in both; None if nothing does.

    >>> overlap(((0, 4), (0, 2)), ((3, 9), (1, 2))), overlap(((0, 4),), ((4, 9),)), overlap((), ())
    (((3, 4), (1, 2)), None, ())
    """
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(first, second, strict=True))
    return None if any(begin >= end for begin, end in common) else common


def outside(wanted: Iterable[Region], held: Iterable[Region]) -> list[Region]:
    """Return the parts of the wanted regions that lie in none of the held regions, by (1).

    >>> outside([((0, 10),)], [((3, 5),)]), outside([((0, 2), (0, 4))], [((0, 1), (1, 3))])
    ([((0, 3),), ((5, 10),)], [((1, 2), (0, 4)), ((0, 1), (0, 1)), ((0, 1), (3, 4))])
    """
    left = [region for region in wanted if all(begin < end for begin, end in region)]
    for hole in held:
        left = [part for region in left for part in _without(region, hole)]
    return left


def _without(region: Region, hole: Region) -> Iterator[Region]:
    common = overlap(region, hole)
    if common is None:
        yield region
        return
    for dim, ((begin, end), (first, last)) in enumerate(zip(region, common, strict=True)):
        for low, high in ((begin, first), (last, end)):
            if low < high:
                yield (*common[:dim], (low, high), *region[dim + 1 :])


def volume(regions: Iterable[Region]) -> float:
    """Return the number of elements in any of the regions, which may overlap.

    >>> volume([((0, 3), (0, 2)), ((2, 5), (0, 2))]), volume([()]), volume([])
    (10, 1, 0)
    """
    seen: list[Region] = []
    total: float = 0
    for region in regions:
        total += sum(
            math.prod(end - begin for begin, end in part) for part in outside([region], seen)
        )
        seen.append(region)
    return total


def deliveries(
    target: Holder,
    wanted: Iterable[Region],
    holders: Mapping[Holder, Sequence[Region]],
    choose: Callable[[list[Holder], Holder], Holder | None],
    *,
    rounding: float = 0,
) -> Iterator[tuple[Holder | None, Region]]:
    """Yield source and region of everything that ``target`` receives, by (2).

    ``choose`` receives the holders of the first missing element, which may be none, and returns a
    source.
    """
    missing = outside(wanted, holders.get(target, ()))
    while missing:
        region = missing.pop(0)
        if any(end - begin <= rounding for begin, end in region):
            continue
        firsts = ((name, _first_in(region, held, rounding)) for name, held in holders.items())
        offers = {name: offered for name, offered in firsts if offered is not None}
        source = choose(list(offers), target)
        part = overlap(region, offers[source]) if source in offers else region
        assert part is not None
        yield source, part
        missing[:0] = outside([region], [part])


def tiered_deliveries(
    target: Holder,
    wanted: Iterable[Region],
    tiers: Sequence[Mapping[Holder, Sequence[Region]]],
    choose: Callable[[list[Holder], Holder], Holder],
    *,
    rounding: float = 0,
) -> Iterator[tuple[int, Holder, Region]]:
    """Yield tier, source and region of everything that ``target`` receives from others, by (3) and
    in each tier by (2); what no tier has is omitted."""
    missing = list(wanted)
    for tier, holders in enumerate(tiers):
        later = outside(missing, itertools.chain.from_iterable(holders.values()))
        here = outside(missing, later)
        for source, region in deliveries(target, here, holders, choose, rounding=rounding):
            if source is not None:
                yield tier, source, region
        missing = later


def _first_in(region: Region, regions: Sequence[Region], rounding: float) -> Region | None:
    """Return the one of ``regions`` that has the first element of ``region``; None if there is
    none."""
    for held in regions:
        places = zip(held, region, strict=True)
        if all(low <= begin + rounding < high for (low, high), (begin, _) in places):
            return held
    return None


def shared_regions(held: Mapping[int, Sequence[Region]]) -> list[tuple[Region, tuple[int, ...]]]:
    """Return disjoint regions with all holders of each; they cover every element that has a holder.

    >>> shared_regions({0: [((0, 6),)], 1: [((6, 10),)], 2: [((0, 5),)], 3: [((5, 10),)]})
    [(((0, 5),), (0, 2)), (((5, 6),), (0, 3)), (((6, 10),), (1, 3))]
    """
    result: list[tuple[Region, tuple[int, ...]]] = []
    for holder, regions in sorted(held.items()):
        split: list[tuple[Region, tuple[int, ...]]] = []
        for region, others in result:
            common = [part for own in regions if (part := overlap(region, own)) is not None]
            split += [(part, (*others, holder)) for part in common]
            split += [(part, others) for part in outside([region], common)]
        alone = outside(regions, [region for region, _ in result])
        result = split + [(region, (holder,)) for region in alone]
    return sorted(result)
