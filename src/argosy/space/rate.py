"""A bound on throughput that holds for any number of stages and any granularity.

Give every layer l a weight phi_l (its share of the model's FLOP, or of its parameters where no FLOP are known). In a
plan with micro-batches of B samples and period T (no stage is slower than T per micro-batch), a device of pool p with
tensor width w that runs layer l on n samples in t_l(n, w) seconds contributes at most

    (1)  r_p = max over l, n, w of  phi_l n / (B w t_l(n, w))

of the model per second, whatever its stage. All devices together must do 1 per T, so

    (2)  T >= 1 / sum over pools of count_p r_p,     iteration >= M T.
"""

from __future__ import annotations

import numpy as np

from argosy.plan.plan import Recompute
from argosy.space.option import tensor_widths
from argosy.space.price import Prices, widest


def throughput_bound(prices: Prices, micro_batch: int) -> float:
    """(2): the least seconds per micro-batch."""
    layers = prices.chain.layers
    weight = np.array([layer.forward_flop + layer.backward_flop for layer in layers])
    if not weight.sum():
        weight = np.array([float(layer.parameters) for layer in layers])
    share = weight / weight.sum()
    # The roofline's seconds per sample never rise with the samples; a measured profile may do anything.
    sizes = range(1, micro_batch + 1) if prices.model.profiles else [micro_batch]
    total = 0.0
    for pool in prices.pools:
        best = 0.0
        for width in tensor_widths(pool, pool.per_node, widest(layers)):
            for samples in sizes:
                forward, backward = prices.seconds(pool.index, width, samples, Recompute.NONE)
                seconds = np.diff(forward + backward)
                rates = np.divide(share * samples, seconds, out=np.zeros_like(seconds), where=seconds > 0)
                best = max(best, float(rates.max()) / (micro_batch * width))
        total += pool.count * best
    return 1 / total
