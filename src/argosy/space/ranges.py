"""Tabulate sums and maxima over ranges of layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argosy.cost.memory import held_frozen_bytes
from argosy.plan.plan import Recompute
from argosy.workload.chain import Chain, Layer

# Tables over ranges of layers.
FloatArray = NDArray[np.float64]


def running_sums(values: list[float] | list[int]) -> FloatArray:
    """Return running sums: ``sums[b] - sums[a]`` is the sum of values a..b-1."""
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))


def largest_of(values: list[float] | list[int]) -> FloatArray:
    """Return [a, b]: the largest of values a..b-1, or 0 for an empty range."""
    table = np.zeros((len(values) + 1,) * 2)
    np.maximum.accumulate(
        np.triu(np.broadcast_to(values, (len(values),) * 2)), axis=1, out=table[:-1, 1:]
    )
    return table


def largest_two_of(values: list[float] | list[int]) -> FloatArray:
    """Return [a, b]: the sum of the two largest of values a..b-1.

    >>> largest_two_of([3, 1, 2])[0].tolist()
    [0.0, 3.0, 4.0, 5.0]
    """
    table = np.zeros((len(values) + 1,) * 2)
    for first in range(len(values)):
        most = second = 0.0
        for end, value in enumerate(values[first:], start=first + 1):
            most, second = max(most, value), max(min(most, value), second)
            table[first, end] = most + second
    return table


def frozen_ranges(chain: Chain, expert: int) -> FloatArray:
    """Return [a, b]: bytes of frozen weights in each holder of layers a..b-1, if experts are split
    over ``expert`` holders ((10) of ``cost.memory``)."""
    layers = [layer.frozen for layer in chain.layers]
    own = running_sums(
        [0.0 if frozen is None else held_frozen_bytes(frozen, expert) for frozen in layers]
    )
    table: FloatArray = own[None, :] - own[:, None]
    table += largest_of([0.0 if frozen is None else frozen.unpacked_bytes for frozen in layers])
    for partner in {
        layer.tied_to for layer in chain.layers if layer.frozen and layer.frozen.tied_bytes
    }:
        assert partner is not None, "what is tied has a partner"
        most = largest_of([_tied_frozen_bytes(layer, partner) for layer in chain.layers])
        most[: partner + 1, partner + 1 :] = 0.0
        table += most
    return table


def _tied_frozen_bytes(layer: Layer, partner: int | None) -> float:
    """Return the bytes of frozen weights that a layer shares with layer ``partner``."""
    return layer.frozen.tied_bytes if layer.frozen is not None and layer.tied_to == partner else 0.0


def kept_sums(chain: Chain, recompute: Recompute, copies: int) -> FloatArray:
    """Return the running sum of the bytes per sample that layers keep for their backward on all
    devices of a group, of which ``copies`` store what is outside its products."""
    layers, more = chain.layers, copies - 1
    match recompute:
        case Recompute.NONE:
            kept = [layer.activation_bytes + more * layer.stream_bytes for layer in layers]
        case Recompute.SELECTIVE:
            left = [
                (layer.activation_bytes - layer.selective_bytes, layer.stream_bytes)
                for layer in layers
            ]
            kept = [own + more * min(own, stream) for own, stream in left]
        case Recompute.FULL:
            kept = [0.0, *(copies * layer.output_bytes for layer in layers[:-1])]
            kept[: chain.first_backward] = [0.0] * chain.first_backward
    return chain.activation_factor * running_sums(kept)


def transient_ranges(chain: Chain, recompute: Recompute, width: int, copies: int) -> FloatArray:
    """Return [a, b]: bytes per sample that a backward of layers a..b-1 computes again or holds for
    a moment, without inputs and results of products; ``copies`` as in ``kept_sums``."""
    layers, factor, more = chain.layers, chain.activation_factor, copies - 1
    held = [
        layer.working_bytes + (chain.split_loss_bytes(layer) if width > 1 else 0.0)
        for layer in layers
    ]
    working = largest_of(
        [own and own + layer.output_bytes for own, layer in zip(held, layers, strict=True)]
    )
    match recompute:
        case Recompute.NONE:
            return working
        case Recompute.SELECTIVE:
            return factor * largest_of([layer.selective_bytes for layer in layers]) + working
    whole = [layer.activation_bytes + more * layer.stream_bytes for layer in layers]
    return factor * largest_of(whole) + working
