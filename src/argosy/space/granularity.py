"""Units of devices, coarse to fine: a search over few large units takes an instant and prunes the
next, finer one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from argosy.space.option import Vector
from argosy.space.pool import Pool

_MOST_UNITS = 12
"""Units of a pool in a search for even plans."""


def granularities(pools: Sequence[Pool]) -> Iterator[Vector]:
    """Devices of each pool that are taken together, from a few units per pool to single devices."""
    seen = set()
    for most in (3, 6, 12, 24, 10**6):
        units = tuple(_unit(pool, most) for pool in pools)
        if units not in seen:
            seen.add(units)
            yield units


def _unit(pool: Pool, most: int) -> int:
    """The smallest unit that gives at most ``most`` of them, aligned with the pool's nodes."""
    sizes = [size for size in range(1, pool.per_node + 1) if pool.per_node % size == 0]
    sizes += [
        pool.per_node * number
        for number in range(2, len(pool.nodes) + 1)
        if len(pool.nodes) % number == 0
    ]
    return next((size for size in sizes if pool.count // size <= most), pool.count)


def even_unit(count: int, replicas: int) -> int:
    """Devices of a pool that an even plan takes together: one of every replica, or more where there
    would be many."""
    unit = replicas
    while count // unit > _MOST_UNITS:
        unit *= 2
    return unit


def node_unit(pool: Pool) -> int:
    """Devices of a pool that a plan of whole nodes takes together: a node, or more where there
    would be many."""
    unit = pool.per_node
    while pool.count // unit > _MOST_UNITS:
        unit *= 2
    return unit
