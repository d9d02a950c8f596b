"""List layouts of uniform pipelines: the stages that an expert would write by hand, before layers
are assigned.

Pools form a row, in every promising order and with some omitted; each is cut into stages of one
number of devices, all of one tensor width; or into two stages of which one has few devices; or the
first or the last stage is divided into single devices. If pools do not divide evenly, the stage at
the boundary mixes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from argosy.solve.search.shape import MOST_STAGES
from argosy.space.enumerate import Scope
from argosy.space.option import Vector
from argosy.space.pool import Pool
from argosy.space.price import Prices

# A stage of at most this many devices is divided into single devices.
_MOST_APART = 4
# At most this many pools are taken in every order; more only from the fastest to the slowest and
# back.
_PERMUTED = 3


class Section(NamedTuple):
    """A number of devices of one pool, or of several that follow one another in the row, that form
    groups of a tensor width."""

    taken: tuple[tuple[int, int], ...]
    """Pairs (pool, devices)."""
    width: int

    @property
    def devices(self) -> int:
        return sum(number for _, number in self.taken)


# The sections of a pipeline, one per stage.
Layout = tuple[Section, ...]


def layouts_of(prices: Prices, scope: Scope) -> Iterator[Layout]:
    """Yield layouts for every order of pools, number of devices per stage, and width, also with the
    ends divided."""
    most, most_stages = prices.most_width, min(MOST_STAGES, prices.num_layers)
    for pools in _orders(prices.pools):
        for stages in _cut_rows(pools, most_stages, most):
            if not scope.allows_width(stages[0].width):
                continue
            yield stages
            if scope.allows_width(1):
                yield from _ends_apart(stages, most_stages)


def _cut_rows(pools: Sequence[Pool], most_stages: int, widest_group: int) -> Iterator[Layout]:
    """Yield stages of one number of devices, of a node, or of a pool, and two stages of which one
    has few devices; widths above 1 only if stages are aligned with nodes."""
    total = sum(pool.count for pool in pools)
    for size in (
        number
        for number in range(1, total + 1)
        if total % number == 0 and total // number <= most_stages
    ):
        yield tuple(_along(pools, [size] * (total // size)))
    for few in (number for number in (1, 2, 4, 8, 16) if 2 * number < total):
        for sizes in ((total - few, few), (few, total - few)):
            yield tuple(_along(pools, sizes))
    common = math.gcd(*(pool.count for pool in pools))
    equal = {(number,) * len(pools) for number in range(2, common + 1) if common % number == 0}
    equal |= {tuple(pool.per_node for pool in pools), tuple(pool.count for pool in pools)}
    for stage_sizes in sorted(equal):
        pairs = list(zip(pools, stage_sizes, strict=True))
        if not all(_divides(pool, number) for pool, number in pairs):
            continue
        if sum(pool.count // number for pool, number in pairs) > most_stages:
            continue
        for width in _widths(pools, stage_sizes, widest_group):
            if width > 1 or len(set(stage_sizes)) > 1:
                rows = (
                    [Section(((pool.index, number),), width)] * (pool.count // number)
                    for pool, number in pairs
                )
                yield tuple(itertools.chain(*rows))


def _along(pools: Sequence[Pool], sizes: Sequence[int]) -> Iterator[Section]:
    """Yield sections of the row of all devices with the given sizes; equal neighbours are one
    object."""
    left = [(pool.index, pool.count) for pool in pools]
    section = Section((), 1)
    for size in sizes:
        taken, missing = [], size
        while missing:
            pool, number = left.pop(0)
            taken.append((pool, min(number, missing)))
            if number > missing:
                left.insert(0, (pool, number - missing))
            missing -= min(number, missing)
        if section.taken != tuple(taken):
            section = Section(tuple(taken), 1)
        yield section


def _ends_apart(stages: Layout, most_stages: int) -> Iterator[Layout]:
    """Yield layouts with the first stage, the last, or both as single devices: an embedding or a
    head that share weights may be faster without replicas."""
    first, last = stages[0].devices, stages[-1].devices
    is_first, is_last = 1 < first <= _MOST_APART, 1 < last <= _MOST_APART and len(stages) > 1
    if is_first and len(stages) - 1 + first <= most_stages:
        yield (*_singles(stages[0]), *stages[1:])
    if is_last and len(stages) - 1 + last <= most_stages:
        yield (*stages[:-1], *_singles(stages[-1]))
    if is_first and is_last and len(stages) - 2 + first + last <= most_stages:
        yield (*_singles(stages[0]), *stages[1:-1], *_singles(stages[-1]))


def _singles(stage: Section) -> Iterator[Section]:
    for pool, number in stage.taken:
        yield from [Section(((pool, 1),), 1)] * number


def _orders(pools: Sequence[Pool]) -> Iterator[tuple[Pool, ...]]:
    """Yield rows of pools, with some omitted."""
    if len(pools) <= _PERMUTED:
        for number in range(1, len(pools) + 1):
            yield from itertools.permutations(pools, number)
        return
    fastest = sorted(
        pools,
        key=lambda pool: -pool.device.efficiency * max(rate for _, rate in pool.device.kind.flops),
    )
    for number in range(1, len(pools) + 1):
        yield tuple(fastest[:number])
        yield tuple(reversed(fastest[:number]))


def _divides(pool: Pool, number: int) -> bool:
    """Return whether stages of ``number`` devices fill the pool and are aligned with its nodes."""
    return pool.count % number == 0 and (pool.per_node % number == 0 or number % pool.per_node == 0)


def _widths(pools: Sequence[Pool], sizes: Vector, most: int) -> Iterator[int]:
    for width in range(1, min(most, *(pool.per_node for pool in pools), *sizes) + 1):
        if all(
            pool.per_node % width == 0 and taken % width == 0
            for pool, taken in zip(pools, sizes, strict=True)
        ):
            yield width
