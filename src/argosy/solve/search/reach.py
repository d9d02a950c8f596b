"""Bound all plans of a shape without tables, by how far stages can reach along the chain.

Assume that an iteration takes T. A stage of option o begins with layer a and runs layers a..b-1 for
M micro-batches. Per micro-batch its slowest replica takes t, of which g pass until the stage before
continues, and E is the least exchange of its gradients. Then

    (1)  F(a) + M t(a, b) + E(a, b) <= T   and   G(a) + M g(a, b) <= T,

with F and G what the first micro-batch needs to pass the layers before, and to return, with every
layer at its quickest. So there is a furthest end e_v(a) for each vector v of devices, over its
options, and never an earlier one for a later a. The furthest layer that devices u reach is

    (2)  r(u) = max over v <= u of e_v(r(u - v)),     r(0) = 0,

and no plan takes T if all devices together do not reach the end of the chain. Likewise, the
earliest layer from which devices u reach the end is

    (3)  q(u) = min over v <= u of the first a with e_v(a) >= q(u - v),     q(0) = the end,

and no plan that takes T has a stage of option o on devices v unless, for some u, it reaches
q(all - u - v) from a layer up to r(u). Memory, transfers and the number of stages are ignored here;
``solve.search.bounds`` includes them, and costs a hundred times as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from argosy.plan.plan import Recompute
from argosy.solve.search.row import States
from argosy.solve.search.shape import Shape, estimated
from argosy.space.enumerate import Scope, Shared
from argosy.space.option import Option, PoolPart, Vector
from argosy.space.price import FloatArray, Prices
from argosy.space.rate import spanning_bound, throughput_bound

# An interval of times is halved this often.
_HALVINGS = 8
_Costs = list[FloatArray]
"""For each part of an option, running sums over the layers, [side, layer]: both left sides of (1)
without F and G."""


def promising_shapes(
    prices: Prices, shapes: Sequence[Shape], scope: Scope, *, spanning: bool = False
) -> list[tuple[float, Shape]]:
    """Return the shapes with their throughput bounds, most promising first: a pipeline of a few
    stages takes that many micro-batches longer to fill and drain. The bounds are of plans without
    tensor-parallel groups across nodes or, with ``spanning``, of those with such a group."""
    units = scope.units if scope.context == (1,) else None
    bound_of = spanning_bound if spanning else throughput_bound
    bounds = [
        shape.num_micro_batches * bound_of(prices, shape.micro_batch_size, units)
        for shape in shapes
    ]
    return sorted(
        zip(bounds, shapes, strict=True),
        key=lambda item: (estimated(*item), -item[1].num_micro_batches),
    )


def shape_bounds(prices: Prices, shapes: Sequence[Shape], *, spanning: bool = False) -> list[float]:
    """Return the throughput bound of each shape, in seconds; with ``spanning`` also of plans with
    tensor-parallel groups across nodes."""
    return [
        shape.num_micro_batches
        * throughput_bound(prices, shape.micro_batch_size, spanning=spanning)
        for shape in shapes
    ]


def within_reach(
    prices: Prices,
    shape: Shape,
    parts: Mapping[Vector, Sequence[Shared]],
    rare: Mapping[Vector, Sequence[Shared]],
    counts: Vector,
    seconds: float,
) -> dict[Vector, list[Shared]]:
    """Return those of ``rare`` that a plan in less than ``seconds`` may have beside ``parts``."""
    vectors = sorted({*parts, *rare})
    ways = {
        vector: list(
            dict.fromkeys(own for own, _ in (*parts.get(vector, ()), *rare.get(vector, ())))
        )
        for vector in vectors
    }
    useful = ShapeBound(prices, shape, ways, counts).useful(seconds)
    kept = {
        vector: [
            shared for shared in rare.get(vector, ()) if useful[at][ways[vector].index(shared[0])]
        ]
        for at, vector in enumerate(vectors)
    }
    return {vector: shared for vector, shared in kept.items() if shared}


def reach_bound(
    prices: Prices,
    shape: Shape,
    parts: Mapping[Vector, Sequence[Shared]],
    counts: Vector,
    bound: float,
    most: float,
) -> float:
    """Return a better bound of a shape than ``bound``, as far as it is below ``most``."""
    ways = {
        vector: list(dict.fromkeys(option_parts for option_parts, _ in shared))
        for vector, shared in parts.items()
    }
    return ShapeBound(prices, shape, ways, counts).least(bound, most) if most > bound else bound


class ShapeBound:
    """A bound by (2) that holds for the plans of one shape."""

    def __init__(
        self,
        prices: Prices,
        shape: Shape,
        ways: Mapping[Vector, Sequence[tuple[PoolPart, ...]]],
        counts: Vector,
    ) -> None:
        self.size = prices.num_layers
        states = States(counts)
        self.moves = [states.taking(vector) for vector in ways]
        self.num_states = len(states)
        count, gate = shape.num_micro_batches, shape.gate
        options = [parts for vector_ways in ways.values() for parts in vector_ways]
        single = [(at, part) for at, parts in enumerate(options) for part in parts]
        devices = [sum(part.devices for part in parts) for parts in options]
        slowest = self._sums(prices, [(part, part.most, devices[at]) for at, part in single])
        rates = np.array([_least_exchange(prices, parts, count) for parts in options])
        exchange = rates.reshape(len(options), 2) @ _running(prices)
        whole = count * (slowest[:, 0] + slowest[:, 1]) + exchange[[at for at, _ in single]]
        gated = count * (slowest[:, 0] + gate * slowest[:, 1])
        rows = iter(np.stack((whole, gated), axis=1))
        self.costs: list[list[_Costs]] = [
            [[next(rows) for _ in parts] for parts in vector_ways] for vector_ways in ways.values()
        ]
        """Costs of each vector and option."""
        quickest = slowest
        if len(single) > len(options):
            quickest = self._sums(
                prices, [(part, part.samples, devices[at]) for at, part in single]
            )
        ahead = np.diff(quickest[:, 0]).min(axis=0, initial=np.inf)
        around = np.diff(quickest[:, 0] + gate * quickest[:, 1]).min(axis=0, initial=np.inf)
        self.ahead = np.concatenate(([0.0], np.cumsum(ahead)))
        self.around = np.concatenate(([0.0], np.cumsum(around)))

    def _sums(self, prices: Prices, portions: Sequence[tuple[PoolPart, int, int]]) -> FloatArray:
        """Return [portion, forward or backward, cut]: running sums of the seconds of parts, with a
        number of samples and of devices in the stage."""
        sums = [_seconds(prices, *portion) for portion in portions]
        return np.array(sums).reshape(len(portions), 2, self.size + 1)

    def covers(self, seconds: float) -> bool:
        """Return whether a plan may take a number of seconds."""
        ends = [self._ends(costs, seconds) for costs in self.costs]
        return bool(self._reached(ends)[-1] == self.size)

    def useful(self, seconds: float) -> list[list[bool]]:
        """Return for each vector and option whether a plan that takes a number of seconds may have
        a stage of it (3)."""
        ends = [self._ends(costs, seconds) for costs in self.costs]
        reached, begun = self._reached(ends), self._begun(ends)
        layers = np.arange(self.size + 1)
        useful = []
        for (target, source), options in zip(self.moves, self.costs, strict=True):
            first, last = reached[source], begun[self.num_states - 1 - target]
            own = [self._ends([costs], seconds) for costs in options]
            furthest = [np.maximum.accumulate(np.where(end > layers, end, -1)) for end in own]
            useful.append([bool((end[first] >= last).any()) for end in furthest])
        return useful

    def _reached(self, ends: Sequence[NDArray[np.intp]]) -> NDArray[np.intp]:
        """Return r(u) for every state (2)."""
        reached = np.zeros(self.num_states, dtype=np.intp)
        while True:
            before = reached.copy()
            for (target, source), end in zip(self.moves, ends, strict=True):
                reached[target] = np.maximum(reached[target], end[reached[source]])
            if (reached == before).all():
                return reached

    def _begun(self, ends: Sequence[NDArray[np.intp]]) -> NDArray[np.intp]:
        """Return q(u) for every state (3)."""
        begun = np.full(self.num_states, self.size, dtype=np.intp)
        begins = [np.searchsorted(np.maximum.accumulate(end), range(self.size + 1)) for end in ends]
        while True:
            before = begun.copy()
            for (target, source), begin in zip(self.moves, begins, strict=True):
                begun[target] = np.minimum(begun[target], begin[begun[source]])
            if (begun == before).all():
                return begun

    def _ends(self, options: Sequence[_Costs], seconds: float) -> NDArray[np.intp]:
        """Return for every first layer a the furthest end over the options of a vector, or a itself
        if there is none."""
        beyond = np.arange(1, self.size + 2)
        left = np.array([seconds - self.ahead, seconds - self.around])
        for costs in options:
            first, *others = (
                sums.searchsorted(most, side="right")
                for sides in costs
                for sums, most in zip(sides, sides + left, strict=True)
            )
            for ends in others:
                np.minimum(first, ends, out=first)
            np.maximum(beyond, first, out=beyond)
        return beyond - 1

    def least(self, low: float, high: float) -> float:
        """Return a lower bound on all plans, between two times and near the least that may be
        reached; ``high`` if none is below."""
        if not self.covers(high):
            return high
        if self.covers(low):
            return low
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self.covers(middle):
                high = middle
            else:
                low = middle
        return low


def _running(prices: Prices) -> FloatArray:
    """Return running sums of weights outside experts and of weights of experts; tied weights count
    once."""
    layers = prices.chain.layers
    split = np.array([float(layer.expert_parameters) for layer in layers])
    common = np.array([float(layer.parameters) for layer in layers]) - split
    return np.array([np.concatenate(([0.0], np.cumsum(weights))) for weights in (common, split)])


def _least_exchange(prices: Prices, parts: tuple[PoolPart, ...], count: int) -> tuple[float, float]:
    """Return the seconds per weight of an exchange: twice around or, under ZeRO 3, once for every
    micro-batch and once more; 0 if ZeRO 3 may overlap all of it with compute."""
    option = Option(prices=prices, vector=(), parts=parts, recompute=Recompute.NONE, zero=0)
    times = 0.0 if prices.model.prefetch else min(2, 2 * count - 1) * prices.bytes_summed
    return times * option.ring[0], times * option.ring[1]


def _seconds(
    prices: Prices, part: PoolPart, samples: int, devices: int
) -> tuple[FloatArray, FloatArray]:
    split = {"context": part.context, "expert": part.expert}
    return prices.seconds(part.pool, part.width, samples, Recompute.NONE, devices=devices, **split)
