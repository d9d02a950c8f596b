"""Choose the devices of every stage, given the numbers of devices it takes from each pool.

The devices of a pool form a *row*, node by node. Stages take the next devices of the row, in stage
order:

    (1)  a part of a stage that fits into the rest of a node begins there,
    (2)  any other part begins with the next node; the devices it skips stay idle.

So numbers alone decide which stages are neighbours inside a node, and the search can price the
transfers between them (``solve.search.bounds``). If a row is too short because of (2), every part
takes the fullest partly used node that has room for it, or else the emptiest nodes; such plans are
outside the scope of a certificate.

No group of devices that works on one layer crosses a node unless it fills several.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from argosy.plan.plan import Replica
from argosy.space.option import Option, PoolPart
from argosy.space.pool import Pool

Places = tuple[tuple[int, int], ...]
"""For each part of a stage, the first place in the row of its pool and the place after its last
one."""


def row_places(pools: Sequence[Pool], options: Sequence[Option]) -> list[Places] | None:
    """Return the places of every stage by (1) and (2), or None if a row is too short."""
    used = [0] * len(pools)
    stage_places: list[Places] = []
    for option in options:
        places = []
        for part in option.parts:
            size = pools[part.pool].per_node
            begin = row_start(used[part.pool], part.devices, size)
            end = begin + part.devices
            if end > pools[part.pool].count or (size % part.width and part.devices > size):
                return None
            places.append((begin, end))
            used[part.pool] = end
        stage_places.append(tuple(places))
    return stage_places


def row_start(used: int, devices: int, per_node: int) -> int:
    """Return the place at which ``devices`` begin, if ``used`` places of the row are taken.

    >>> [row_start(2, devices, 4) for devices in (1, 2, 3, 4, 8)]
    [2, 2, 4, 4, 4]
    """
    inside = used % per_node
    return used if not inside or inside + devices <= per_node else used - inside + per_node


PlacedStages = dict[tuple[tuple[PoolPart, ...], Places], tuple[Replica, ...]]
"""The replicas of stages, by their parts and places."""


def place_stages(
    pools: Sequence[Pool], options: Sequence[Option], known: PlacedStages | None = None
) -> list[tuple[Replica, ...]]:
    """Return the replicas of every stage, in stage order.

    ``known`` has the replicas of other plans, of which equal ones are returned again, and is added
    to.
    """
    places = row_places(pools, options)
    if places is not None:
        known = {} if known is None else known
        stages = [(option.parts, at) for option, at in zip(options, places, strict=True)]
        for stage in stages:
            if stage not in known:
                known[stage] = _placed(pools, *stage)
        return [known[stage] for stage in stages]
    placed = _best_fit(pools, options)
    if placed is None:
        # Such a plan never wins, but it may be the closest one if nothing fits.
        joined = [replace(pool, nodes=(tuple(itertools.chain(*pool.nodes)),)) for pool in pools]
        placed = _best_fit(joined, options)
    assert placed is not None, "there are devices for all"
    return [
        tuple(itertools.chain(*(placed[stage, part] for part in option.parts)))
        for stage, option in enumerate(options)
    ]


def _placed(
    pools: Sequence[Pool], parts: Sequence[PoolPart], places: Places
) -> tuple[Replica, ...]:
    """Return the replicas of one stage."""
    rows = (itertools.chain(*pools[part.pool].nodes) for part in parts)
    ranges = zip(parts, rows, places, strict=True)
    replicas = (_replicas(part, tuple(itertools.islice(row, *at))) for part, row, at in ranges)
    return tuple(itertools.chain(*replicas))


def _replicas(part: PoolPart, names: Sequence[str]) -> list[Replica]:
    samples = [part.samples + (index < part.extra) for index in range(part.replicas)]
    groups = [tuple(names[at : at + part.width]) for at in range(0, part.devices, part.width)]
    return [
        Replica(devices=group, samples=number)
        for group, number in zip(groups, samples, strict=True)
    ]


def can_place(pools: Sequence[Pool], options: Sequence[Option]) -> bool:
    """Return whether every group of devices fits into a node; this always holds if widths divide
    nodes or there is one node."""
    parts = (part for option in options for part in option.parts)
    sizes = ((part.width, pools[part.pool].per_node, len(pools[part.pool].nodes)) for part in parts)
    is_certain = all(
        nodes == 1 or size % width == 0 or width % size == 0 for width, size, nodes in sizes
    )
    return is_certain or _best_fit(pools, options) is not None


def _best_fit(
    pools: Sequence[Pool], options: Sequence[Option]
) -> dict[tuple[int, PoolPart], list[Replica]] | None:
    """Place parts in stage order; if no node is left for a wide group, place the widest parts
    first, which succeeds if widths divide one another."""
    parts = [(stage, part) for stage, option in enumerate(options) for part in option.parts]
    return _place(pools, parts) or _place(pools, sorted(parts, key=lambda item: -item[1].width))


def _place(
    pools: Sequence[Pool], parts: Sequence[tuple[int, PoolPart]]
) -> dict[tuple[int, PoolPart], list[Replica]] | None:
    """Place parts of stages in the given order; return None if no node has room for a group."""
    free = [[list(node) for node in pool.nodes] for pool in pools]
    placed = {}
    for stage, part in parts:
        groups = _take(free[part.pool], part.width, part.replicas, pools[part.pool].per_node)
        if len(groups) < part.replicas:
            return None
        placed[stage, part] = _replicas(part, list(itertools.chain(*groups)))
    return placed


def _take(nodes: list[list[str]], width: int, count: int, size: int) -> list[list[str]]:
    """Remove up to ``count`` groups of ``width`` devices from the nodes and return them."""
    if width > size:
        return _take_nodes(nodes, width, count, size)
    begun = [node for node in nodes if node and len(node) < max(map(len, nodes))]
    home = min((node for node in begun if len(node) // width >= count), key=len, default=None)
    order = [home] if home is not None else sorted(nodes, key=len, reverse=True)
    groups: list[list[str]] = []
    for node in order:
        while len(node) >= width and len(groups) < count:
            groups.append(node[:width])
            del node[:width]
    return groups


def _take_nodes(nodes: list[list[str]], width: int, count: int, size: int) -> list[list[str]]:
    """Remove up to ``count`` groups of completely free nodes and return them."""
    free = [node for node in nodes if len(node) == size]
    groups: list[list[str]] = []
    while len(free) * size >= width and len(groups) < count:
        taken, free = free[: width // size], free[width // size :]
        groups.append([name for node in taken for name in node])
        for node in taken:
            node.clear()
    return groups
