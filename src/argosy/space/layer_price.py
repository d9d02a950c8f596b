"""Price one layer on one device of a pool: compute, exchange inside the stage, and overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from argosy.cost.communicate import reduction_passes
from argosy.cost.compute import (
    ComputeModel,
    Portion,
    hidden_seconds,
    recompute_seconds,
)
from argosy.plan.plan import Recompute
from argosy.space.exchange import Split, key_value_seconds, reduction_seconds, routed_seconds
from argosy.space.pool import Pool
from argosy.workload.chain import Chain, Layer


class LayerSeconds(NamedTuple):
    """The seconds that one pass, forward or backward, takes in one layer."""

    rest: float
    """Seconds of compute that overlaps with no transfer."""
    exchanged: float = 0.0
    """Seconds of reductions and routing."""
    hidden: float = 0.0
    """Seconds of attention, during which keys and values may arrive."""
    arriving: float = 0.0
    """Seconds of transfers of keys and values."""


class LayerCompute(NamedTuple):
    """The seconds of ``cost.compute.layer_seconds``, which are equal for all recomputations."""

    layer: Layer
    forward: float
    backward: float


def price_layer(
    model: ComputeModel,
    chain: Chain,
    priced: LayerCompute,
    where: Pool,
    portion: Portion,
    recompute: Recompute,
) -> tuple[LayerSeconds, LayerSeconds]:
    """Return the seconds of the forward and of the backward of a layer."""
    split, samples = Split(portion.width, portion.context, portion.expert), portion.samples
    layer, forward, backward = priced
    speed = where.device.speed.at(0)
    again = recompute_seconds(model, chain, layer, portion, recompute, forward)
    ahead, back = forward / speed, (backward + again) / speed
    exchanged_ahead = reduction_seconds(where, layer, split, samples)
    exchanged_back = exchanged_ahead * reduction_passes(chain, recompute)
    if split.expert > 1:
        routed = routed_seconds(where, layer, split, samples)
        exchanged_ahead += 2 * routed
        exchanged_back += (4 if recompute is Recompute.FULL else 2) * routed
    if split.context == 1:
        return LayerSeconds(ahead, exchanged_ahead), LayerSeconds(back, exchanged_back)
    beside = hidden_seconds(model, chain, layer, portion, (forward, backward))
    twice = recompute is Recompute.FULL
    first, second = beside[0] / speed, (beside[1] + (beside[0] if twice else 0.0)) / speed
    arriving = key_value_seconds(where, layer, split, samples)
    return (
        LayerSeconds(ahead - first, exchanged_ahead, first, arriving),
        LayerSeconds(back - second, exchanged_back, second, (3 if twice else 2) * arriving),
    )


def compute_and_exchange(distinct: Sequence[LayerSeconds], times: float) -> list[float]:
    """Return the seconds of each of the distinct layers without attention that overlaps; compute
    takes ``times`` as long."""
    return [times * layer.rest + layer.exchanged for layer in distinct]


def summed(distinct: Sequence[LayerSeconds], counts: Sequence[int], times: float) -> list[float]:
    """Return the seconds of each of the distinct layers, of which ``counts`` occur each.

    Compute takes ``times`` as long. Attention overlaps with the arrival of keys and values; of the
    two, the one that takes longer over all layers counts.
    """
    hidden = [times * layer.hidden for layer in distinct]
    arriving = [layer.arriving for layer in distinct]
    beside = arriving if _dot(counts, arriving) > _dot(counts, hidden) else hidden
    return [
        seconds + more
        for seconds, more in zip(compute_and_exchange(distinct, times), beside, strict=True)
    ]


def _dot(counts: Sequence[int], seconds: Sequence[float]) -> float:
    return sum(count * layer for count, layer in zip(counts, seconds, strict=True))
