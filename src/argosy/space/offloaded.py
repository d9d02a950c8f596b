"""Price the state that an option keeps outside its devices: seconds of copies and memory of hosts.

For a part whose devices reach a host at R bytes/s each (R / n if n of them share a link), and
layers a..b-1:

    (1)  out(a, b)  = bytes per device that a forward of a micro-batch copies to the host
                      (``cost.offload``, K)
    (2)  in(a, b)   = bytes per device of the weights that are kept there (W)
    (3)  copies of a forward take  max(out, in) / R,  of a backward  (out + in) / R
    (4)  in flight  = the most micro-batches for which moments, weights and n x (1) fit into each
                      device's share of the host's memory; 0 if the moments of an update do not fit
                      beside the state on a device

The update is priced in ``Option.update``, because it is linear in the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from argosy.cluster.host import Tier
from argosy.cost.memory import COPIED_LAYERS, PIECE_BYTES, layer_bytes, layer_weights
from argosy.plan.offload import Offload
from argosy.plan.plan import Recompute
from argosy.space.part import PoolPart
from argosy.space.ranges import FloatArray, largest_of, largest_two_of
from argosy.workload.optimizer import OPTIMIZERS

if TYPE_CHECKING:
    from argosy.space.option import Option
    from argosy.space.price import Prices, Rates

Places = int | NDArray[np.intp]
"""An index of a layer or a cut, or an array of them."""


def inside_ranges(prices: Prices, recompute: Recompute, width: int) -> FloatArray:
    """Return [a, b]: activation bytes per sample that stay on the devices of a replica although
    activations are offloaded: the input of layer a."""

    def made() -> FloatArray:
        given = prices.copies(width) * prices.outputs
        given[: prices.chain.first_backward] = 0.0
        return np.minimum(given[:, None], prices.kept_ranges(recompute, width))

    return _known(prices, ("inside", recompute, prices.copies(width)), made)


def outside_ranges(prices: Prices, recompute: Recompute, width: int) -> FloatArray:
    """Return [a, b]: activation bytes per sample that offloading keeps outside the devices."""

    def made() -> FloatArray:
        return prices.kept_ranges(recompute, width) - inside_ranges(prices, recompute, width)

    return _known(prices, ("outside", recompute, prices.copies(width)), made)


def copied_ranges(prices: Prices, recompute: Recompute, width: int) -> FloatArray:
    """Return [a, b]: activation bytes per sample that are on the devices while they are copied
    (``cost.memory``, (11))."""

    def made() -> FloatArray:
        kept = prices.kept_ranges(recompute, width)
        layer_bytes_kept = np.diagonal(kept, offset=1).tolist()
        first, end = np.indices(kept.shape)
        return np.asarray(largest_of(layer_bytes_kept) + kept / np.maximum(end - first, 1))

    return _known(prices, ("copied", recompute, prices.copies(width)), made)


def _known(prices: Prices, key: tuple[object, ...], made: Callable[[], FloatArray]) -> FloatArray:
    if key not in prices.offloaded:
        prices.offloaded[key] = made()
    return prices.offloaded[key]


def moment_rates(option: Option) -> Rates:
    """Return the bytes per weight of the moments kept outside, on all devices of a replica."""
    if option.offload.optimizer is None:
        return 0.0, 0.0, 0.0
    width = option.context * OPTIMIZERS[option.prices.chain.optimizer].state_bytes
    over = option.holders if option.zero else 1
    return width / over, width / (over if option.zero else option.expert), 0.0


def weight_rates(option: Option) -> Rates:
    """Return the bytes per weight of the trained weights kept outside, on all devices of a
    replica."""
    if option.offload.weights is None:
        return 0.0, 0.0, 0.0
    width = option.context * option.prices.chain.dtype.bytes
    over = option.holders if option.zero == 3 else 1
    return width / over, width / (over if option.zero == 3 else option.expert), 0.0


def rate_of(option: Option, part: PoolPart, tier: Tier, *, alone: bool = False) -> float:
    """Return R, the bytes/s between a device of a part and a tier; ``alone`` assumes that no other
    device uses the link."""
    pool = option.prices.pools[part.pool]
    beside = 1 if alone else min(part.devices, pool.per_node)
    host = pool.host_bandwidth / (beside if pool.host_is_shared else 1)
    return host if tier is Tier.HOST else min(host, pool.nvme_bandwidth / beside)


def copy_seconds(
    option: Option, part: PoolPart, first: Places, end: Places, *, alone: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of the copies of a forward and of a backward (3)."""
    kept = np.zeros(np.shape(first))
    weights = np.zeros(np.shape(first))
    if option.offload.activations is not None:
        rate = rate_of(option, part, option.offload.activations, alone=alone)
        outside = outside_ranges(option.prices, option.recompute, option.width)[first, end]
        kept = part.most * outside / (part.width * rate)
    if option.offload.weights is not None:
        rate = rate_of(option, part, option.offload.weights, alone=alone)
        weights = outside_weights(option, first, end) / (part.width * rate)
    return np.maximum(kept, weights), kept + weights


