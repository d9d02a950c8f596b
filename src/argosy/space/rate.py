"""A bound on throughput that holds for any number of stages and any granularity.

Give every layer l a weight phi_l (its share of the model's FLOP, or of its parameters where no FLOP
are known; any that add up to 1 will do). In a plan with micro-batches of B samples and period T (no
stage is slower than T per micro-batch), a device of pool p with tensor width w that runs layer l on
n samples in t_l(n, w) seconds contributes at most

    (1)  r_p = max over l, n, w of  phi_l n / (B w t_l(n, w))

of the model per second, whatever its stage. All devices together must do 1 per T, so

    (2)  T >= 1 / sum over pools of count_p r_p,     iteration >= M T.

Where stages take u devices of a pool at least, and sequences are not cut, a stage has u / w
replicas or more: then

    (3)  n <= B w / u, rounded up, and w >= u / B.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from argosy.space.option import Vector
from argosy.space.price import Prices, shares, widest
from argosy.space.widths import node_widths


def throughput_bound(prices: Prices, micro_batch: int, units: Vector | None = None) -> float:
    """(2): the least seconds per micro-batch; with (3) for stages of so many devices at least."""
    return period(pool_rates(prices, micro_batch, units), [pool.count for pool in prices.pools])


def period(rates: Sequence[float], counts: Sequence[int]) -> float:
    """(2) for so many devices of each pool."""
    total = sum(count * rate for count, rate in zip(counts, rates, strict=True))
    return 1 / total if total else math.inf


def pool_rates(prices: Prices, micro_batch: int, units: Vector | None = None) -> list[float]:
    """(1) per pool."""
    layers = prices.chain.layers
    weight = np.array([layer.forward_flop + layer.backward_flop for layer in layers])
    if not weight.sum():
        weight = np.array([float(layer.parameters) for layer in layers])
    share = shares(weight)
    found = []
    for pool in prices.pools:
        best = 0.0
        for width in node_widths(pool, widest(layers)):
            unit = units[pool.index] if units is not None else 1
            most = min(micro_batch, math.ceil(micro_batch * width / unit))
            if micro_batch * width < unit:
                continue
            for samples in _sizes(prices, pool.index, width, most):
                seconds = prices.least_seconds(pool.index, width, samples)
                if not seconds.all():  # what takes no time limits nothing
                    seconds = np.where(seconds > 0, seconds, np.inf)
                rates = share * samples / seconds
                best = max(best, float(rates.max()) / (micro_batch * width))
        found.append(best)
    return found


def _sizes(prices: Prices, pool: int, width: int, most: int) -> Iterable[int]:
    """Samples of a replica to look at: the roofline's seconds per sample never rise with the
    samples; a measured profile may do anything between the fewest and the most that were
    measured."""
    if not prices.model.profiles:
        return [most]
    known = prices.sample_range(pool, width)
    return [] if known is None else range(known[0], int(min(most, known[1])) + 1)
