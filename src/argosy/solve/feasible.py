"""Decide whether any plan fits in memory, by a dynamic programme over devices and stages.

Memory never falls when a stage takes one more layer, so among all ways to hold the end of the chain
with q stages on u devices only the one that reaches furthest to the front matters:

    (1)  low_v[b]    = the first layer a such that some option on v devices holds layers a..b-1
                       with n_q in flight
    (2)  reach[0, u] = L
    (3)  reach[q, u] = min over v <= u of  low_v[ reach[q-1, u - v] ]

and a plan of q stages fits if and only if reach[q, all devices] = 0. This is exact for the scope,
independent of times, and has no dimension for the layers: it decides in milliseconds what a search
for the fastest plan would take minutes to fail at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from argosy.cost.memory import USABLE
from argosy.plan.offload import Offload
from argosy.schedule import ScheduleSpec
from argosy.schedule.generate import FAMILY, group_size, usual_depth
from argosy.solve.finalists.judge import Complete
from argosy.solve.search.pipeline import Choice
from argosy.solve.search.row import States
from argosy.solve.search.shape import MOST_STAGES, Shape
from argosy.space.enumerate import Scope, stage_options
from argosy.space.granularity import granularities
from argosy.space.offloaded import copied_weights, least_on_devices, limit_in_flight
from argosy.space.option import Option, Vector
from argosy.space.pool import Pool
from argosy.space.price import Prices
from argosy.space.prune import Counters

# The programme (3) is solved only for granularities with at most this many states, which takes a
# moment.
_MOST_STATES = 20_000

# For each state, or for each end, the first layer that is reached.
Reach = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class FittingPlan:
    """A plan that fits in memory, whether or not it is fast."""

    shape: Shape
    schedule: ScheduleSpec
    plan: Complete


def is_quick(counts: Vector) -> bool:
    """Return whether there are so few states that (3) takes a moment."""
    return math.prod(count + 1 for count in counts) <= _MOST_STATES


def quick_units(pools: Sequence[Pool], units: Vector | None = None) -> Vector:
    """Return the finest granularity for which (3) is quick, unless units are given for these
    pools."""
    if units is not None and len(units) == len(pools):
        return units
    levels = list(granularities(pools))
    quick = [
        units
        for units in levels
        if is_quick(tuple(p.count // u for p, u in zip(pools, units, strict=True)))
    ]
    return quick[-1] if quick else levels[0]


def batch_shapes(global_batch: int, schedules: Sequence[ScheduleSpec]) -> Iterator[Shape]:
    """Yield every division of the global batch into equal micro-batches, fewest first, with the
    schedules that are possible."""
    small = [
        divisor for divisor in range(1, math.isqrt(global_batch) + 1) if global_batch % divisor == 0
    ]
    for count in sorted({*small, *(global_batch // divisor for divisor in small)}):
        fitting = _distinct([schedule for schedule in schedules if schedule.k <= count], count)
        if fitting:
            yield Shape(
                num_micro_batches=count, micro_batch_size=global_batch // count, schedules=fitting
            )


def _distinct(schedules: Sequence[ScheduleSpec], count: int) -> tuple[ScheduleSpec, ...]:
    """Return the schedules without those that have the same actions as an earlier one, whatever the
    number of stages: with up to two micro-batches, eager-1f1b is 1f1b."""
    by_actions: dict[object, ScheduleSpec] = {}
    for spec in schedules:
        is_usual = spec.kind in FAMILY and spec.depth is None
        depths = [usual_depth(spec, from_end, count) for from_end in range(1, MOST_STAGES + 1)]
        key = (group_size(spec, count), *depths) if is_usual else spec
        by_actions.setdefault(key, spec)
    return tuple(by_actions.values())


def find_fit(prices: Prices, shapes: Iterable[Shape], scope: Scope) -> FittingPlan | None:
    """Return the first shape with a plan that fits, and that plan; None if no plan of the scope
    fits."""
    # ZeRO 1 never needs more than none. Above it bytes per weight fall with every level, but a
    # layer is held whole.
    lightest = replace(
        scope, zero=tuple(zero for zero in scope.zero if zero) or scope.zero, prune=False
    )
    if not holds_state(prices, scope.offload):
        return None
    options: dict[int, Mapping[Vector, list[Option]]] = {}
    for shape in shapes:
        size = shape.micro_batch_size
        if size not in options:
            options[size] = stage_options(prices, size, lightest, Counters())
        for schedule in _lightest(shape):
            plan = _Programme(
                prices, options[size], shape, schedule, scope.counts(prices.pools)
            ).solve()
            if plan is not None:
                return FittingPlan(shape=shape, schedule=schedule, plan=plan)
    return None


def holds_state(prices: Prices, offload: Offload) -> bool:
    """Return whether all devices together have memory for one copy of weights, gradients and
    optimizer state, minus what may be kept outside: no ZeRO level needs less."""
    room = sum(pool.count * USABLE * pool.device.kind.memory for pool in prices.pools)
    return least_on_devices(prices, offload) <= room


def _lightest(shape: Shape) -> Iterator[ScheduleSpec]:
    """Yield the schedules of a shape without those that never need less memory than another one."""
    count = shape.num_micro_batches
    needs = [
        (
            *(usual_depth(schedule, left, count) for left in range(1, MOST_STAGES + 1)),
            group_size(schedule, count),
        )
        for schedule in shape.schedules
    ]
    kept: list[tuple[int, ...]] = []
    for need, schedule in sorted(
        zip(needs, shape.schedules, strict=True), key=lambda both: both[0]
    ):
        if not any(all(a <= b for a, b in zip(lighter, need, strict=True)) for lighter in kept):
            kept.append(need)
            yield schedule


class _Programme:
    """A dynamic programme that solves (1) to (3) for one shape and schedule."""

    def __init__(
        self,
        prices: Prices,
        options: Mapping[Vector, list[Option]],
        shape: Shape,
        schedule: ScheduleSpec,
        counts: Vector,
    ) -> None:
        self.prices = prices
        self.options = options
        self.vectors = sorted(options)
        self.shape = shape
        self.schedule = schedule
        self.counts = counts
        self.most = [
            _most_in_flight(prices, options[vector], group_size(schedule, shape.num_micro_batches))
            for vector in self.vectors
        ]

    def solve(self) -> Complete | None:
        states = States(self.counts)
        moves = [states.taking(vector) for vector in self.vectors]
        everything = states.index(self.counts)
        reach = [np.full(len(states), self.prices.num_layers, dtype=np.intp)]
        for left in range(1, min(sum(self.counts), MOST_STAGES) + 1):
            new = np.full(len(states), self.prices.num_layers, dtype=np.intp)
            for low, (target, source) in zip(self._low(left), moves, strict=True):
                new[target] = np.minimum(new[target], low[reach[-1][source]])
            reach.append(new)
            if new[everything] == 0:
                return self._plan(states, reach)
        return None

    def _low(self, left: int) -> list[Reach]:
        """Return the first layer that fits before each end (1) for every vector, at the ``left``-th
        stage from the end."""
        depth = usual_depth(self.schedule, left, self.shape.num_micro_batches)
        return [_first_that_fits(most >= depth) for most in self.most]

    def _plan(self, states: States, reach: Sequence[Reach]) -> Complete:
        """Return the choices behind (3), front to back."""
        choices: list[Choice] = []
        first, devices = 0, self.counts
        for left in range(len(reach) - 1, 0, -1):
            vector, end = self._step(states, reach[left - 1], left, first, devices)
            choices.append(Choice(self._option(vector, first, end, left), first, end))
            first = end
            devices = tuple(have - take for have, take in zip(devices, vector, strict=True))
        return tuple(choices)

    def _step(
        self, states: States, before: Reach, left: int, first: int, devices: Vector
    ) -> tuple[Vector, int]:
        for vector, low in zip(self.vectors, self._low(left), strict=True):
            rest = tuple(have - take for have, take in zip(devices, vector, strict=True))
            if min(rest) >= 0:
                end = int(before[states.index(rest)])
                if low[end] <= first < end:
                    return vector, end
        raise AssertionError("reach has a step behind every value")

    def _option(self, vector: Vector, first: int, end: int, left: int) -> Option:
        """Return the option with the least recomputation that fits."""
        count = self.shape.num_micro_batches
        depth, group = usual_depth(self.schedule, left, count), group_size(self.schedule, count)
        return next(
            option for option in self.options[vector] if option.fits(first, end, depth, group)
        )


def _most_in_flight(prices: Prices, options: Sequence[Option], group: int) -> NDArray[np.float64]:
    """Return [a, b]: the most micro-batches in flight with which layers a..b-1 fit under the best
    option."""
    best = np.zeros((prices.num_layers + 1,) * 2)
    for option in options:
        kept = np.maximum(option.kept_ranges, 1e-9)
        passing = option.transient + (2 * group + 1) * prices.largest_output
        (held,) = prices.weigh(np.array([option.state]), prices.held_by_kind)
        held += option.whole * prices.largest_layer(option.expert)
        frozen = option.frozen
        if frozen is not None:
            held += option.context * frozen
        first, end = np.indices(held.shape)
        if option.offload:
            held += copied_weights(option, first, end)
        fits = np.minimum.reduce(
            [(size - held - samples * passing) / (samples * kept) for size, samples in option.room]
        )
        if option.offload:
            fits = np.minimum(fits, limit_in_flight(option, first, end))
        fits[option.width > prices.widest] = 0.0
        np.maximum(best, np.floor(fits + 1e-9), out=best)
    return best


def _first_that_fits(fits: NDArray[np.bool_]) -> Reach:
    """Return for each b the least a < b with fits[a, b], or b itself if there is none (1)."""
    ends = np.arange(fits.shape[1])
    allowed = fits & (ends[:, None] < ends[None, :])
    return np.where(allowed.any(axis=0), allowed.argmax(axis=0), ends)
