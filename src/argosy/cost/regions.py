"""Regions of a tensor, or of a layer's weights: what is missing, and who sends it to whom. Needs no
torch.

A region is an interval in every dim: rows and columns of a matrix, a part of a layer between 0 and
1, or nothing at all of a number, which has no dims.

    (1)  what lies in a region and not in another is at most two regions for each dim
    (2)  a target receives what it wants and does not hold, each element once, from a holder that is
         chosen for the first element that is missing and then sends as much as it holds
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

Interval = tuple[float, float]
"""Begin and end."""
Region = tuple[Interval, ...]
"""By dim."""
Holder = TypeVar("Holder", int, str)


def overlap(one: Region, other: Region) -> Region | None:
    """What lies in both regions; None if nothing does.

    >>> overlap(((0, 4), (0, 2)), ((3, 9), (1, 2))), overlap(((0, 4),), ((4, 9),)), overlap((), ())
    (((3, 4), (1, 2)), None, ())
    """
    found = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return None if any(begin >= end for begin, end in found) else found


def outside(wanted: Iterable[Region], held: Iterable[Region]) -> list[Region]:
    """(1), for several regions: what of those that are wanted lies in none of those that are held.

    >>> outside([((0, 10),)], [((3, 5),)]), outside([((0, 2), (0, 4))], [((0, 1), (1, 3))])
    ([((0, 3),), ((5, 10),)], [((1, 2), (0, 4)), ((0, 1), (0, 1)), ((0, 1), (3, 4))])
    """
    left = [region for region in wanted if all(begin < end for begin, end in region)]
    for other in held:
        left = [part for region in left for part in _without(region, other)]
    return left


def _without(region: Region, other: Region) -> Iterator[Region]:
    common = overlap(region, other)
    if common is None:
        yield region
        return
    for dim, ((begin, end), (first, last)) in enumerate(zip(region, common, strict=True)):
        for low, high in ((begin, first), (last, end)):
            if low < high:
                yield (*common[:dim], (low, high), *region[dim + 1 :])


def volume(regions: Iterable[Region]) -> float:
    """Elements in any of some regions, which may overlap.

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
    """(2): source and region of all that ``target`` receives.

    ``choose`` takes one of those that hold the first element that is missing, or another if none
    does.
    """
    missing = outside(wanted, holders.get(target, ()))
    while missing:
        region = missing.pop(0)
        if any(end - begin <= rounding for begin, end in region):
            continue
        found = ((name, _first_in(region, regions, rounding)) for name, regions in holders.items())
        there = {name: held for name, held in found if held is not None}
        source = choose(list(there), target)
        part = overlap(region, there[source]) if source in there else region
        assert part is not None
        yield source, part
        missing[:0] = outside([region], [part])


def _first_in(region: Region, regions: Sequence[Region], rounding: float) -> Region | None:
    """The one of some regions that has the first element of another."""
    for held in regions:
        places = zip(held, region, strict=True)
        if all(low <= begin + rounding < high for (low, high), (begin, _) in places):
            return held
    return None


def shared_regions(held: Mapping[int, Sequence[Region]]) -> list[tuple[Region, tuple[int, ...]]]:
    """Regions and all that hold each of them; every element that anybody holds is in one region.

    >>> shared_regions({0: [((0, 6),)], 1: [((6, 10),)], 2: [((0, 5),)], 3: [((5, 10),)]})
    [(((0, 5),), (0, 2)), (((5, 6),), (0, 3)), (((6, 10),), (1, 3))]
    """
    found: list[tuple[Region, tuple[int, ...]]] = []
    for holder, regions in sorted(held.items()):
        split: list[tuple[Region, tuple[int, ...]]] = []
        for region, others in found:
            common = [part for own in regions if (part := overlap(region, own)) is not None]
            split += [(part, (*others, holder)) for part in common]
            split += [(part, others) for part in outside([region], common)]
        alone = outside(regions, [region for region, _ in found])
        found = split + [(region, (holder,)) for region in alone]
    return sorted(found)
