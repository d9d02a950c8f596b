"""From numbers of devices to devices: which ones each stage takes.

A stage's replicas sit in as few nodes as possible, no replica crosses a node unless it fills several, and a stage that
fits into what is left of a node already begun goes there, next to its neighbour; otherwise it takes the emptiest
nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from argosy.plan.plan import Replica
from argosy.space.option import Option, Part
from argosy.space.pool import Pool


def place_stages(pools: Sequence[Pool], options: Sequence[Option]) -> list[tuple[Replica, ...]]:
    """The replicas of every stage, in stage order."""
    placed = _placed(pools, options)
    if placed is None:  # no plan that wins, but perhaps the one that comes closest where nothing fits
        joined = [replace(pool, nodes=(tuple(itertools.chain(*pool.nodes)),)) for pool in pools]
        placed = _placed(joined, options)
    assert placed is not None, "there are devices for all"
    return [tuple(itertools.chain(*(placed[stage, part] for part in o.parts))) for stage, o in enumerate(options)]


def can_place(pools: Sequence[Pool], options: Sequence[Option]) -> bool:
    """Whether all groups find a node; a question only where widths do not divide nodes, and there are several."""
    parts = (part for option in options for part in option.parts)
    sizes = ((part.width, pools[part.pool].per_node, len(pools[part.pool].nodes)) for part in parts)
    is_certain = all(nodes == 1 or size % width == 0 or width % size == 0 for width, size, nodes in sizes)
    return is_certain or _placed(pools, options) is not None


def _placed(pools: Sequence[Pool], options: Sequence[Option]) -> dict[tuple[int, Part], list[Replica]] | None:
    parts = [(stage, part) for stage, option in enumerate(options) for part in option.parts]
    return _place(pools, parts) or _place(pools, sorted(parts, key=lambda item: -item[1].width))


def _place(pools: Sequence[Pool], parts: Sequence[tuple[int, Part]]) -> dict[tuple[int, Part], list[Replica]] | None:
    """Parts of stages in the order given, which may leave no node for a wide group: then None. Widest first never does
    where widths divide one another."""
    free = [[list(node) for node in pool.nodes] for pool in pools]
    placed = {}
    for stage, part in parts:
        groups = _take(free[part.pool], part.width, part.replicas, pools[part.pool].per_node)
        if len(groups) < part.replicas:
            return None
        samples = [part.samples + (index < part.extra) for index in range(part.replicas)]
        placed[stage, part] = [Replica(devices=tuple(g), samples=n) for g, n in zip(groups, samples, strict=True)]
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
