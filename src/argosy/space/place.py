"""From numbers of devices to devices: which ones each stage takes.

A stage's replicas sit in as few nodes as possible, no tensor-parallel group crosses a node, and a stage that fits
into what is left of a node already begun goes there, next to its neighbour; otherwise it takes the emptiest nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy.plan.plan import Replica
from argosy.space.option import Option
from argosy.space.pool import Pool


def place_stages(pools: Sequence[Pool], options: Sequence[Option]) -> list[tuple[Replica, ...]]:
    """The replicas of every stage, in stage order."""
    free = [[list(node) for node in pool.nodes] for pool in pools]
    placed = []
    for option in options:
        replicas: list[Replica] = []
        for part in option.parts:
            groups = _take(free[part.pool], part.width, part.replicas)
            samples = [part.samples + (index < part.extra) for index in range(part.replicas)]
            replicas += [Replica(devices=tuple(g), samples=n) for g, n in zip(groups, samples, strict=True)]
        placed.append(tuple(replicas))
    return placed


def _take(nodes: list[list[str]], width: int, count: int) -> list[list[str]]:
    """``count`` groups of ``width`` devices; the nodes give them up."""
    begun = [node for node in nodes if node and len(node) < max(map(len, nodes))]
    home = min((node for node in begun if len(node) // width >= count), key=len, default=None)
    order = [home] if home is not None else sorted(nodes, key=len, reverse=True)
    groups: list[list[str]] = []
    for node in order:
        while len(node) >= width and len(groups) < count:
            groups.append(node[:width])
            del node[:width]
    assert len(groups) == count, "widths divide the devices of a node"
    return groups
