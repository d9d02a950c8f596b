"""Choose how much of everything each device takes, for a given program.

With ratio b_d of device d, the ratios come from a linear programme over operations i and
collectives j:

    (1)  minimise  sum_i c_i + sum_j m_j
         c_i >= (flop_i / speed_d + bytes_i / memory_d) b_d,   m_j >= n_j b_d,   sum b = 1,
         fixed_d + variable_d b_d <= memory of d,   b_d >= least

Operations with the same mix of FLOP and bytes share one c_i, so equal layers cost nothing extra.
Each segment has its own b, c and m; memory counts them together; and what is re-sharded between
segments s and t costs

    (2)  r_st >= e_(d-1) + e_d,   e_d >= |sum_(i <= d) b_si - b_ti|,
         an upper bound: what passes the ends of d's piece

If all operations of a single segment see the same relative speeds s_d (devices of one kind, slowed
or not; otherwise matrix products and memory traffic differ), (1) is

    (3)  minimise  W max_d(b_d / s_d) + C max_d(b_d)   with  sum b = 1,  b_d <= cap_d

and has a closed form: b_d = min(a s_d, z, cap_d) for some a and z, which lie where z = a s_k, a s_k
= cap_k or z = cap_k for one device k. All of these are tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from argosy.cost.group import CollectiveMethod, GroupCollective, passed_on
from argosy.solve.programs.placement import Pricing, ProgramPlacement
from argosy.space.operations.delivery import held_bytes
from argosy.space.operations.rules import StateChoices
from argosy.space.operations.sharding import Segments

if TYPE_CHECKING:
    from argosy.solve.programs.spmd import Program

LEAST = 1e-3
"""No device gets less than this share of an even one: a device that should do nothing is not in the
group."""


@dataclass(frozen=True, kw_only=True)
class SegmentLoad:
    """The load that the operations of one segment put on devices, by their ratios."""

    work: NDArray[np.float64]
    """[mix, device]: seconds if the device did all of it."""
    padded: float = 0.0
    """Seconds per unit of the largest share, for collectives whose cost follows it."""
    num_bytes: float = 0.0
    """Bytes of which a device holds its share."""


def best_ratios(program: Program, choices: StateChoices, pricing: Pricing) -> Segments:
    """Return the best ratios for a program (1); the program's own ratios if it has nothing to
    split."""
    return segment_ratios(
        program, ProgramPlacement(program.graph, choices, pricing, program.segments)
    )[0]


def segment_ratios(program: Program, placement: ProgramPlacement) -> tuple[Segments, float]:
    """Return the ratios by (1) and (2), and the seconds that depend on the ratios."""
    pricing = placement.pricing
    fixed, sharded = _memory(program, pricing)
    loads = [
        SegmentLoad(
            work=_work(program, placement, segment),
            padded=_padded_seconds(program, segment),
            num_bytes=amount,
        )
        for segment, amount in enumerate(sharded)
    ]
    if not any(len(load.work) or load.padded for load in loads):
        return program.segments, 0.0
    between = _resharded(program, placement)
    memory = [limit - fixed for limit in program.group.memory]
    ratios = solve_ratios(loads, between=between, memory=memory)
    return replace(program.segments, ratios=ratios), _seconds(loads, between, ratios)


def _seconds(
    loads: Sequence[SegmentLoad],
    between: Mapping[tuple[int, int], float],
    ratios: Sequence[tuple[float, ...]],
) -> float:
    """Return the objective of (1) and (2), in seconds."""
    own = [
        float((load.work * np.array(shares)).max(1).sum()) + load.padded * max(shares)
        for load, shares in zip(loads, ratios, strict=True)
    ]
    passed = 0.0
    for (first, second), seconds in between.items():
        rows = passed_on(ratios[first], ratios[second])
        passed += seconds * max(*map(sum, rows), *map(sum, zip(*rows, strict=True)))
    return sum(own) + passed


def _work(program: Program, placement: ProgramPlacement, segment: int) -> NDArray[np.float64]:
    """Return the seconds of splittable operations for each device if it did all of them, one row
    per mix of FLOP and bytes."""
    group = program.group
    mixes: dict[float, list[float]] = {}
    for index, row in enumerate(program.rows):
        flop, moved = placement.row_work(index)
        if row.units and (flop or moved) and program.segments.at(index) == segment:
            mix = round(flop / moved, 3) if moved else float("inf")
            total = mixes.setdefault(mix, [0.0, 0.0])
            total[0] += flop
            total[1] += moved
    speeds = list(zip(group.flops, group.memory_bandwidths, strict=True))
    rows = [[flop / s + moved / m for s, m in speeds] for flop, moved in mixes.values()]
    return np.array(rows) if rows else np.zeros((0, len(group)))


def _padded_seconds(program: Program, segment: int) -> float:
    seconds = 0.0
    largest = max(program.segments.ratios[segment])
    for move in program.moves:
        cut = (
            move.step.after
            if move.step.kind is GroupCollective.REDUCE_SCATTER
            else move.step.before
        )
        follows = (
            move.way is CollectiveMethod.PADDED or move.step.kind is GroupCollective.ALL_TO_ALL
        )
        if follows and cut.segment == segment and largest > 0:
            seconds += move.seconds / largest
    return seconds


def _resharded(program: Program, placement: ProgramPlacement) -> dict[tuple[int, int], float]:
    """Return for each pair of segments the seconds that re-sharding would take if one device sent
    everything."""
    by_pair: dict[tuple[int, int], float] = {}
    whole, nothing = (
        (1.0, *(0.0 for _ in program.ratios[1:])),
        (0.0, 1.0, *(0.0 for _ in program.ratios[2:])),
    )
    for move in program.moves:
        if move.step.kind is GroupCollective.RESHARD:
            pair = move.step.before.segment, move.step.after.segment
            amount = placement.moved_bytes(move.value)
            latency = program.group.reshard_seconds(0.0, whole, nothing)
            seconds = program.group.reshard_seconds(amount, whole, nothing) - latency
            by_pair[pair] = by_pair.get(pair, 0.0) + seconds
    return by_pair


def _memory(program: Program, pricing: Pricing) -> tuple[float, list[float]]:
    """Return the bytes that every device holds, and for each segment those of which it holds its
    share."""
    fixed, sharded = 0.0, [0.0] * len(program.segments.ratios)
    for value, delivery in enumerate(program.deliveries):
        amount, states = held_bytes(program.graph, value, delivery, pricing.in_flight)
        if states and all(state.is_sharded for state in states):
            sharded[states[0].segment] += amount
        else:
            fixed += amount
    return fixed, sharded


def solve_ratios(
    loads: Sequence[SegmentLoad],
    *,
    between: Mapping[tuple[int, int], float] | None = None,
    memory: Sequence[float] | None = None,
    least: float | None = None,
) -> tuple[tuple[float, ...], ...]:
    """Return the ratios of every segment by (1) and (2); ``memory`` is what devices have for
    shares."""
    count = loads[0].work.shape[1]
    floor = LEAST / count if least is None else least
    if len(loads) == 1 and (ratios := _closed_ratios(loads[0], memory)) and min(ratios) >= floor:
        return (ratios,)
    return _programme_ratios(loads, between or {}, memory, floor)


def _closed_ratios(load: SegmentLoad, memory: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return the ratios in closed form (3) if they also solve (1), otherwise None."""
    total = load.work.sum(0)
    if not total.all() or not np.allclose(
        load.work * total[0], load.work[:, :1] * total, rtol=1e-9, atol=0.0
    ):
        return None
    caps = None
    if memory is not None and load.num_bytes:
        caps = np.clip(np.array(memory) / load.num_bytes, 0.0, 1.0).tolist()
    seconds, ratios = closed_form((1 / total).tolist(), 1.0, load.padded, caps)
    return ratios if seconds < math.inf else None


