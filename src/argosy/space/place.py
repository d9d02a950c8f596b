"""From numbers of devices to devices: which ones each stage takes.

The devices of a pool stand in a *row*, node by node. Stages take the next ones of the row, in stage
order:

    (1)  a part of a stage that fits into what is left of a node begins there,
    (2)  any other begins with the next node, and leaves what it passes idle.

So numbers alone decide which stages are neighbours inside a node, and the search can price
hand-overs by it (``solve.search.bounds``). Where the row is too short because of (2), every part
takes the fullest node begun that has room for it, or else the emptiest nodes; such plans are
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
"""Per part of a stage, its first place in the row of its pool and the place behind its last one."""


def row_places(pools: Sequence[Pool], options: Sequence[Option]) -> list[Places] | None:
    """The places of every stage by (1) and (2); None if a row is too short."""
    used = [0] * len(pools)
    found: list[Places] = []
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
        found.append(tuple(places))
    return found


def row_start(used: int, devices: int, per_node: int) -> int:
    """Where so many devices begin, if ``used`` places of the row are taken or passed.

    >>> [row_start(2, devices, 4) for devices in (1, 2, 3, 4, 8)]
    [2, 2, 4, 4, 4]
    """
    inside = used % per_node
    return used if not inside or inside + devices <= per_node else used - inside + per_node


def place_stages(pools: Sequence[Pool], options: Sequence[Option]) -> list[tuple[Replica, ...]]:
    """The replicas of every stage, in stage order."""
    places = row_places(pools, options)
    if places is not None:
        rows = [tuple(itertools.chain(*pool.nodes)) for pool in pools]
        return [
            tuple(
                replica
                for part, (begin, end) in zip(option.parts, stage, strict=True)
                for replica in _replicas(part, rows[part.pool][begin:end])
            )
            for option, stage in zip(options, places, strict=True)
        ]
    placed = _best_fit(pools, options)
    if (
        placed is None
    ):  # no plan that wins, but perhaps the one that comes closest where nothing fits
        joined = [replace(pool, nodes=(tuple(itertools.chain(*pool.nodes)),)) for pool in pools]
        placed = _best_fit(joined, options)
    assert placed is not None, "there are devices for all"
    return [
        tuple(itertools.chain(*(placed[stage, part] for part in o.parts)))
        for stage, o in enumerate(options)
    ]


def _replicas(part: PoolPart, names: Sequence[str]) -> list[Replica]:
    samples = [part.samples + (index < part.extra) for index in range(part.replicas)]
    groups = [tuple(names[at : at + part.width]) for at in range(0, part.devices, part.width)]
    return [
        Replica(devices=group, samples=number)
        for group, number in zip(groups, samples, strict=True)
    ]


def can_place(pools: Sequence[Pool], options: Sequence[Option]) -> bool:
    """Whether every group of devices finds a node; always where widths divide nodes, or there is
    one node."""
    parts = (part for option in options for part in option.parts)
    sizes = ((part.width, pools[part.pool].per_node, len(pools[part.pool].nodes)) for part in parts)
    is_certain = all(
        nodes == 1 or size % width == 0 or width % size == 0 for width, size, nodes in sizes
    )
    return is_certain or _best_fit(pools, options) is not None


def _best_fit(
    pools: Sequence[Pool], options: Sequence[Option]
) -> dict[tuple[int, PoolPart], list[Replica]] | None:
    """In stage order; if that leaves no node for a wide group, the widest first, which never does
    where widths divide one another."""
    parts = [(stage, part) for stage, option in enumerate(options) for part in option.parts]
    return _place(pools, parts) or _place(pools, sorted(parts, key=lambda item: -item[1].width))


def _place(
    pools: Sequence[Pool], parts: Sequence[tuple[int, PoolPart]]
) -> dict[tuple[int, PoolPart], list[Replica]] | None:
    """Parts of stages in the order given; None if there is no node for a group."""
    free = [[list(node) for node in pool.nodes] for pool in pools]
    placed = {}
    for stage, part in parts:
        groups = _take(free[part.pool], part.width, part.replicas, pools[part.pool].per_node)
        if len(groups) < part.replicas:
            return None
        placed[stage, part] = _replicas(part, list(itertools.chain(*groups)))
    return placed


def _take(nodes: list[list[str]], width: int, count: int, size: int) -> list[list[str]]:
    """Up to ``count`` groups of ``width`` devices; the nodes give them up."""
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
    """Up to ``count`` groups of whole nodes that nobody has begun."""
    free = [node for node in nodes if len(node) == size]
    groups: list[list[str]] = []
    while len(free) * size >= width and len(groups) < count:
        taken, free = free[: width // size], free[width // size :]
        groups.append([name for node in taken for name in node])
        for node in taken:
            node.clear()
    return groups
