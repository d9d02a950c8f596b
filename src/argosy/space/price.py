"""Prices per layer: what every layer of a chain costs on a pool, as running sums, so that any range of layers is a
subtraction.

``sums[b] - sums[a]`` is the price of layers a..b-1. Everything is cached: a search asks for the same few hundred
combinations of pool, tensor width, samples and recomputation again and again.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from argosy.cost.communicate import num_reductions, ring_seconds
from argosy.cost.compute import ComputeModel, Portion, layer_seconds, recompute_seconds
from argosy.cost.memory import optimizer_bytes
from argosy.plan.plan import Recompute
from argosy.space.pool import Pool
from argosy.workload.chain import Chain, Layer

FloatArray = NDArray[np.float64]


class Prices:
    """The prices of one chain on the pools of one cluster."""

    def __init__(self, chain: Chain, pools: tuple[Pool, ...], model: ComputeModel) -> None:
        self.chain = chain
        self.pools = pools
        self.model = model
        self._known: dict[tuple[int, int, int, Recompute], tuple[FloatArray, FloatArray]] = {}

    def seconds(self, pool: int, width: int, samples: int, recompute: Recompute) -> tuple[FloatArray, FloatArray]:
        """Running sums of forward and backward on one device, tensor-parallel reductions included."""
        key = (pool, width, samples, recompute)
        if key not in self._known:
            by_shape = {at: self._layer(at, pool, width, samples, recompute) for at in set(self._shapes)}
            pairs = [by_shape[shape] for shape in self._shapes]
            self._known[key] = _sums([pair[0] for pair in pairs]), _sums([pair[1] for pair in pairs])
        return self._known[key]

    def _layer(self, index: int, pool: int, width: int, samples: int, recompute: Recompute) -> tuple[float, float]:
        layer, where = self.chain.layers[index], self.pools[pool]
        portion = Portion(device=where.device, samples=samples, share=1 / width, width=width)
        forward, backward = layer_seconds(self.model, self.chain, layer, portion)
        speed = where.device.speed.at(0)
        again = recompute_seconds(self.model, self.chain, layer, portion, recompute, forward)
        reduce = 0.0
        if width > 1 and layer.reduced_bytes:
            payload = 2 * layer.reduced_bytes * samples
            latency = where.intra_latency * num_reductions(layer) * 2
            bandwidth = where.intra_bandwidth / (width if where.intra_is_shared else 1)
            reduce = ring_seconds(payload, width, bandwidth, 0.0) + (width - 1) * latency
        return forward / speed + reduce, (backward + again) / speed + reduce

    @property
    def num_layers(self) -> int:
        return len(self.chain.layers)

    @cached_property
    def _shapes(self) -> list[int]:
        """Per layer, the first layer that costs the same."""
        first: dict[tuple[object, ...], int] = {}
        skipped = ("name", "tied_to")
        keys = [tuple(v for n, v in vars(layer).items() if n not in skipped) for layer in self.chain.layers]
        return [first.setdefault(key, index) for index, key in enumerate(keys)]

    @cached_property
    def distinct_layers(self) -> list[int]:
        """One layer of each cost."""
        return sorted(set(self._shapes))

    @cached_property
    def parameters(self) -> FloatArray:
        """Running sum of weights held; a tied layer counts as holding its copy."""
        return _sums([layer.parameters + layer.tied_parameters for layer in self.chain.layers])

    @cached_property
    def tied(self) -> list[tuple[int, int, int]]:
        """(index, partner, weights) of tied layers: a range that has both holds the weights once."""
        layers = enumerate(self.chain.layers)
        return [(i, layer.tied_to, layer.tied_parameters) for i, layer in layers if layer.tied_to is not None]

    @cached_property
    def reduced(self) -> FloatArray:
        """Running sum of the bytes per sample that tensor-parallel groups reduce in a forward."""
        return _sums([layer.reduced_bytes for layer in self.chain.layers])

    @cached_property
    def held(self) -> FloatArray:
        """[a, b]: weights that layers a..b-1 hold; two tied layers in one range hold theirs once."""
        table = self.parameters[None, :] - self.parameters[:, None]
        for index, partner, weights in self.tied:
            table[: min(index, partner) + 1, max(index, partner) + 1 :] -= weights
        return table

    @cached_property
    def widest(self) -> NDArray[np.int64]:
        """[a, b]: the widest tensor-parallel group that all of layers a..b-1 allow."""
        table = np.zeros((self.num_layers + 1,) * 2, dtype=np.int64)
        widths = [max(1, layer.max_tensor_width) for layer in self.chain.layers]
        for first in range(self.num_layers):
            table[first, first + 1 :] = np.minimum.accumulate(widths[first:])
        return table

    @cached_property
    def outputs(self) -> FloatArray:
        """Bytes per sample across a cut before each layer; 0 at both ends."""
        return np.array([0.0, *(layer.output_bytes for layer in self.chain.layers[:-1]), 0.0])

    @cached_property
    def largest_output(self) -> float:
        return float(self.outputs.max())

    def kept_ranges(self, recompute: Recompute) -> FloatArray:
        """[a, b]: activation bytes per sample of layers a..b-1."""
        if recompute not in self._kept_ranges:
            sums = self._kept[recompute]
            self._kept_ranges[recompute] = sums[None, :] - sums[:, None]
        return self._kept_ranges[recompute]

    @cached_property
    def _kept_ranges(self) -> dict[Recompute, FloatArray]:
        return {}

    @cached_property
    def _kept(self) -> dict[Recompute, FloatArray]:
        layers, factor = self.chain.layers, self.chain.activation_factor
        return {
            Recompute.NONE: factor * _sums([layer.activation_bytes for layer in layers]),
            Recompute.SELECTIVE: factor * _sums([layer.activation_bytes - layer.selective_bytes for layer in layers]),
            Recompute.FULL: factor * _sums(self.outputs[:-1].tolist()),
        }

    def transient(self, recompute: Recompute) -> FloatArray:
        """[a, b]: bytes per sample that a backward of layers a..b-1 holds for a moment."""
        return self._transient[recompute]

    @cached_property
    def _transient(self) -> dict[Recompute, FloatArray]:
        def largest(values: list[float]) -> FloatArray:
            table = np.zeros((self.num_layers + 1,) * 2)
            for first in range(self.num_layers):
                table[first, first + 1 :] = np.maximum.accumulate(values[first:])
            return table

        layers, factor = self.chain.layers, self.chain.activation_factor
        return {
            Recompute.NONE: np.zeros((self.num_layers + 1,) * 2),
            Recompute.SELECTIVE: factor * largest([layer.selective_bytes for layer in layers]),
            Recompute.FULL: factor * largest([layer.activation_bytes for layer in layers]),
        }

    @cached_property
    def state_bytes(self) -> tuple[int, int, int]:
        """Bytes per weight of weights, gradients and optimizer state."""
        return self.chain.dtype.bytes, self.chain.dtype.bytes, optimizer_bytes(self.chain)


def _sums(values: list[float] | list[int]) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))


def widest(layers: tuple[Layer, ...]) -> int:
    """The widest tensor-parallel group that every layer allows, layers that cannot be split at all excepted."""
    return max((layer.max_tensor_width for layer in layers), default=1)
