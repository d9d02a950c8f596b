"""Match senders and receivers between stages with different replica counts and widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from argosy.plan.plan import Replica


def overlaps(
    sources: Sequence[Replica], targets: Sequence[Replica]
) -> Iterator[tuple[Replica, Replica, int]]:
    """Yield pairs of replicas that hold the same samples of a micro-batch, and how many samples.

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
    """Yield pairs of members of two tensor-parallel groups that hold the same part of a tensor.

    The tensor is split along one dim; the third value is the common part of it.

    >>> list(share_overlaps([0.5, 0.5], [1.0]))
    [(0, 0, 0.5), (1, 0, 0.5)]
    """
    if sources == targets:  # the usual case
        yield from ((at, at, share) for at, share in enumerate(sources))
        return
    start = 0.0
    for source, share in enumerate(sources):
        begin = 0.0
        for target, target_share in enumerate(targets):
            common = min(start + share, begin + target_share) - max(start, begin)
            if common > 1e-12:
                yield source, target, common
            begin += target_share
        start += share
