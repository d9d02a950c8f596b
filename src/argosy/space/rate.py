"""Bound the throughput of any plan, for any number of stages and any granularity.

Give every layer l a weight phi_l: its share of the model's FLOP, or of its parameters if the FLOP
are unknown. Any weights that sum to 1 are valid. In a plan with micro-batches of B samples and
period T (no stage is slower than T per micro-batch), a device of pool p with tensor width w that
runs layer l on n samples in t_l(n, w) seconds contributes at most

    (1)  r_p = max over l, n, w of  phi_l n / (B w t_l(n, w))

of the model per second, in whichever stage it is. All devices together must do 1 per T, so

    (2)  T >= 1 / sum over pools of count_p r_p,     iteration >= M T.

If every stage takes at least u devices of a pool, and sequences are not cut, a stage has at least u
/ w replicas. Then

    (3)  n <= B w / u, rounded up, and w >= u / B.

A plan with a tensor-parallel group across nodes runs it on at least two nodes of a pool, with the
rate that (1) gives for such groups alone.

If all groups of a plan have width w, the best phi on one pool are its shares of sum over l of
t_l(n, w): then (2) counts every layer in full, and only devices that whole groups can have
(``devices_in_groups``). The largest bound over

    (4)  phi_l = t_l(B, w) / sum over l of t_l(B, w)     on any of the pools

is taken. If sequences are not cut, one sample passes all layers, so that

    (5)  iteration >= sum over l of min over pools of t_l(1, w).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from argosy.space.option import Vector
from argosy.space.pool import Pool
from argosy.space.price import Prices
from argosy.space.widths import devices_in_groups, node_widths, spanning_widths


def throughput_bound(
    prices: Prices, micro_batch: int, units: Vector | None = None, *, spanning: bool = False
) -> float:
    """Return the least seconds per micro-batch by (2); if every stage takes at least ``units``, by
    (3)."""
    rates = pool_rates(prices, micro_batch, units, spanning=spanning)
    return period(rates, [pool.count for pool in prices.pools])


def period(rates: Sequence[float], counts: Sequence[int]) -> float:
    """Return the least seconds per micro-batch by (2) for a number of devices of each pool."""
    total = sum(count * rate for count, rate in zip(counts, rates, strict=True))
    return 1 / total if total else math.inf


def pool_rates(
    prices: Prices, micro_batch: int, units: Vector | None = None, *, spanning: bool = False
) -> list[float]:
    """Return r_p by (1) for every pool; with ``spanning`` for groups across nodes, too."""
    inside = [_rate(prices, pool, node_widths, micro_batch, units) for pool in prices.pools]
    if not spanning:
        return inside
    across = spanning_rates(prices, micro_batch, units)
    return [max(rates) for rates in zip(inside, across, strict=True)]


def spanning_rates(prices: Prices, micro_batch: int, units: Vector | None = None) -> list[float]:
    """Return r_p by (1) for groups across nodes alone; 0 for pools without any."""
    return [_rate(prices, pool, spanning_widths, micro_batch, units) for pool in prices.pools]


def spanning_bound(prices: Prices, micro_batch: int, units: Vector | None = None) -> float:
    """Return the least seconds per micro-batch by (2) of plans with a group across nodes, which
    takes at least two nodes of a pool; infinity without such groups."""
    inside = pool_rates(prices, micro_batch, units, spanning=True)
    across = spanning_rates(prices, micro_batch, units)
    total = sum(pool.count * rate for pool, rate in zip(prices.pools, inside, strict=True))
    most = max(
        (
            total - 2 * pool.per_node * (inside[pool.index] - across[pool.index])
            for pool in prices.pools
            if across[pool.index]
        ),
        default=0.0,
    )
    return 1 / most if most else math.inf


def width_bound(
    prices: Prices, micro_batch: int, count: int, width: int, *, is_cut: bool = False
) -> float:
    """Return the least seconds of ``count`` micro-batches by (2), (4) and (5) in plans whose
    tensor-parallel groups all have one width; infinity if no pool has groups of this width.

    With ``is_cut`` sequences may be cut into parts.
    """
    most = prices.most_width
    able = [
        pool
        for pool in prices.pools
        if width in node_widths(pool, most) or width in spanning_widths(pool, most)
    ]
    seconds = {
        pool.index: [
            (samples, prices.least_seconds(pool.index, width, samples))
            for samples in _sizes(prices, pool.index, width, micro_batch)
        ]
        for pool in able
    }
    every_row = (row for rows in seconds.values() for _, row in rows)
    # A layer that some pool runs in no time gets no weight.
    timed = [all(layer) for layer in zip(*every_row, strict=True)]
    if able and not any(timed):
        return 0.0
    bounds = []
    for rows in filter(None, seconds.values()):
        shares = prices.shares([time * has for time, has in zip(rows[-1][1], timed, strict=True)])
        rates = [
            max((_quickest(shares, *row) for row in seconds[pool.index]), default=0.0)
            for pool in able
        ]
        counts = [devices_in_groups(pool, width) for pool in able]
        bounds.append(width * micro_batch * period(rates, counts))
    if not bounds or is_cut or prices.model.profiles:
        return count * max(bounds, default=math.inf)
    alone = [prices.least_seconds(pool.index, width, 1) for pool in able]
    return max(
        count * max(bounds), prices.total([min(layer) for layer in zip(*alone, strict=True)])
    )


def _quickest(shares: Sequence[float], samples: int, seconds: Sequence[float]) -> float:
    """Return the largest phi n / t over the layers with a weight; infinity if none has one."""
    rates = [share * samples / time for share, time in zip(shares, seconds, strict=True) if share]
    return max(rates, default=math.inf)


def _rate(
    prices: Prices,
    pool: Pool,
    widths: Callable[[Pool, int], Iterable[int]],
    micro_batch: int,
    units: Vector | None,
) -> float:
    """Return r_p by (1) for groups of the widths that ``widths`` yields for a pool."""
    best = 0.0
    for width in widths(pool, prices.most_width):
        unit = units[pool.index] if units is not None else 1
        most = min(micro_batch, math.ceil(micro_batch * width / unit))
        if micro_batch * width < unit:
            continue
        for samples in _sizes(prices, pool.index, width, most):
            pairs = zip(
                prices.work_shares, prices.least_seconds(pool.index, width, samples), strict=True
            )
            # A layer that takes no time limits nothing.
            rates = [part * samples / seconds for part, seconds in pairs if seconds]
            best = max(best, max(rates, default=0.0) / (micro_batch * width))
    return best


def _sizes(prices: Prices, pool: int, width: int, most: int) -> Iterable[int]:
    """Return the numbers of samples of a replica that (1) must consider.

    With the roofline the seconds per sample never rise with the samples, so the most samples
    suffice. A measured profile may vary in any way between the fewest and the most measured
    samples.
    """
    if not prices.model.profiles:
        return [most]
    known = prices.sample_range(pool, width)
    return [] if known is None else range(known[0], int(min(most, known[1])) + 1)
