"""Uniform pipelines: what a careful person would write down, kept beside what the search finds.

The search takes devices in coarse units and ranks plans by a recurrence that knows little of contention, so a plain
plan that the exact engine finds faster may be missing among its finalists. These are such plans: pools in a row, each
cut into stages of one number of devices, all stages of one tensor width, layers cut exactly by the speed of the stages
(``solve.chain``). With W_s the time of the whole model for a micro-batch on stage s alone, such a plan of M
micro-batches and S stages takes about

    (1)  (M + S - 1) / sum over stages of 1 / W_s

if layers could be divided perfectly. It ranks them; those for which it exceeds the best time so far are not looked
at. No certificate rests on this: a plan left out here is as covered by the bounds as any other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from argosy.plan.plan import Recompute
from argosy.solve.candidate import Candidate, diverse
from argosy.solve.chain import cut_chain
from argosy.solve.judge import Complete, Judge
from argosy.solve.pipeline import Choice
from argosy.solve.shape import Shape
from argosy.space.enumerate import Scope
from argosy.space.option import Option, Part, Vector
from argosy.space.pool import Pool
from argosy.space.price import Prices, widest

_MOST_STAGES = 32
_PERMUTED = 3
"""Up to so many pools stand in every order, more only from the fastest to the slowest and back."""


@dataclass(frozen=True)
class _Layout:
    """Pools in a row, and how each is cut into stages."""

    pools: tuple[Pool, ...]
    sizes: Vector
    """Devices to a stage."""
    numbers: Vector
    """Stages."""
    width: int


@dataclass(frozen=True)
class _Row:
    """Stages of a plan before its layers are cut."""

    estimate: float
    """(1)"""
    shape: Shape
    parts: tuple[Part, ...]
    """One for each stage."""


def uniform_candidates(
    prices: Prices, judge: Judge, shapes: Sequence[Shape], scope: Scope, below: float, most: int, most_cut: int = 64
) -> list[Candidate]:
    """Up to ``most`` of different sorts that the judge finds fastest, of those below a time; looked at are the
    ``most_cut`` with the least (1)."""
    layouts = list(_layouts(prices, scope))
    rows = [row for shape in shapes for row in _rows(prices, layouts, shape, scope, below)]
    rows.sort(key=lambda row: row.estimate)
    found: list[Candidate] = []
    for row in rows[:most_cut]:
        plan = _cut(prices, row, scope)
        if plan is None:
            continue
        (seconds,), (schedule,) = judge.seconds(row.shape, [plan])
        if seconds < below:
            units = tuple(1 for _ in prices.pools)
            number = len(found)
            found.append(
                Candidate(seconds=seconds, number=number, shape=row.shape, schedule=schedule, plan=plan, units=units)
            )
    return diverse(sorted(found), most)


def _rows(prices: Prices, layouts: Sequence[_Layout], shape: Shape, scope: Scope, below: float) -> Iterator[_Row]:
    """Every layout that has a sample for each replica, is allowed, was measured so, and may stay below a time."""
    for layout in layouts:
        if any(taken // layout.width > shape.micro_batch_size for taken in layout.sizes):
            continue
        sides = zip(layout.pools, layout.sizes, strict=True)
        parts = [_part(pool, taken, layout.width, shape.micro_batch_size) for pool, taken in sides]
        if not all(scope.allows_shares((part,)) and _is_measured(prices, part) for part in parts):
            continue
        rate = sum(number / _whole(prices, part) for number, part in zip(layout.numbers, parts, strict=True))
        estimate = (shape.num_micro_batches + sum(layout.numbers) - 1) / rate
        if estimate < below:
            rows = zip(parts, layout.numbers, strict=True)
            yield _Row(estimate, shape, tuple(itertools.chain(*([part] * number for part, number in rows))))


def _layouts(prices: Prices, scope: Scope) -> Iterator[_Layout]:
    """Every order of pools, number of devices to a stage, and width."""
    most = widest(prices.chain.layers)
    for pools in _orders(prices.pools):
        for sizes in _stage_sizes(pools):
            numbers = tuple(pool.count // taken for pool, taken in zip(pools, sizes, strict=True))
            if sum(numbers) <= min(_MOST_STAGES, prices.num_layers):
                for width in filter(scope.allows_width, _widths(pools, sizes, most)):
                    yield _Layout(pools, sizes, numbers, width)


def _orders(pools: Sequence[Pool]) -> Iterator[tuple[Pool, ...]]:
    """Pools in a row, some left out."""
    if len(pools) <= _PERMUTED:
        for number in range(1, len(pools) + 1):
            yield from itertools.permutations(pools, number)
        return
    fastest = sorted(pools, key=lambda pool: -pool.device.efficiency * max(rate for _, rate in pool.device.kind.flops))
    for number in range(1, len(pools) + 1):
        yield tuple(fastest[:number])
        yield tuple(reversed(fastest[:number]))


def _stage_sizes(pools: Sequence[Pool]) -> Iterator[Vector]:
    """Devices to a stage, per pool: the same number everywhere, a node, or the whole pool."""
    first = pools[0].count
    sizes = {tuple(number for _ in pools) for number in range(1, first + 1) if first % number == 0}
    sizes |= {tuple(pool.per_node for pool in pools), tuple(pool.count for pool in pools)}
    for taken in sorted(sizes):
        if all(_divides(pool, number) for pool, number in zip(pools, taken, strict=True)):
            yield taken


def _divides(pool: Pool, number: int) -> bool:
    """Whether stages of so many devices fill the pool and lie along its nodes."""
    return pool.count % number == 0 and (pool.per_node % number == 0 or number % pool.per_node == 0)


def _widths(pools: Sequence[Pool], sizes: Vector, most: int) -> Iterator[int]:
    for width in range(1, min(most, *(pool.per_node for pool in pools), *sizes) + 1):
        if all(pool.per_node % width == 0 and taken % width == 0 for pool, taken in zip(pools, sizes, strict=True)):
            yield width


def _part(pool: Pool, taken: int, width: int, size: int) -> Part:
    samples, extra = divmod(size, taken // width)
    return Part(pool=pool.index, width=width, replicas=taken // width, samples=samples, extra=extra)


def _is_measured(prices: Prices, part: Part) -> bool:
    """Whether a profile, where there is one, knows this width with so many samples."""
    known = prices.sample_range(part.pool, part.width)
    return known is not None and known[0] <= part.samples and part.most <= known[1]


def _whole(prices: Prices, part: Part) -> float:
    """W: seconds of the whole model for a micro-batch on one stage."""
    forward, backward = prices.seconds(part.pool, part.width, part.most, Recompute.NONE)
    return float(forward[-1] + backward[-1])


def _cut(prices: Prices, row: _Row, scope: Scope) -> Complete | None:
    """Layers by speed, each stage with the least recomputation and ZeRO that fit; None where nothing does."""
    wholes = [_whole(prices, part) for part in row.parts]
    forward, backward = prices.seconds(row.parts[0].pool, row.parts[0].width, row.parts[0].most, Recompute.NONE)
    work = np.maximum(np.diff(forward + backward), 1e-12)
    ends = cut_chain(work.tolist(), [wholes[0] / whole for whole in wholes], allow_empty=False).ends
    choices = []
    for index, (first, end) in enumerate(itertools.pairwise((0, *ends))):
        depth = row.shape.least_in_flight(len(ends) - index)
        option = _lightest(prices, row.parts[index], first, end, depth, scope)
        if option is None:
            return None
        choices.append(Choice(option, first, end))
    return tuple(choices)


def _lightest(prices: Prices, part: Part, first: int, end: int, depth: int, scope: Scope) -> Option | None:
    vector = tuple(part.devices if pool.index == part.pool else 0 for pool in prices.pools)
    zeros = (0,) if part.replicas == 1 else [zero for zero in sorted(scope.zero, key=_zero_order) if zero < 3]
    for recompute in (recompute for recompute in Recompute if recompute in scope.recompute):
        for zero in zeros:
            option = Option(prices=prices, vector=vector, parts=(part,), recompute=recompute, zero=zero)
            if option.fits(first, end, depth, 1):
                return option
    return None


def _zero_order(zero: int) -> float:
    """ZeRO 1 costs no more than 0 and holds less."""
    return -math.inf if zero == 1 else zero