def closed_form(
    speeds: Sequence[float], work: float, padded: float, caps: Sequence[float] | None = None
) -> tuple[float, tuple[float, ...]]:
    """Return the optimum of (3) and the ratios.

    >>> closed_form([2.0, 1.0, 1.0], 4.0, 0.0)
    (1.0, (0.5, 0.25, 0.25))
    >>> closed_form([2.0, 1.0, 1.0], 0.0, 3.0)[0]
    1.0
    """
    speed = np.asarray(speeds, dtype=float)
    cap = np.ones_like(speed) if caps is None else np.asarray(caps, dtype=float)
    trials = [_filled(np.minimum(speed, limit), cap) for limit in speed]
    if caps is not None:
        trials += [
            _filled(np.ones_like(cap), np.minimum(level * speed, cap)) for level in cap / speed
        ]
        trials += [_filled(speed, np.minimum(level, cap)) for level in cap]
    best, answer = math.inf, cap
    for ratios in trials:
        value = work * float((ratios / speed).max()) + padded * float(ratios.max())
        if ratios.sum() > 1 - 1e-9 and value < best:
            best, answer = value, ratios
    return best, tuple(float(ratio) for ratio in answer)


def _filled(weights: NDArray[np.float64], cap: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return min(a weights, cap) with a such that it sums to 1, or all of cap."""
    held, rest = 0.0, float(weights.sum())
    for device in np.argsort(cap / weights):
        level = (1 - held) / rest
        if level * weights[device] <= cap[device] + 1e-15:
            return np.minimum(level * weights, cap)
        held, rest = held + float(cap[device]), rest - float(weights[device])
    return cap


def _programme_ratios(
    loads: Sequence[SegmentLoad],
    between: Mapping[tuple[int, int], float],
    memory: Sequence[float] | None,
    floor: float,
) -> tuple[tuple[float, ...], ...]:
    """Return the ratios that HiGHS finds for (1) and (2)."""
    count = loads[0].work.shape[1]
    programme = _Programme(count, len(loads), floor)
    for segment, load in enumerate(loads):
        programme.add_load(segment, load)
    for (first, second), seconds in between.items():
        programme.add_passing(first, second, seconds)
    if memory is not None:
        programme.add_memory([load.num_bytes for load in loads], memory)
    solution = programme.solved()
    if solution is None:
        limits = np.maximum(np.array(memory), 0.0) if memory is not None else np.zeros(count)
        even = limits / limits.sum() if 0 < limits.sum() < math.inf else np.full(count, 1 / count)
        solution = np.tile(even, (len(loads), 1))
    return tuple(
        tuple(float(ratio) for ratio in own / own.sum()) for own in np.clip(solution, floor, None)
    )


class _Programme:
    """A model of (1) and (2) that HiGHS solves; the share of device d in segment s is column s n +
    d, the others follow."""

    def __init__(self, count: int, segments: int, floor: float) -> None:
        import highspy

        self.count, self.segments = count, segments
        self.optimal, self.infinite = highspy.HighsModelStatus.kOptimal, highspy.kHighsInf
        self.solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        self.solver.setOptionValue("output_flag", False)
        self.costs = [0.0] * (count * segments)
        for _ in self.costs:
            self.solver.addVar(floor, 1.0)

    def variable(self, cost: float) -> int:
        self.solver.addVar(0.0, self.infinite)
        self.costs.append(cost)
        return len(self.costs) - 1

    def row(self, low: float, high: float, *terms: tuple[int, float]) -> None:
        large = [(column, factor) for column, factor in terms if abs(factor) > 1e-8]
        self.solver.addRow(
            low, high, len(large), [column for column, _ in large], [factor for _, factor in large]
        )

    def add_load(self, segment: int, load: SegmentLoad) -> None:
        """Add the compute and collectives of a segment (1); a c_i counts in seconds of its slowest
        device."""
        own = range(segment * self.count, (segment + 1) * self.count)
        for seconds in load.work:
            most = self.variable(float(seconds.max()))
            for column, part in zip(own, seconds / seconds.max(), strict=True):
                self.row(0.0, self.infinite, (most, 1.0), (column, -float(part)))
        if load.padded:
            largest = self.variable(load.padded)
            for column in own:
                self.row(0.0, self.infinite, (largest, 1.0), (column, -1.0))
        self.row(1.0, 1.0, *((column, 1.0) for column in own))

    def add_passing(self, one: int, other: int, seconds: float) -> None:
        """Add the cost of re-sharding between two segments (2)."""
        most = self.variable(seconds)
        passed = [self.variable(0.0) for _ in range(self.count - 1)]
        for end, amount in enumerate(passed):
            apart = [(one * self.count + d, 1.0) for d in range(end + 1)]
            apart += [(other * self.count + d, -1.0) for d in range(end + 1)]
            for sign in (1.0, -1.0):
                self.row(
                    0.0,
                    self.infinite,
                    (amount, 1.0),
                    *((column, sign * factor) for column, factor in apart),
                )
        for device in range(self.count):
            around = [passed[end] for end in (device - 1, device) if 0 <= end < len(passed)]
            self.row(0.0, self.infinite, (most, 1.0), *((column, -1.0) for column in around))

    def add_memory(self, sizes: Sequence[float], memory: Sequence[float]) -> None:
        for device, limit in enumerate(memory):
            if math.isfinite(limit):
                scale = max(limit, 1.0)
                terms = [
                    (segment * self.count + device, size / scale)
                    for segment, size in enumerate(sizes)
                ]
                self.row(-self.infinite, 1.0, *terms)

    def solved(self) -> NDArray[np.float64] | None:
        """Return the ratios, or None if there are none."""
        scale = max(self.costs)
        for column, cost in enumerate(self.costs):
            self.solver.changeColCost(column, cost / scale if scale else 0.0)
        self.solver.run()
        if self.solver.getModelStatus() != self.optimal:
            return None
        values = np.array(self.solver.getSolution().col_value)
        return values[: self.count * self.segments].reshape(self.segments, self.count)
