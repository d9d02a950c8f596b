"""Uniform pipelines: what a careful person would write down, kept beside what the search finds.

The search takes devices in coarse units and ranks plans by a recurrence that knows little of contention, so a plain
plan that the exact engine finds faster may be missing among its finalists. These are such plans: pools in a row, each
cut into stages of one number of devices, all stages of one tensor width, layers cut exactly by the speed of the stages
(``solve.chain``); where pools do not divide evenly, the stage at the seam mixes them. With W_s the time of the whole
model for a micro-batch on stage s alone, such a plan of M micro-batches and S stages takes about

    (1)  (M + S - 1) / sum over stages of 1 / W_s + exchange of gradients / S

if layers and weights could be divided perfectly. It ranks them; those whose M / sum alone is no better than the best
time so far are not looked at. Two stages may differ in size, and their cut also depends on bytes and weights:

    (2)  (M - 1) max(L_1, L_2, x) + L_1 + L_2 + 2 x + max(exchange_1, exchange_2)

No certificate rests on this: a plan left out here is as covered by the bounds as any other.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from argosy.plan.plan import Recompute
from argosy.solve.candidate import Candidate, diverse
from argosy.solve.chain import cut_chain
from argosy.solve.judge import Complete, Judge
from argosy.solve.pipeline import Choice
from argosy.solve.shape import Shape
from argosy.space.enumerate import Scope
from argosy.space.option import Option, Part, Vector, share_samples
from argosy.space.pool import Pool
from argosy.space.price import FloatArray, Prices, widest

_MOST_STAGES = 32
_MOST_APART = 4
"""Devices of a stage that is taken apart."""
_MOST_CUT = 48
"""Plans that are cut and judged, those with the least (1) first, and"""
_MOST_JUDGED = 30_000
"""stages times micro-batches of all of them together, and of one an eighth of that."""
_MOST_CUTS = 8
"""Of two stages, that are tried for one that fits."""
_PERMUTED = 3
"""Up to so many pools stand in every order, more only from the fastest to the slowest and back."""


class _Stage(NamedTuple):
    """So many devices of one pool, or of several that follow one another in the row, in groups of a tensor width."""

    taken: tuple[tuple[int, int], ...]
    """(pool, devices)"""
    width: int


_Layout = tuple[_Stage, ...]


@dataclass(frozen=True)
class _Row:
    """Stages of a plan before its layers are cut."""

    estimate: float
    """(1)"""
    shape: Shape
    stages: tuple[tuple[Part, ...], ...]


def uniform_candidates(
    prices: Prices, judge: Judge, shapes: Sequence[Shape], scope: Scope, below: float, most: int
) -> list[Candidate]:
    """Up to ``most`` of different sorts that the judge finds fastest, of those below a time: of every set of pools in
    turn, because what the network between pools costs is what the judge knows least of."""
    layouts = list(_layouts(prices, scope))
    groups: dict[frozenset[int], list[_Row]] = {}
    for shape in shapes:
        for row in _rows(prices, layouts, shape, scope, below):
            used = frozenset(part.pool for parts in row.stages for part in parts)
            groups.setdefault(used, []).append(row)
    each = max(16, _MOST_CUT // max(1, len(groups)))
    found = []
    for rows in groups.values():
        judged = itertools.islice(_judged(prices, judge, _varied(rows), scope, below), each)
        found.append(diverse(sorted(judged), most))
    found.sort(key=lambda group: group[:1])
    turns = itertools.chain(*itertools.zip_longest(*found))
    return [candidate for candidate in turns if candidate is not None][:most]


def _varied(rows: Sequence[_Row]) -> list[_Row]:
    """The best by (1) of every number of stages in turn: deep pipelines look best where nothing counts but compute."""
    turn: Counter[int] = Counter()
    places: list[tuple[int, float, int, _Row]] = []
    for row in sorted(rows, key=lambda one: one.estimate):
        turn[len(row.stages)] += 1
        places.append((turn[len(row.stages)], row.estimate, len(places), row))
    return [row for *_, row in sorted(places)]


def _judged(prices: Prices, judge: Judge, rows: Sequence[_Row], scope: Scope, below: float) -> Iterator[Candidate]:
    steps = 0
    for number, row in enumerate(rows):
        more = len(row.stages) * row.shape.num_micro_batches
        affordable = more <= _MOST_JUDGED // 8 and steps + more <= _MOST_JUDGED
        plan = _cut(prices, row, scope) if affordable else None
        if plan is None:
            continue
        steps += more
        (seconds,), (schedule,) = judge.seconds(row.shape, [plan])
        if seconds < below:
            units = tuple(1 for _ in prices.pools)
            yield Candidate(seconds=seconds, number=number, shape=row.shape, schedule=schedule, plan=plan, units=units)


def _rows(prices: Prices, layouts: Sequence[_Layout], shape: Shape, scope: Scope, below: float) -> Iterator[_Row]:
    """Every layout that has a sample for each replica, is allowed, was measured so, and may stay below a time."""
    known: dict[_Stage, tuple[tuple[Part, ...], float, float] | None] = {}
    count = shape.num_micro_batches
    for layout in layouts:
        for stage in layout:
            if stage not in known:
                known[stage] = _known(prices, stage, shape.micro_batch_size, scope)
        stages = [found for stage in layout if (found := known[stage]) is not None]
        if len(stages) < len(layout):
            continue
        rate = sum(found[1] for found in stages)
        if count / rate < below:
            exchange = max(found[2] for found in stages) / len(layout)
            estimate = (count + len(layout) - 1) / rate + exchange
            row = _Row(estimate, shape, tuple(found[0] for found in stages))
            yield replace(row, estimate=float(_two_stage_seconds(prices, row).min())) if len(stages) == 2 else row


def _known(prices: Prices, stage: _Stage, size: int, scope: Scope) -> tuple[tuple[Part, ...], float, float] | None:
    """A stage's parts, 1 / W and exchange; None where it is not to be."""
    parts = _parts(prices, stage, size)
    if parts is None or not _is_allowed(prices, parts, scope):
        return None
    return parts, 1 / _whole(prices, parts), _exchange(prices, parts)


