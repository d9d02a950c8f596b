"""Price every layer of a chain on a pool, as running sums: a range of layers is a subtraction.

``sums[b] - sums[a]`` is the price of layers a..b-1. All results are cached, because a search
requests the same few hundred combinations of pool, tensor width, samples and recomputation
repeatedly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import add, mul

import numpy as np
from numpy.typing import NDArray

from argosy.cost.compute import (
    ComputeModel,
    LayerRates,
    Portion,
    layer_seconds,
    rates_of,
    waiting,
)
from argosy.cost.memory import exchange_buffers, layer_weights, optimizer_bytes
from argosy.plan.plan import Recompute
from argosy.space.exchange import Split, reduction_seconds
from argosy.space.layer_price import (
    LayerCompute,
    LayerSeconds,
    compute_and_exchange,
    price_layer,
    summed,
)
from argosy.space.part import PoolPart
from argosy.space.pool import Pool
from argosy.space.ranges import FloatArray as FloatArray
from argosy.space.ranges import (
    frozen_ranges,
    kept_sums,
    largest_of,
    running_sums,
    transient_ranges,
)
from argosy.workload.chain import Chain, Layer

Rates = tuple[float, float, float]
"""An amount per weight that every holder has, an amount per weight of an expert, and a constant."""

_Way = tuple[int, int, int, Recompute, int, int]
"""Pool, width, samples, recomputation, context and expert identify a way to run a layer."""


class Prices:
    """A cache of the prices of one chain on the pools of one cluster."""

    def __init__(self, chain: Chain, pools: tuple[Pool, ...], model: ComputeModel) -> None:
        self.chain = chain
        self.pools = pools
        self.model = model
        self._buffers: dict[tuple[int, int], float] = {}
        self._exchanged: dict[int, float] = {}
        self._known: dict[tuple[_Way, float], tuple[FloatArray, FloatArray]] = {}
        self._layers: dict[_Way, list[tuple[LayerSeconds, LayerSeconds]]] = {}
        self._whole: dict[_Way, float] = {}
        self._computed: dict[tuple[int, ...], list[LayerCompute]] = {}
        self._layer_rates: dict[int, list[tuple[Layer, LayerRates | None]]] = {}
        self._ranges: dict[tuple[int, int], tuple[int, float] | None] = {}
        self.ways_around: dict[tuple[bool, tuple[tuple[int, ...], ...]], list[Rates]] = {}
        """Rates of ``space.option`` at which weights go around their holders: whether they are
        scattered, and pool, width, replicas, context and expert of each part."""
        self.ways: dict[tuple[object, ...], int] = {}
        """Numbers of ``Option.way``."""
        self.rooms: dict[tuple[PoolPart, ...], list[tuple[float, int]]] = {}
        """``Option.room`` by parts."""
        self.offloaded: dict[tuple[object, ...], FloatArray] = {}
        """Tables of ``space.offloaded``, by name."""

    def seconds(
        self,
        pool: int,
        width: int,
        samples: int,
        recompute: Recompute,
        *,
        context: int = 1,
        expert: int = 1,
        devices: int = 1,
    ) -> tuple[FloatArray, FloatArray]:
        """Return running sums of forward and backward seconds on one device of a replica of
        ``width``, including its exchange inside the stage, which has ``devices`` devices in all.

        Overlap takes the longer of two sums, which a running sum cannot express. Here all layers
        take the one that is longer over the whole chain. So a range is exact if its layers are
        equal, and otherwise never too long.
        """
        way = (pool, width, samples, recompute, context, expert)
        times = waiting(self.model.spread, devices)
        sums = self._known.get((way, times))
        if sums is None:
            at, _ = self._layer_shapes
            running = np.zeros((2, len(at) + 1))
            np.array(self._passes(way, times))[:, at].cumsum(axis=1, out=running[:, 1:])
            sums = self._known[way, times] = (running[0], running[1])
        return sums

    def _passes(self, way: _Way, times: float) -> tuple[list[float], list[float]]:
        """Return the seconds of the forward and of the backward of each distinct layer, with
        compute ``times`` as long."""
        pairs = self._layers.get(way)
        if pairs is None:
            pool, width, samples, recompute, context, expert = way
            where = self.pools[pool]
            portion = _portion(where, width, samples, context, expert)
            pairs = self._layers[way] = [
                price_layer(self.model, self.chain, priced, where, portion, recompute)
                for priced in self._priced(pool, portion)
            ]
        forward, backward = zip(*pairs, strict=True)
        if way[4] == 1:  # without parts of the sequence nothing overlaps
            return compute_and_exchange(forward, times), compute_and_exchange(backward, times)
        _, counts = self._layer_shapes
        return summed(forward, counts, times), summed(backward, counts, times)

    def _priced(self, pool: int, portion: Portion) -> list[LayerCompute]:
        """Return the distinct layers with their seconds of compute, without recomputation."""
        key = (pool, portion.width, portion.samples, portion.context, portion.expert)
        if key not in self._computed:
            self._computed[key] = [
                LayerCompute(layer, *layer_seconds(self.model, self.chain, layer, portion, rates))
                for layer, rates in self._rates(pool)
            ]
        return self._computed[key]

    def _rates(self, pool: int) -> list[tuple[Layer, LayerRates | None]]:
        """Return the distinct layers with their rates on a pool; None if these are not needed."""
        if pool not in self._layer_rates:
            device, chain = self.pools[pool].device, self.chain
            is_priced = chain.states_work and self.model.profile_for(device) is None
            layers = [chain.layers[at] for at in self.distinct_layers]
            self._layer_rates[pool] = [
                (layer, rates_of(self.model, chain, layer, device) if is_priced else None)
                for layer in layers
            ]
        return self._layer_rates[pool]

    def whole(
        self,
        pool: int,
        width: int,
        samples: int,
        recompute: Recompute,
        *,
        context: int = 1,
        expert: int = 1,
    ) -> float:
        """Return the forward and backward seconds of the whole chain. Sharing samples needs only
        this number, and very often."""
        key = (pool, width, samples, recompute, context, expert)
        seconds = self._whole.get(key)
        if seconds is None:
            forward, backward = self._passes(key, waiting(self.model.spread, 1))
            seconds = self._whole[key] = self.total(map(add, forward, backward))
        return seconds

    def seconds_by_layer(self, pool: int, width: int, samples: int) -> list[float]:
        """Return the forward and backward seconds of each distinct layer, without
        recomputation."""
        way = (pool, width, samples, Recompute.NONE, 1, 1)
        forward, backward = self._passes(way, waiting(self.model.spread, 1))
        return list(map(add, forward, backward))

    def total(self, values: Iterable[float]) -> float:
        """Return the sum over all layers of a value that each distinct layer has."""
        _, counts = self._layer_shapes
        return sum(map(mul, counts, values), start=0.0)

    def sample_range(self, pool: int, tensor_width: int) -> tuple[int, float] | None:
        """Return the fewest and the most samples whose times are known for all layers, or None if
        this width was not measured for every layer."""
        if (pool, tensor_width) not in self._ranges:
            profile = self.model.profile_for(self.pools[pool].device)
            names = (
                set()
                if profile is None
                else {profile.row_name(layer) or layer.name for layer in self.chain.layers}
            )
            ranges = (
                [profile.sample_range(name, tensor_width, self.chain.dtype) for name in names]
                if profile
                else []
            )
            known = [samples for samples in ranges if samples is not None]
            fewest = max((samples[0] for samples in known), default=1)
            most = min((samples[1] for samples in known), default=math.inf)
            self._ranges[pool, tensor_width] = (fewest, most) if len(known) == len(ranges) else None
        return self._ranges[pool, tensor_width]

    def least_seconds(self, pool: int, width: int, samples: int) -> list[float]:
        """Return for each distinct layer the least forward and backward seconds on one device of a
        tensor-parallel group.

        This holds for every other split: parts of a sequence read weights more often in all, and
        experts over the maximum number of holders read them least.
        """
        if self.most_experts == 1:
            return self.seconds_by_layer(pool, width, samples)
        split, where = Split(width, 1, self.most_experts), self.pools[pool]
        portion, speed = _portion(where, width, samples, *split[1:]), where.device.speed.at(0)
        return [
            (priced.forward + priced.backward) / speed
            + 2 * reduction_seconds(where, priced.layer, split, samples)
            for priced in self._priced(pool, portion)
        ]

    @cached_property
    def most_experts(self) -> int:
        """Return the largest number of holders over which the experts of every layer can be split;
        1 without experts."""
        return math.gcd(*(layer.num_experts for layer in self.chain.layers)) or 1

    @cached_property
    def most_parts(self) -> int:
        """Return the largest power of two into which the sequence of every layer can be cut."""
        most = min(layer.max_context for layer in self.chain.layers)
        parts = 1
        while 2 * parts <= most and self.chain.sequence_length % (4 * parts) == 0:
            parts *= 2
        return parts

    def exchange_buffers(self, context: int, expert: int) -> float:
        """Return the bytes per sample in transfer between the devices of a replica, for the largest
        layer."""
        if (context, expert) not in self._buffers:
            layers = (self.chain.layers[at] for at in self.distinct_layers)
            buffers = (exchange_buffers(layer, context, expert, backward=True) for layer in layers)
            self._buffers[context, expert] = max(buffers)
        return self._buffers[context, expert]

    @cached_property
    def num_layers(self) -> int:
        return len(self.chain.layers)

    @cached_property
    def most_width(self) -> int:
        return widest(self.chain.layers)

    @cached_property
    def shapes(self) -> list[int]:
        """Return for each layer the first layer that costs the same."""
        first: dict[tuple[object, ...], int] = {}
        return [
            first.setdefault(layer.cost_key, index) for index, layer in enumerate(self.chain.layers)
        ]

    @cached_property
    def distinct_layers(self) -> list[int]:
        """Return one layer of each cost."""
        return sorted(set(self.shapes))

    @cached_property
    def _layer_shapes(self) -> tuple[NDArray[np.intp], list[int]]:
        """Return for each layer its index among the distinct ones, and how many layers there are of
        each."""
        at = np.searchsorted(self.distinct_layers, self.shapes)
        return at, np.bincount(at).tolist()

    @cached_property
    def work_shares(self) -> list[float]:
        """Return the share of each distinct layer in the FLOP of the chain, or in its weights if
        the FLOP are unknown."""
        distinct = [self.chain.layers[at] for at in self.distinct_layers]
        work = [layer.forward_flop + layer.backward_flop for layer in distinct]
        if not sum(work):
            work = [float(layer.parameters) for layer in distinct]
        return self.shares(work)

    def shares(self, values: Sequence[float]) -> list[float]:
        """Return the share of each distinct layer in the sum over all layers of its value, or equal
        shares if the sum is 0."""
        total = self.total(values)
        return [value / total if total else 1 / self.num_layers for value in values]

    @cached_property
    def parameters(self) -> FloatArray:
        """Return the running sum of weights held; a tied layer counts as holding its copy."""
        return running_sums(
            [layer.parameters + layer.tied_parameters for layer in self.chain.layers]
        )

    @cached_property
    def tied(self) -> list[tuple[int, int, int]]:
        """Return (index, partner, weights) of tied layers."""
        layers = enumerate(self.chain.layers)
        return [
            (i, layer.tied_to, layer.tied_parameters)
            for i, layer in layers
            if layer.tied_to is not None
        ]

    @cached_property
    def reduced(self) -> FloatArray:
        """Return the running sum of the bytes per sample that tensor-parallel groups reduce in a
        forward."""
        return running_sums([layer.reduced_bytes for layer in self.chain.layers])

    @cached_property
    def routed(self) -> FloatArray:
        """Return the running sum of the bytes per sample that experts take in."""
        return running_sums([layer.routed_bytes for layer in self.chain.layers])

    @cached_property
    def held(self) -> FloatArray:
        """Return [a, b]: the number of weights that layers a..b-1 hold. These are their own weights
        and, for each tied layer outside the range, the most that one of them shares with it."""
        own = running_sums([layer.parameters for layer in self.chain.layers])
        table = own[None, :] - own[:, None]
        for (partner, *_), _ in self.chain.shared:
            most = largest_of(
                [
                    layer.tied_parameters if layer.tied_to == partner else 0
                    for layer in self.chain.layers
                ]
            )
            most[: partner + 1, partner + 1 :] = 0.0
            table += most
        return table

    @cached_property
    def held_by_kind(self) -> FloatArray:
        """Return [kind, a, b]: ``held`` divided into weights outside experts and weights of
        experts; the latter only if there are any."""
        experts = running_sums([layer.expert_parameters for layer in self.chain.layers])
        split = experts[None, :] - experts[:, None]
        return np.stack([self.held - split, split]) if experts[-1] else self.held[None]

    @cached_property
    def lightest(self) -> Rates:
        """Return a lower bound of the factors that ``weigh_range`` multiplies rates with.

        No range of layers has less than the lightest layer.
        """
        at = np.arange(self.num_layers)
        common, *split = self.held_by_kind[:, at, at + 1].min(axis=1).tolist()
        return common, split[0] if split else 0.0, 1.0

    def weigh(self, rates: FloatArray, held: FloatArray) -> FloatArray:
        """Return [option, range]: rates times weights, for several rates ([option, 3]); ``held`` is
        ``held_by_kind`` of all ranges or of some."""
        amounts = np.multiply.outer(rates[:, 0], held[0])
        if len(held) > 1:
            amounts += np.multiply.outer(rates[:, 1], held[1])
        if rates[:, 2].any():
            amounts += rates[:, 2].reshape(-1, *[1] * (amounts.ndim - 1))
        return np.asarray(amounts)

    def weigh_range(self, rate: Rates, first: int, end: int) -> float:
        """Return a rate times the weights of one range."""
        if len(self.held_by_kind) == 1:  # a fast path: a search calls this thousands of times
            return rate[0] * float(self.held[first, end]) + rate[-1]
        amounts = self.held_by_kind[:, first, end].tolist()
        return float(
            sum(factor * amount for factor, amount in zip(rate[:-1], amounts, strict=False))
            + rate[-1]
        )

    @cached_property
    def widest(self) -> NDArray[np.int64]:
        """Return [a, b]: the widest tensor-parallel group that all of layers a..b-1 allow."""
        table = np.zeros((self.num_layers + 1,) * 2, dtype=np.int64)
        widths = [max(1, layer.max_tensor_width) for layer in self.chain.layers]
        for first in range(self.num_layers):
            table[first, first + 1 :] = np.minimum.accumulate(widths[first:])
        return table

    @cached_property
    def outputs(self) -> FloatArray:
        """Return the bytes per sample across a cut before each layer; 0 at both ends."""
        return np.array([0.0, *(layer.output_bytes for layer in self.chain.layers[:-1]), 0.0])

    @cached_property
    def returned(self) -> FloatArray:
        """Return the bytes per sample of gradients across a cut before each layer; this is the
        array ``outputs`` itself if all layers have a backward."""
        first = self.chain.first_backward
        if not first:
            return self.outputs
        return np.where(np.arange(len(self.outputs)) > first, self.outputs, 0.0)

    @cached_property
    def largest_output(self) -> float:
        return float(self.outputs.max())

    def kept_ranges(self, recompute: Recompute, width: int) -> FloatArray:
        """Return [a, b]: activation bytes per sample of layers a..b-1 on all devices of a replica
        with tensor-parallel groups of this width."""
        key = (recompute, self.copies(width))
        if key not in self._kept_ranges:
            sums = kept_sums(self.chain, *key)
            self._kept_ranges[key] = sums[None, :] - sums[:, None]
        return self._kept_ranges[key]

    def copies(self, width: int) -> int:
        """Return how many devices of a tensor-parallel group of this width store the activations
        outside its matrix products."""
        return 1 if self.chain.splits_stream else width

    @cached_property
    def _kept_ranges(self) -> dict[tuple[Recompute, int], FloatArray]:
        return {}

    def transient(self, recompute: Recompute, width: int) -> FloatArray:
        """Return [a, b]: bytes per sample that a backward of layers a..b-1 holds for a moment, on
        all devices of a replica with tensor-parallel groups of this width."""
        key = (recompute, self.copies(width), width)
        if key not in self._transients:
            held = transient_ranges(self.chain, recompute, width, self.copies(width))
            if self.chain.first_backward:
                of_frozen = [
                    0.0 if layer.frozen is None else layer.frozen.forward_bytes
                    for layer in self.chain.layers
                ]
                held = np.maximum(held, largest_of(of_frozen))
            if width > 1:
                held = held + self.chain.whole_outputs * width * largest_of(
                    [layer.output_bytes for layer in self.chain.layers]
                )
            self._transients[key] = held
        return self._transients[key]

    @cached_property
    def _transients(self) -> dict[tuple[Recompute, int, int], FloatArray]:
        return {}

    def largest_layer(self, expert: int) -> FloatArray:
        """Return [a, b]: the number of weights of the largest of layers a..b-1, if experts are
        split over ``expert`` holders."""
        if expert not in self._largest_layers:
            self._largest_layers[expert] = largest_of(
                [layer_weights(layer, expert) for layer in self.chain.layers]
            )
        return self._largest_layers[expert]

    @cached_property
    def _largest_layers(self) -> dict[int, FloatArray]:
        return {}

    def frozen(self, expert: int) -> FloatArray | None:
        """Return [a, b]: bytes of frozen weights in each holder of layers a..b-1, if experts are
        split over ``expert`` holders; None without frozen weights ((10) of ``cost.memory``)."""
        if not self.chain.frozen_parameters:
            return None
        if expert not in self._frozen:
            self._frozen[expert] = frozen_ranges(self.chain, expert)
        return self._frozen[expert]

    @cached_property
    def _frozen(self) -> dict[int, FloatArray]:
        return {}

    @property
    def least_state_bytes(self) -> float:
        """Return the bytes of one copy of weights, gradients and optimizer state."""
        return self.chain.parameters * sum(self.state_bytes) + self.chain.frozen_bytes

    @property
    def bytes_summed(self) -> float:
        """Return a lower bound on the bytes that go around per weight, scaled as if links gave them
        all of their bandwidth."""
        return self.exchanged_bytes(1)

    def exchanged_bytes(self, zero: int) -> float:
        """Return the bytes that go around per weight at a ZeRO level, scaled by the reachable
        bandwidth."""
        if zero not in self._exchanged:
            self._exchanged[zero] = self.chain.exchanged_bytes(zero) / self.model.reduction
        return self._exchanged[zero]

    @cached_property
    def state_bytes(self) -> tuple[int, int, float]:
        """Return the bytes per weight of weights, gradients and optimizer state."""
        return self.chain.dtype.bytes, self.chain.gradient_bytes, optimizer_bytes(self.chain)


def _portion(pool: Pool, width: int, samples: int, context: int, expert: int) -> Portion:
    """Return the work of one device of a replica."""
    return Portion(
        device=pool.device,
        samples=samples,
        share=1 / width,
        width=width,
        context=context,
        expert=expert,
    )


def widest(layers: tuple[Layer, ...]) -> int:
    """Return the width of the widest tensor-parallel group that any layer allows."""
    return max((layer.max_tensor_width for layer in layers), default=1)
