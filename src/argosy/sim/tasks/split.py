"""Who sends what to whom between stages with different replica counts and widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from argosy.plan.plan import Replica


def overlaps(
    sources: Sequence[Replica], targets: Sequence[Replica]
) -> Iterator[tuple[Replica, Replica, int]]:
    """Pairs of replicas that hold the same samples of a micro-batch, and how many.

    >>> one, two = Replica(devices=("a",), samples=3), Replica(devices=("b",), samples=1)
    >>> whole = Replica(devices=("c",), samples=4)
    >>> [count for *_, count in overlaps([one, two], [whole])]
    [3, 1]
    """
    start, first, begin = 0, 0, 0
    for source in sources:
        end = start + source.samples
        while first < len(targets) and begin + targets[first].samples <= start:
            begin += targets[first].samples
            first += 1
        there = begin
        at = first
        while at < len(targets) and there < end:
            common = min(end, there + targets[at].samples) - max(start, there)
            if common > 0:
                yield source, targets[at], common
            there += targets[at].samples
            at += 1
        start = end


def share_overlaps(
    sources: Sequence[float], targets: Sequence[float]
) -> Iterator[tuple[int, int, float]]:
    """Pairs of members of two tensor-parallel groups that hold the same part of a tensor split
    along one dim, and the part.

    >>> list(share_overlaps([0.5, 0.5], [1.0]))
    [(0, 0, 0.5), (1, 0, 0.5)]
    """
    if sources == targets:  # as they mostly are
        yield from ((at, at, share) for at, share in enumerate(sources))
        return
    start = 0.0
    for source, share in enumerate(sources):
        begin = 0.0
        for target, other in enumerate(targets):
            common = min(start + share, begin + other) - max(start, begin)
            if common > 1e-12:
                yield source, target, common
            begin += other
        start += share