def _layouts(prices: Prices, scope: Scope) -> Iterator[_Layout]:
    """Every order of pools, number of devices to a stage, and width, and with its ends taken apart."""
    most, most_stages = widest(prices.chain.layers), min(_MOST_STAGES, prices.num_layers)
    for pools in _orders(prices.pools):
        for stages in _cut_rows(pools, most_stages, most):
            if not scope.allows_width(stages[0].width):
                continue
            yield stages
            if scope.allows_width(1):
                yield from (layout for layout in _ends_apart(stages) if len(layout) <= most_stages)


def _cut_rows(pools: Sequence[Pool], most_stages: int, widest_group: int) -> Iterator[_Layout]:
    """Stages of one number of devices, of a node, or of a pool, and two stages of which one has few devices; wider than
    1 only where they lie along the nodes."""
    total = sum(pool.count for pool in pools)
    for size in (number for number in range(1, total + 1) if total % number == 0 and total // number <= most_stages):
        yield tuple(_Stage(taken, 1) for taken in _along(pools, [size] * (total // size)))
    for few in (number for number in (1, 2, 4, 8, 16) if 2 * number < total):
        for sizes in ((total - few, few), (few, total - few)):
            yield tuple(_Stage(taken, 1) for taken in _along(pools, sizes))
    equal = {tuple(number for _ in pools) for number in range(2, max(pool.count for pool in pools) + 1)}
    equal |= {tuple(pool.per_node for pool in pools), tuple(pool.count for pool in pools)}
    for each in sorted(equal):
        pairs = list(zip(pools, each, strict=True))
        if not all(_divides(pool, number) for pool, number in pairs):
            continue
        if sum(pool.count // number for pool, number in pairs) > most_stages:
            continue
        for width in _widths(pools, each, widest_group):
            if width > 1 or len(set(each)) > 1:
                rows = ([_Stage(((pool.index, number),), width)] * (pool.count // number) for pool, number in pairs)
                yield tuple(itertools.chain(*rows))


def _along(pools: Sequence[Pool], sizes: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """The row of all devices, so many at a time."""
    left = [(pool.index, pool.count) for pool in pools]
    for size in sizes:
        stage, missing = [], size
        while missing:
            pool, number = left.pop(0)
            stage.append((pool, min(number, missing)))
            if number > missing:
                left.insert(0, (pool, number - missing))
            missing -= min(number, missing)
        yield tuple(stage)


def _ends_apart(stages: _Layout) -> Iterator[_Layout]:
    """The first stage, the last, or both as single devices: an embedding or a head that share weights may be better off
    without replicas."""
    first, last = (1 < sum(number for _, number in stages[at].taken) <= _MOST_APART for at in (0, -1))
    if first:
        yield (*_singles(stages[0]), *stages[1:])
    if last and len(stages) > 1:
        yield (*stages[:-1], *_singles(stages[-1]))
    if first and last and len(stages) > 1:
        yield (*_singles(stages[0]), *stages[1:-1], *_singles(stages[-1]))


def _singles(stage: _Stage) -> Iterator[_Stage]:
    for pool, number in stage.taken:
        yield from [_Stage(((pool, 1),), 1)] * number


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


def _divides(pool: Pool, number: int) -> bool:
    """Whether stages of so many devices fill the pool and lie along its nodes."""
    return pool.count % number == 0 and (pool.per_node % number == 0 or number % pool.per_node == 0)


def _widths(pools: Sequence[Pool], sizes: Vector, most: int) -> Iterator[int]:
    for width in range(1, min(most, *(pool.per_node for pool in pools), *sizes) + 1):
        if all(pool.per_node % width == 0 and taken % width == 0 for pool, taken in zip(pools, sizes, strict=True)):
            yield width


def _parts(prices: Prices, stage: _Stage, size: int) -> tuple[Part, ...] | None:
    """Samples shared so that the slowest is as fast as possible; None where there are too few."""
    groups = [(pool, stage.width, number // stage.width) for pool, number in stage.taken]
    if len(groups) > 1:
        return share_samples(prices, groups, size, Recompute.NONE)
    ((pool, width, replicas),) = groups
    samples, extra = divmod(size, replicas)
    return (Part(pool=pool, width=width, replicas=replicas, samples=samples, extra=extra),) if samples else None


def _is_allowed(prices: Prices, parts: tuple[Part, ...], scope: Scope) -> bool:
    """By the scope, and by a profile, where there is one, that must know this width with so many samples."""
    if not scope.allows_shares(parts):
        return False
    for part in parts:
        known = prices.sample_range(part.pool, part.width)
        if known is None or part.samples < known[0] or part.most > known[1]:
            return False
    return True


def _whole(prices: Prices, parts: tuple[Part, ...]) -> float:
    """W: seconds of the whole model for a micro-batch on one stage, on its slowest replica."""
    sums = (prices.seconds(part.pool, part.width, part.most, Recompute.NONE) for part in parts)
    return max(float(forward[-1] + backward[-1]) for forward, backward in sums)


def _exchange(prices: Prices, parts: tuple[Part, ...]) -> float:
    """Seconds in which the replicas of a stage that holds all weights would sum gradients."""
    replicas = sum(part.replicas for part in parts)
    if replicas == 1:
        return 0.0
    pools = [prices.pools[part.pool] for part in parts]
    inside = len(parts) == 1 and parts[0].devices <= pools[0].per_node
    rates = (pool.intra_bandwidth if inside or not pool.nic_bandwidth else pool.nic_bandwidth for pool in pools)
    rate = min(rates) * min(part.width for part in parts)
    return 2 * (replicas - 1) / replicas * float(prices.parameters[-1]) * prices.chain.dtype.bytes / rate


def shifted(plan: Complete) -> Iterator[Complete]:
    """The same stages with one layer moved from any of them to any other, where it fits is for the judge to say."""
    lengths = [choice.end - choice.first for choice in plan]
    for giver, taker in itertools.permutations(range(len(plan)), 2):
        if lengths[giver] > 1:
            moved = [n + (at == taker) - (at == giver) for at, n in enumerate(lengths)]
            cuts = itertools.pairwise(itertools.accumulate(moved, initial=0))
            yield tuple(Choice(choice.option, *cut) for choice, cut in zip(plan, cuts, strict=True))


def regrouped(plan: Complete, scope: Scope) -> Iterator[Complete]:
    """The same stages with the replicas of one of them joined in pairs to groups twice as wide."""
    for at, choice in enumerate(plan):
        option, part = choice.option, choice.option.parts[0]
        wider = 2 * part.width
        if len(option.parts) > 1 or part.replicas % 2 or option.pools[0].per_node % wider or part.context > 1:
            continue
        samples, extra = divmod(part.replicas * part.samples + part.extra, part.replicas // 2)
        joined = replace(part, width=wider, replicas=part.replicas // 2, samples=samples, extra=extra)
        if part.expert > 1 and (
            extra or joined.replicas % part.expert
        ):  # experts need equal holders, as many as groups
            continue
        if scope.allows_width(wider) and _is_allowed(option.prices, (joined,), scope):
            zero = option.zero if joined.replicas > 1 else 0
            other = replace(choice, option=replace(option, parts=(joined,), zero=zero))
            yield (*plan[:at], other, *plan[at + 1 :])


def _cut(prices: Prices, row: _Row, scope: Scope) -> Complete | None:
    """Each stage with the least recomputation and ZeRO that fit; None where nothing does."""
    for ends in _ends(prices, row):
        choices = []
        for index, (first, end) in enumerate(itertools.pairwise((0, *ends))):
            depth = row.shape.least_in_flight(len(ends) - index)
            option = _lightest(prices, row.stages[index], first, end, depth, scope)
            if option is None:
                break
            choices.append(Choice(option, first, end))
        else:
            return tuple(choices)
    return None


def _ends(prices: Prices, row: _Row) -> Iterator[tuple[int, ...]]:
    """Where stages end: by speed; the few best cuts by (2) where there are two."""
    if len(row.stages) == 2:
        times = _two_stage_seconds(prices, row)
        order = np.argsort(times, kind="stable")[:_MOST_CUTS].tolist()
        yield from ((cut, prices.num_layers) for cut in order if np.isfinite(times[cut]))
        return
    wholes = [_whole(prices, parts) for parts in row.stages]
    one = row.stages[0][0]
    forward, backward = prices.seconds(one.pool, one.width, one.most, Recompute.NONE)
    work = np.maximum(np.diff(forward + backward), 1e-12)
    yield cut_chain(work.tolist(), [wholes[0] / whole for whole in wholes], allow_empty=False).ends


def _two_stage_seconds(prices: Prices, row: _Row) -> FloatArray:
    """(2) for every cut; infinite at the ends of the chain."""
    count, size = row.shape.num_micro_batches, row.shape.micro_batch_size
    before, after = (_running(prices, parts) for parts in row.stages)
    times = before, after[-1] - after
    held = prices.parameters / prices.parameters[-1]
    sums = [share * _exchange(prices, parts) for share, parts in zip((held, 1 - held), row.stages, strict=True)]
    rate = min(prices.pools[part.pool].nic_bandwidth or math.inf for parts in row.stages for part in parts)
    hop = size * prices.outputs / rate
    found = (count - 1) * np.maximum.reduce([*times, hop]) + times[0] + times[1] + 2 * hop + np.maximum(*sums)
    found[[0, -1]] = np.inf
    return np.asarray(found)


def _running(prices: Prices, parts: tuple[Part, ...]) -> FloatArray:
    """Running sum of forward + backward on the slowest replica."""
    sums = [prices.seconds(part.pool, part.width, part.most, Recompute.NONE) for part in parts]
    return np.asarray(np.maximum.reduce([forward + backward for forward, backward in sums]))


def _lightest(prices: Prices, parts: tuple[Part, ...], first: int, end: int, depth: int, scope: Scope) -> Option | None:
    vector = tuple(sum(part.devices for part in parts if part.pool == pool.index) for pool in prices.pools)
    alone = sum(part.replicas for part in parts) == 1
    zeros = (0,) if alone else [zero for zero in sorted(scope.zero, key=_zero_order) if zero < 3]
    for recompute in (recompute for recompute in Recompute if recompute in scope.recompute):
        for zero in zeros:
            option = Option(prices=prices, vector=vector, parts=parts, recompute=recompute, zero=zero)
            if option.fits(first, end, depth, 1):
                return option
    return None


def _zero_order(zero: int) -> float:
    """ZeRO 1 costs no more than 0 and holds less."""
    return -math.inf if zero == 1 else zero
