"""Who sends what to whom: rings of replicas, and stages with different replica counts and widths."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from argosy.plan.plan import Replica

Name = TypeVar("Name", int, str)


def ring_pairs(groups: Sequence[Sequence[Name]], order: Callable[[Name], int]) -> dict[tuple[Name, Name], float]:
    """(source, target): share of a payload that passes from one device to the next when groups of devices, each of
    which holds all of it in equal slices, pass it around once. Groups of width w hold w slices; each slice has its
    own ring.

    >>> ring_pairs([["a", "b"], ["c"]], ord)
    {('a', 'c'): 0.25, ('c', 'a'): 0.25, ('b', 'c'): 0.25, ('c', 'b'): 0.25}
    """
    slices = math.lcm(*(len(group) for group in groups))
    pairs: dict[tuple[Name, Name], float] = defaultdict(float)
    for piece in range(slices):
        ring = sorted({group[piece * len(group) // slices] for group in groups}, key=order)
        for at in range(len(ring) if len(ring) > 1 else 0):
            pairs[ring[at], ring[(at + 1) % len(ring)]] += (len(ring) - 1) / len(ring) / slices
    return dict(pairs)


def overlaps(sources: Sequence[Replica], targets: Sequence[Replica]) -> Iterator[tuple[Replica, Replica, int]]:
    """Pairs of replicas that hold the same samples of a micro-batch, and how many.

    >>> one, two = Replica(devices=("a",), samples=3), Replica(devices=("b",), samples=1)
    >>> whole = Replica(devices=("c",), samples=4)
    >>> [count for *_, count in overlaps([one, two], [whole])]
    [3, 1]
    """
    start = 0
    for source in sources:
        begin = 0
        for target in targets:
            common = min(start + source.samples, begin + target.samples) - max(start, begin)
            if common > 0:
                yield source, target, common
            begin += target.samples
        start += source.samples


def share_overlaps(sources: Sequence[float], targets: Sequence[float]) -> Iterator[tuple[int, int, float]]:
    """Pairs of members of two tensor-parallel groups that hold the same part of a tensor split along one dim, and the
    part.

    >>> list(share_overlaps([0.5, 0.5], [1.0]))
    [(0, 0, 0.5), (1, 0, 0.5)]
    """
    start = 0.0
    for source, share in enumerate(sources):
        begin = 0.0
        for target, other in enumerate(targets):
            common = min(start + share, begin + other) - max(start, begin)
            if common > 1e-12:
                yield source, target, common
            begin += other
        start += share
