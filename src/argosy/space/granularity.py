"""Choose units of devices, from coarse to fine: a search over few large units is fast, and its
result prunes the next, finer one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from argosy.space.option import Vector
from argosy.space.pool import Pool

# Searches for even plans and for plans of whole nodes divide a pool into at most this many units,
# which bounds their time.
_MOST_UNITS = 12


def granularities(pools: Sequence[Pool]) -> Iterator[Vector]:
    """Yield the number of devices of each pool that form a unit, from a few units per pool to
    single devices."""
    seen = set()
    for most in (3, 6, 12, 24, 10**6):
        units = tuple(_unit(pool, most) for pool in pools)
        if units not in seen:
            seen.add(units)
            yield units


def _unit(pool: Pool, most: int) -> int:
    """Return the smallest number of devices, aligned with the pool's nodes, that divides a pool
    into at most ``most`` units."""
    sizes = [size for size in range(1, pool.per_node + 1) if pool.per_node % size == 0]
    sizes += [
        pool.per_node * number
        for number in range(2, len(pool.nodes) + 1)
        if len(pool.nodes) % number == 0
    ]
    return next((size for size in sizes if pool.count // size <= most), pool.count)


def even_unit(count: int, replicas: int) -> int:
    """Return the devices of a pool that an even plan allocates together: one per replica, or more
    if a pool would have over ``_MOST_UNITS`` units."""
    unit = replicas
    while count // unit > _MOST_UNITS:
        unit *= 2
    return unit


def node_unit(pool: Pool) -> int:
    """Return the devices of a pool that a plan of whole nodes allocates together: one node, or more
    if a pool would have over ``_MOST_UNITS`` units."""
    unit = pool.per_node
    while pool.count // unit > _MOST_UNITS:
        unit *= 2
    return unit
