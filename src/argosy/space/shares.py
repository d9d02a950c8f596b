"""Share a micro-batch among the replicas of a stage: each sample goes to the replica that would
finish first, as far as memory allows."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from argosy.cost.memory import USABLE
from argosy.plan.plan import Recompute
from argosy.space.option import Option, PoolPart
from argosy.space.price import Prices

Parts = tuple[PoolPart, ...]


def share_samples(
    prices: Prices,
    groups: Sequence[tuple[int, int, int]],
    micro_batch: int,
    recompute: Recompute,
    *,
    context: int = 1,
    expert: int = 1,
) -> Parts | None:
    """Return integer shares of a micro-batch for (pool, width, replicas) groups that minimise the
    time of the slowest replica, or None if there are more replicas than samples."""
    total = sum(replicas for _, _, replicas in groups)
    if total > micro_batch:
        return None
    split = {"context": context, "expert": expert}
    if len(groups) == 1:
        ((pool, width, replicas),) = groups
        samples, extra = divmod(micro_batch, replicas)
        return (
            PoolPart(
                pool=pool, width=width, replicas=replicas, samples=samples, extra=extra, **split
            ),
        )
    parts = [
        PoolPart(pool=pool, width=width, replicas=replicas, samples=1, **split)
        for pool, width, replicas in groups
    ]
    return _dealt(prices, parts, micro_batch, recompute, [math.inf] * len(parts))


def share_within(option: Option, limits: Sequence[int]) -> Parts | None:
    """Return the shares of an option's micro-batch that minimise the time of the slowest replica
    if no replica of a part has more samples than its limit, or None if there are no such shares."""
    micro_batch = sum(part.all_samples for part in option.parts)
    ones = [part._replace(samples=1, extra=0) for part in option.parts]
    parts = _dealt(option.prices, ones, micro_batch, option.recompute, limits)
    fit = all(part.most <= limit for part, limit in zip(parts, limits, strict=True))
    return parts if fit else None


def most_samples(option: Option) -> list[int]:
    """Return for each part the most samples of a replica with which some layer fits alone, with
    one micro-batch in flight and three receive buffers."""
    prices, layers = option.prices, option.prices.distinct_layers
    buffers = prices.exchange_buffers(option.context, option.expert) + 3 * prices.largest_output
    held = [option.state_range(at, at + 1) + option.whole_bytes(at, at + 1) for at in layers]
    sizes = [float(option.transient[at, at + 1] + option.kept_ranges[at, at + 1]) for at in layers]
    limits = []
    for part, pool in zip(option.parts, option.pools, strict=True):
        room = USABLE * pool.device.kind.memory * part.width
        both = zip(held, sizes, strict=True)
        limits.append(max(int((room - state) / max(size + buffers, 1e-9)) for state, size in both))
    return limits


def _dealt(
    prices: Prices,
    parts: Sequence[PoolPart],
    micro_batch: int,
    recompute: Recompute,
    limits: Sequence[float],
) -> Parts:
    """Deal samples to parts that have one per replica, until all of a micro-batch is dealt."""
    ranges = [prices.sample_range(part.pool, part.tensor_width) for part in parts]

    def finish(at: int, samples: int) -> float:
        part, known = parts[at], ranges[at]
        if known is None or samples > min(known[1] * part.context, limits[at]):
            return math.inf
        samples = samples if part.context > 1 else max(samples, known[0])
        return prices.whole(
            part.pool, part.width, samples, recompute, context=part.context, expert=part.expert
        )

    given = [1] * len(parts)
    more = [0] * len(parts)
    left = micro_batch - sum(part.replicas for part in parts)
    heap = [(finish(at, 2), at) for at in range(len(parts))]
    heapq.heapify(heap)
    while left:
        _, at = heap[0]
        step = min(left, parts[at].replicas - more[at])
        more[at] += step
        left -= step
        if more[at] == parts[at].replicas:
            given[at], more[at] = given[at] + 1, 0
            heapq.heapreplace(heap, (finish(at, given[at] + 1), at))
    return tuple(part._replace(samples=given[at], extra=more[at]) for at, part in enumerate(parts))


def whole_seconds(prices: Prices, parts: Sequence[PoolPart], recompute: Recompute) -> float:
    """Return the forward and backward seconds of the whole chain for a micro-batch, on the slowest
    replica."""
    return max(
        prices.whole(
            part.pool, part.width, part.most, recompute, context=part.context, expert=part.expert
        )
        for part in parts
    )