def outside_weights(option: Option, first: Places, end: Places) -> FloatArray:
    """Return the bytes of weights kept outside by all devices of a replica (2)."""
    if option.offload.weights is None:
        return np.zeros(np.shape(first))
    frozen = option.prices.frozen(option.expert)
    more = 0.0 if frozen is None else option.context * frozen[first, end]
    return _weighed(option, weight_rates(option), first, end) + more


def copied_weights(option: Option, first: Places, end: Places) -> FloatArray | float:
    """Return the bytes of weights on all devices of a replica while these are copied."""
    if option.offload.weights is None:
        return 0.0
    chain, expert = option.prices.chain, option.expert

    def made() -> FloatArray:
        return largest_of([layer_bytes(chain, layer, expert) for layer in chain.layers])

    largest = _known(option.prices, ("layer bytes", expert), made)[first, end]
    return np.asarray(COPIED_LAYERS * option.context * largest)


def limit_in_flight(option: Option, first: Places, end: Places) -> FloatArray:
    """Return the most micro-batches in flight for which the hosts have memory (4)."""
    prices = option.prices
    most = np.full(np.shape(first), np.inf)
    moments = _weighed(option, moment_rates(option), first, end)
    weights = outside_weights(option, first, end)
    on_device = _weighed(option, option.state, first, end) + copied_moments(option, first, end)
    if (frozen := option.frozen) is not None:
        on_device = on_device + option.context * frozen[first, end]
    for part, (size, _) in zip(option.parts, option.room, strict=True):
        most = np.where(on_device <= size, most, 0.0)
        for tier in {tier for _, tier in option.offload.parts if tier is not None}:
            held = moments * (option.offload.optimizer is tier) + weights * (
                option.offload.weights is tier
            )
            left = prices.pools[part.pool].tier_room(tier) * part.width - held
            micro_batch_bytes: FloatArray | float = 0.0
            if option.offload.activations is tier:
                kept = outside_ranges(prices, option.recompute, option.width)[first, end]
                micro_batch_bytes = part.most * kept
            most = np.minimum(
                most,
                np.where(
                    left >= 0, np.floor(left / np.maximum(micro_batch_bytes, 1e-9) + 1e-9), 0.0
                ),
            )
    return most


def least_on_devices(prices: Prices, offload: Offload) -> float:
    """Return the bytes of one copy of weights, gradients and optimizer state, without what
    ``offload`` may keep outside."""
    chain, least = prices.chain, prices.least_state_bytes
    if offload.optimizer is not None:
        least -= chain.parameters * OPTIMIZERS[chain.optimizer].state_bytes
    if offload.weights is not None:
        least -= chain.parameters * chain.dtype.bytes + chain.frozen_bytes
    return least


def copied_moments(option: Option, first: Places, end: Places) -> FloatArray:
    """Return the bytes of moments on all devices of a replica while an update copies them."""
    if option.offload.optimizer is None:
        return np.zeros(np.shape(first))
    chain, expert, rates = option.prices.chain, option.expert, moment_rates(option)
    moments = _weighed(option, rates, first, end)
    if OPTIMIZERS[chain.optimizer].is_elementwise:
        return np.minimum(COPIED_LAYERS * PIECE_BYTES * option.width * option.context, moments)

    def made() -> FloatArray:
        return largest_two_of([layer_weights(layer, expert) for layer in chain.layers])

    largest = _known(option.prices, ("two layers", expert), made)[first, end]
    return np.asarray(np.minimum(rates[0] * largest, moments))


def _weighed(option: Option, rates: Rates, first: Places, end: Places) -> FloatArray:
    held = option.prices.held_by_kind[:, first, end]
    weighed = rates[0] * held[0] + rates[2]
    return np.asarray(weighed + rates[1] * held[1] if len(held) > 1 else weighed)
