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
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from argosy.space.option import Vector
from argosy.space.price import Prices, widest
from argosy.space.widths import node_widths


def throughput_bound(prices: Prices, micro_batch: int, units: Vector | None = None) -> float:
    """Return the least seconds per micro-batch by (2); if every stage takes at least ``units``, by
    (3)."""
    return period(pool_rates(prices, micro_batch, units), [pool.count for pool in prices.pools])


def period(rates: Sequence[float], counts: Sequence[int]) -> float:
    """Return the least seconds per micro-batch by (2) for a number of devices of each pool."""
    total = sum(count * rate for count, rate in zip(counts, rates, strict=True))
    return 1 / total if total else math.inf


def pool_rates(prices: Prices, micro_batch: int, units: Vector | None = None) -> list[float]:
    """Return r_p by (1) for every pool."""
    layers = prices.chain.layers
    share = prices.work_shares
    best_rates = []
    for pool in prices.pools:
        best = 0.0
        for width in node_widths(pool, widest(layers)):
            unit = units[pool.index] if units is not None else 1
            most = min(micro_batch, math.ceil(micro_batch * width / unit))
            if micro_batch * width < unit:
                continue
            for samples in _sizes(prices, pool.index, width, most):
                pairs = zip(share, prices.least_seconds(pool.index, width, samples), strict=True)
                # A layer that takes no time limits nothing.
                rates = [part * samples / seconds for part, seconds in pairs if seconds]
                best = max(best, max(rates, default=0.0) / (micro_batch * width))
        best_rates.append(best)
    return best_rates


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
