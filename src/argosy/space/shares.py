"""Share a micro-batch among the replicas of a stage: each sample goes to the replica that would
finish first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from argosy.plan.plan import Recompute
from argosy.space.option import PoolPart
from argosy.space.price import Prices


def share_samples(
    prices: Prices,
    groups: Sequence[tuple[int, int, int]],
    micro_batch: int,
    recompute: Recompute,
    *,
    context: int = 1,
    expert: int = 1,
) -> tuple[PoolPart, ...] | None:
    """Return integer shares of a micro-batch for (pool, width, replicas) groups that minimise the
    time of the slowest replica, or None if there are more replicas than samples."""
    total = sum(replicas for _, _, replicas in groups)
    if total > micro_batch:
        return None

    def part(group: int, samples: int, extra: int) -> PoolPart:
        pool, width, replicas = groups[group]
        return PoolPart(
            pool=pool,
            width=width,
            replicas=replicas,
            samples=samples,
            extra=extra,
            context=context,
            expert=expert,
        )

    if len(groups) == 1:
        return (part(0, *divmod(micro_batch, groups[0][2])),)

    def finish(group: int, samples: int) -> float:
        pool, width, _ = groups[group]
        known = prices.sample_range(pool, width // context)
        if known is None or samples > known[1] * context:
            return math.inf
        samples = samples if context > 1 else max(samples, known[0])
        return prices.whole(pool, width, samples, recompute, context=context, expert=expert)

    given = [1] * len(groups)
    more = [0] * len(groups)
    left = micro_batch - total
    heap = [(finish(group, 2), group) for group in range(len(groups))]
    heapq.heapify(heap)
    while left:
        _, group = heap[0]
        step = min(left, groups[group][2] - more[group])
        more[group] += step
        left -= step
        if more[group] == groups[group][2]:
            given[group], more[group] = given[group] + 1, 0
            heapq.heapreplace(heap, (finish(group, given[group] + 1), group))
    return tuple(part(at, given[at], more[at]) for at in range(len(groups)))


def whole_seconds(prices: Prices, parts: Sequence[PoolPart], recompute: Recompute) -> float:
    """Return the forward and backward seconds of the whole chain for a micro-batch, on the slowest
    replica."""
    return max(
        prices.whole(
            part.pool, part.width, part.most, recompute, context=part.context, expert=part.expert
        )
        for part in parts
    )
