"""Layouts of uniform pipelines: the stages that a careful person would write down, before layers
are shared out.

Pools in a row, in every order that is worth it and with some left out; each cut into stages of one
number of devices, all of one tensor width; two stages of which one has few devices; the first or
the last stage taken apart into single devices. Where pools do not divide evenly, the stage at the
seam mixes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from argosy.solve.search.shape import MOST_STAGES
from argosy.space.enumerate import Scope
from argosy.space.option import Vector
from argosy.space.pool import Pool
from argosy.space.price import Prices, widest

_MOST_APART = 4
"""Devices of a stage that is taken apart."""
_PERMUTED = 3
"""Up to so many pools stand in every order, more only from the fastest to the slowest and back."""


class Section(NamedTuple):
    """So many devices of one pool, or of several that follow one another in the row, in groups of a
    tensor width."""

    taken: tuple[tuple[int, int], ...]
    """(pool, devices)"""
    width: int

    @property
    def devices(self) -> int:
        return sum(number for _, number in self.taken)


Layout = tuple[Section, ...]


def layouts_of(prices: Prices, scope: Scope) -> Iterator[Layout]:
    """Every order of pools, number of devices to a stage, and width, and with its ends taken
    apart."""
    most, most_stages = widest(prices.chain.layers), min(MOST_STAGES, prices.num_layers)
    for pools in _orders(prices.pools):
        for stages in _cut_rows(pools, most_stages, most):
            if not scope.allows_width(stages[0].width):
                continue
            yield stages
            if scope.allows_width(1):
                yield from (layout for layout in _ends_apart(stages) if len(layout) <= most_stages)


def _cut_rows(pools: Sequence[Pool], most_stages: int, widest_group: int) -> Iterator[Layout]:
    """Stages of one number of devices, of a node, or of a pool, and two stages of which one has few
    devices; wider than 1 only where they lie along the nodes."""
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
    equal = {
        tuple(number for _ in pools) for number in range(2, max(pool.count for pool in pools) + 1)
    }
    equal |= {tuple(pool.per_node for pool in pools), tuple(pool.count for pool in pools)}
    for each in sorted(equal):
        pairs = list(zip(pools, each, strict=True))
        if not all(_divides(pool, number) for pool, number in pairs):
            continue
        if sum(pool.count // number for pool, number in pairs) > most_stages:
            continue
        for width in _widths(pools, each, widest_group):
            if width > 1 or len(set(each)) > 1:
                rows = (
                    [Section(((pool.index, number),), width)] * (pool.count // number)
                    for pool, number in pairs
                )
                yield tuple(itertools.chain(*rows))


def _along(pools: Sequence[Pool], sizes: Sequence[int]) -> Iterator[Section]:
    """The row of all devices, so many at a time; equal neighbours are one and the same."""
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


def _ends_apart(stages: Layout) -> Iterator[Layout]:
    """The first stage, the last, or both as single devices: an embedding or a head that share
    weights may be better off without replicas."""
    first, last = (1 < stages[at].devices <= _MOST_APART for at in (0, -1))
    if first:
        yield (*_singles(stages[0]), *stages[1:])
    if last and len(stages) > 1:
        yield (*stages[:-1], *_singles(stages[-1]))
    if first and last and len(stages) > 1:
        yield (*_singles(stages[0]), *stages[1:-1], *_singles(stages[-1]))


def _singles(stage: Section) -> Iterator[Section]:
    for pool, number in stage.taken:
        yield from [Section(((pool, 1),), 1)] * number


def _orders(pools: Sequence[Pool]) -> Iterator[tuple[Pool, ...]]:
    """Pools in a row, some left out."""
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
    """Whether stages of so many devices fill the pool and lie along its nodes."""
    return pool.count % number == 0 and (pool.per_node % number == 0 or number % pool.per_node == 0)


def _widths(pools: Sequence[Pool], sizes: Vector, most: int) -> Iterator[int]:
    for width in range(1, min(most, *(pool.per_node for pool in pools), *sizes) + 1):
        if all(
            pool.per_node % width == 0 and taken % width == 0
            for pool, taken in zip(pools, sizes, strict=True)
        ):
            yield width
