"""Search parts of a cluster alone: if links are slow, the best plan need not use all devices.

A search on all pools also covers the plans on fewer devices, but level 1 considers only some plans.
So that a cluster never gets a slower plan than a part of it does, level 1 also searches parts by
themselves: whole nodes of each pool or, if there would be many such parts, whole pools. With r_p
the throughput of a device (``space.rate``), a part with n_p devices of each pool takes at least

    (1)  min over shapes of M / sum of n_p r_p,

and a part is not searched if that is no less than the time of the best plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from argosy.solve.search.shape import Shape
from argosy.solve.settings import FEW_DEVICES, Settings
from argosy.space.pool import Pool
from argosy.space.price import Prices
from argosy.space.rate import period, pool_rates

# Parts are searched only in clusters with at most this many devices; level 1 must stay fast.
_MOST_DEVICES = 32
# At most this many parts are searched by themselves.
_MOST_SEARCHED = 2
# If there are more parts of whole nodes than this, only whole pools are taken as parts.
_MOST_PARTS = 32


def narrower_searches(
    prices: Prices, shapes: Sequence[Shape], settings: Settings, best: Callable[[], float]
) -> Iterator[tuple[Settings, tuple[Pool, ...], Sequence[int]]]:
    """Yield the settings, pools and numbers of pools of searches for pipelines without replicas, on
    few devices, and of parts of a small cluster whose throughput allows a better plan."""
    narrow = replace(settings, level=1, progress=None)
    if sum(pool.count for pool in prices.pools) <= FEW_DEVICES and settings.replicas is None:
        yield replace(narrow, replicas=1), prices.pools, range(len(prices.pools))
    for part, indices in parts_below(prices, shapes, best):
        yield narrow, part, indices


def parts_below(
    prices: Prices, shapes: Sequence[Shape], best: Callable[[], float]
) -> Iterator[tuple[tuple[Pool, ...], list[int]]]:
    """Yield the first parts of ``parts_of`` whose bounds are below the time of the best plan when
    it is their turn."""
    below = ((part, indices) for bound, part, indices in parts_of(prices, shapes) if bound < best())
    yield from itertools.islice(below, _MOST_SEARCHED)


def parts_of(
    prices: Prices, shapes: Sequence[Shape]
) -> Iterator[tuple[float, tuple[Pool, ...], list[int]]]:
    """Yield a lower bound in seconds (1) and the pools of every part, numbered from 0, with their
    numbers in the cluster; parts of fewest nodes first, because links across many nodes are
    slow."""
    pools = prices.pools
    if sum(pool.count for pool in pools) > _MOST_DEVICES:
        return
    numbers = [range(len(pool.nodes) + 1) for pool in pools]
    if math.prod(map(len, numbers)) - 2 > _MOST_PARTS:
        choices = itertools.product(*((0, len(pool.nodes)) for pool in pools))
    else:
        choices = itertools.product(*numbers)
    everything = tuple(len(pool.nodes) for pool in pools)
    rates = [
        (shape.num_micro_batches, pool_rates(prices, shape.micro_batch_size)) for shape in shapes
    ]
    parts = []
    for nodes in choices:
        if nodes == everything or not any(nodes):
            continue
        counts = [number * pool.per_node for number, pool in zip(nodes, pools, strict=True)]
        bound = min((count * period(rate, counts) for count, rate in rates), default=math.inf)
        parts.append((sum(nodes), bound, nodes))
    for _, bound, nodes in sorted(parts):
        indices = [index for index, number in enumerate(nodes) if number]
        part = [
            replace(pools[index], index=at, nodes=pools[index].nodes[: nodes[index]])
            for at, index in enumerate(indices)
        ]
        yield bound, tuple(part), indices
