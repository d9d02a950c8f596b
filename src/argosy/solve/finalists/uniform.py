"""Uniform pipelines: what a careful person would write down, kept beside what the search finds.

The search takes devices in coarse units and ranks plans by a recurrence that knows little of
contention, so a plain plan that the exact engine finds faster may be missing among its finalists.
These are such plans: the layouts of ``solve.finalists.layouts`` with layers cut exactly by the
speed of the stages (``solve.search.chain``). With W_s the time of the whole model for a micro-batch
on stage s alone, such a plan of M micro-batches and S stages takes about

    (1)  (M + S - 1) / sum over stages of 1 / W_s + exchange of gradients / S

if layers and weights could be divided perfectly. It ranks them. Two stages may differ in size, and
their cut also depends on bytes and weights:

    (2)  (M - 1) max(L_1, L_2, x) + L_1 + L_2 + 2 x + max(exchange_1, exchange_2)

Most layouts are out of the question before anything is cut. However the layers are cut, stage s
takes t_s for a micro-batch, sum of t_s / W_s >= c with c the least that the shares of the layers in
W_s add up to, and the first and the last micro-batch pass the stages before: theta sum_{i < s} t_i
+ M t_s <= T, theta the share of a backward that is waited for. For any y >= 0 with M y_s + theta
sum_{i > s} y_i >= 1 / W_s, as

    (3)  y_s = max(0, (1 / W_s - theta sum_{i > s} y_i) / M),

the sum over stages of y_s times their inequalities says c <= T sum of y_s. With E_s the least
exchange of all weights, and c also the least of the shares in the weights,

    (4)  T >= c / sum over stages of 1 / (M W_s + E_s).

What (3) or (4) keeps above the best time so far is not looked at. Neither is a layout whose stages
do not hold the chain when, one after the other,

    (5)  stage s takes as many layers as keep the way there and back, its M micro-batches and its
         exchange below T,

which errs only where a layer less in front would give those behind room for more than a layer.

No certificate rests on this: a plan left out here is as covered by the bounds as any other.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.plan.plan import Recompute
from argosy.solve.finalists.candidate import Candidate, diverse
from argosy.solve.finalists.judge import Complete, Judge
from argosy.solve.finalists.layouts import Layout, Section, layouts_of
from argosy.solve.search.chain import cut_chain
from argosy.solve.search.pipeline import Choice
from argosy.solve.search.shape import Shape
from argosy.space.enumerate import Scope
from argosy.space.option import Option, PoolPart
from argosy.space.price import FloatArray, Prices, shares
from argosy.space.shares import share_samples, whole_seconds

_MOST_CUT = 48
"""Plans that are cut and judged, those with the least (1) first, and"""
_MOST_JUDGED = 30_000
"""stages times micro-batches of all of them together, and of one an eighth of that."""
_MOST_CUTS = 8
"""Of two stages, that are tried for one that fits."""


@dataclass(frozen=True)
class _Row:
    """Stages of a plan before its layers are cut."""

    estimate: float
    """(1)"""
    shape: Shape
    stages: tuple[tuple[PoolPart, ...], ...]


def uniform_candidates(
    prices: Prices, judge: Judge, shapes: Sequence[Shape], scope: Scope, below: float, most: int
) -> list[Candidate]:
    """Up to ``most`` of different sorts that the judge finds fastest, of those below a time: of
    every set of pools in turn, because what the network between pools costs is what the judge knows
    least of."""
    table = LayoutTable(prices, layouts_of(prices, scope))
    groups: dict[frozenset[int], list[_Row]] = {}
    for shape in shapes:
        for row in rows_of(prices, table, shape, scope, below):
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
    """The best by (1) of every number of stages in turn: deep pipelines look best where nothing
    counts but compute."""
    turn: Counter[int] = Counter()
    places: list[tuple[int, float, int, _Row]] = []
    for row in sorted(rows, key=lambda one: one.estimate):
        turn[len(row.stages)] += 1
        places.append((turn[len(row.stages)], row.estimate, len(places), row))
    return [row for *_, row in sorted(places)]


def _judged(
    prices: Prices, judge: Judge, rows: Sequence[_Row], scope: Scope, below: float
) -> Iterator[Candidate]:
    steps, filling = 0, _Filling(prices, judge, below)
    for number, row in enumerate(rows):
        more = len(row.stages) * row.shape.num_micro_batches
        if more > _MOST_JUDGED // 8 or steps + more > _MOST_JUDGED:
            continue
        steps += more
        plan = _cut(prices, row, scope) if filling.works(row) else None
        if plan is None:
            continue
        (seconds,), (schedule,) = judge.seconds(row.shape, [plan], below=below)
        if seconds < below:
            units = tuple(1 for _ in prices.pools)
            yield Candidate(
                seconds=seconds,
                number=number,
                shape=row.shape,
                schedule=schedule,
                plan=plan,
                units=units,
            )


class LayoutTable:
    """Layouts as an array of what stands where, and what their sections exchange."""

    def __init__(self, prices: Prices, layouts: Iterable[Layout]) -> None:
        numbers: dict[Section, int] = {}
        known = list(
            layouts
        )  # alive, so that an id stands for one section: sections are few, and slow to hash
        alone = {id(section): section for layout in known for section in layout}
        number_of = {at: numbers.setdefault(section, len(numbers)) for at, section in alone.items()}
        rows = [[number_of[id(section)] for section in layout] for layout in known]
        self.sections = tuple(numbers)
        longest = max(map(len, rows), default=0)
        padded = [[*row, *[len(numbers)] * (longest - len(row))] for row in rows]
        self.rows = np.array(padded, dtype=np.intp).reshape(len(rows), longest)
        """[layout, place] = number of a section, one past the last where there is none."""
        self.lengths = np.array([len(row) for row in rows], dtype=np.intp)
        self.exchanges = np.array(
            [*(_least_exchange(prices, section) for section in self.sections), 0.0]
        )
        self.estimates = np.array([*(_exchange(prices, section) for section in self.sections), 0.0])
        """Per section, and 0 for none."""

    def used(self, rows: NDArray[np.intp]) -> list[int]:
        """The sections of some rows, in order."""
        is_used = np.zeros(len(self.sections) + 1, dtype=np.bool_)
        is_used[rows] = True
        return np.nonzero(is_used[:-1])[0].tolist()


def rows_of(
    prices: Prices, table: LayoutTable, shape: Shape, scope: Scope, below: float
) -> Iterator[_Row]:
    """Every layout that has a sample for each replica, is allowed, was measured so, and may stay
    below a time; no more stages than micro-batches, as long as those could be smaller."""
    size, count = shape.micro_batch_size, shape.num_micro_batches
    rows = table.rows[table.lengths <= count] if size > 1 else table.rows
    used = table.used(rows)
    wholes = np.full(len(table.sections) + 1, np.inf)
    for number in used:
        wholes[number] = _least_whole(prices, table.sections[number], size, scope)
    covered = _least_shares(prices, [table.sections[number] for number in used], size)
    rows = rows[_least_seconds(shape, wholes[rows], table.exchanges[rows], covered) < below]
    shared: dict[int, tuple[PoolPart, ...]] = {}
    for number in table.used(rows):
        wholes[number] = math.nan
        parts = _parts(prices, table.sections[number], size, scope)
        if parts is not None:
            shared[number], wholes[number] = parts, whole_seconds(prices, parts, Recompute.NONE)
    rows = rows[_least_seconds(shape, wholes[rows], table.exchanges[rows], covered) < below]
    rates, exchanges = (
        (1 / wholes[rows]).sum(axis=1).tolist(),
        table.estimates[rows].max(axis=1, initial=0.0).tolist(),
    )
    for row, rate, exchange in zip(rows.tolist(), rates, exchanges, strict=True):
        stages = tuple(shared[number] for number in row if number < len(table.sections))
        if len(stages) == 2:
            yield _Row(float(_two_stage_seconds(prices, shape, stages).min()), shape, stages)
        else:
            yield _Row((count + len(stages) - 1) / rate + exchange / len(stages), shape, stages)


def _least_whole(prices: Prices, section: Section, size: int, scope: Scope) -> float:
    """W at the least: of a mixed section as if all samples were as quick as in one large heap; a
    measured profile may be quicker anywhere, so there they are shared out. Not a number where there
    are too few."""
    width, total = section.width, section.devices // section.width
    if total > size:
        return math.nan
    if prices.model.profiles:
        parts = _parts(prices, section, size, scope)
        return whole_seconds(prices, parts, Recompute.NONE) if parts is not None else math.nan
    if len(section.taken) == 1:
        return prices.whole(section.taken[0][0], width, -(-size // total), Recompute.NONE)
    rates = (
        number // width / prices.whole(pool, width, size, Recompute.NONE)
        for pool, number in section.taken
    )
    return 1 / sum(rates)


def _least_exchange(prices: Prices, section: Section) -> float:
    """E: between nodes, all weights go through the slowest of them once at the least, unless ZeRO 3
    hides that."""
    pools = [prices.pools[pool] for pool, _ in section.taken]
    inside = all(
        number <= pool.per_node for pool, (_, number) in zip(pools, section.taken, strict=True)
    )
    rate = min(pool.nic_bandwidth for pool in pools)
    if (
        not rate
        or prices.model.prefetch
        or (inside and frozenset.intersection(*(pool.homes for pool in pools)))
    ):
        return 0.0
    return prices.chain.parameters * prices.bytes_summed / rate


def _least_seconds(
    shape: Shape, wholes: FloatArray, sums: FloatArray, covered: tuple[float, float]
) -> FloatArray:
    """(3) and (4) for every row of W and E."""
    total, gate, count = np.zeros(len(wholes)), shape.gate, shape.num_micro_batches
    for rate in 1 / wholes.T[::-1]:
        total += np.maximum(0.0, (rate - gate * total) / count)
    with np.errstate(divide="ignore"):
        least = np.maximum(
            covered[0] / total, covered[1] / (1 / (count * wholes + sums)).sum(axis=1)
        )
    return np.asarray(least)


def _least_shares(prices: Prices, sections: Sequence[Section], size: int) -> tuple[float, float]:
    """c of (3) and of (4): with one sample and with all of them, between which the share of a layer
    in the time only rises or only falls; and the same where it has a smaller share in the
    weights."""
    ways = {(pool, section.width) for section in sections for pool, _ in section.taken}
    found = []
    for pool, width in sorted(ways):
        fewest, most = prices.sample_range(pool, width) or (1, 0)
        highest = int(min(size, most))
        for samples in sorted({fewest, highest}) if fewest <= highest else ():
            seconds = np.diff(np.add(*prices.seconds(pool, width, samples, Recompute.NONE)))
            found.append(shares(seconds))
    if not found:
        return 1.0, 1.0
    least = np.min(found, axis=0)
    weights = np.array([float(layer.parameters) for layer in prices.chain.layers])
    return float(least.sum()), float(np.minimum(least, shares(weights)).sum())


class _Filling:
    """(5), with what is asked for again and again."""

    def __init__(self, prices: Prices, judge: Judge, below: float) -> None:
        self.prices = prices
        self.judge = judge
        self.below = below
        self.weights = prices.parameters
        self.outputs = prices.outputs.tolist()
        self.costs: dict[tuple[int, tuple[PoolPart, ...]], tuple[list[float], list[float]]] = {}

    def works(self, row: _Row) -> bool:
        """Whether all layers find a place below the time."""
        size, count, gate = self.prices.num_layers, len(row.stages), row.shape.gate
        first, path, before = 0, 0.0, None
        for left, parts in zip(range(count - 1, -1, -1), row.stages, strict=True):
            if before is not None:
                ways = 2 if first > self.prices.chain.first_backward else 1
                path += ways * self.judge.hop_seconds(before, parts, self.outputs[first])
            whole, once = self._costs(row.shape, parts)
            end = min(bisect_right(whole, whole[first] + self.below - path) - 1, size - left)
            if end <= first:
                return False
            path += gate * (once[end] - once[first])
            first, before = end, parts
        return first == size

    def _costs(self, shape: Shape, parts: tuple[PoolPart, ...]) -> tuple[list[float], list[float]]:
        """Running sums over the layers: an iteration of a stage with its exchange, and one
        micro-batch."""
        key = (shape.num_micro_batches, parts)
        if key not in self.costs:
            once = _running(self.prices, parts)
            option = Option(
                prices=self.prices, vector=(), parts=parts, recompute=Recompute.NONE, zero=0
            )
            whole = shape.num_micro_batches * once + option.exchange[0] * self.weights
            self.costs[key] = whole.tolist(), once.tolist()
        return self.costs[key]


def _parts(
    prices: Prices, section: Section, size: int, scope: Scope
) -> tuple[PoolPart, ...] | None:
    """Samples shared so that the slowest is as fast as possible; None where there are too few, or
    it is not to be."""
    groups = [(pool, section.width, number // section.width) for pool, number in section.taken]
    parts = share_samples(prices, groups, size, Recompute.NONE)
    return parts if parts is not None and is_allowed(prices, parts, scope) else None


def is_allowed(prices: Prices, parts: tuple[PoolPart, ...], scope: Scope) -> bool:
    """By the scope, and by a profile, where there is one, that must know this width with so many
    samples."""
    if not scope.allows_shares(parts):
        return False
    for part in parts:
        known = prices.sample_range(part.pool, part.width)
        if known is None or part.samples < known[0] or part.most > known[1]:
            return False
    return True


def _section(parts: tuple[PoolPart, ...]) -> Section:
    return Section(tuple((part.pool, part.devices) for part in parts), parts[0].width)


def _exchange(prices: Prices, section: Section) -> float:
    """Seconds in which the replicas of a section that holds all weights would sum gradients."""
    replicas = section.devices // section.width
    if replicas == 1:
        return 0.0
    pools = [prices.pools[pool] for pool, _ in section.taken]
    inside = len(pools) == 1 and section.taken[0][1] <= pools[0].per_node
    rates = (
        pool.intra_bandwidth if inside or not pool.nic_bandwidth else pool.nic_bandwidth
        for pool in pools
    )
    rate = min(rates) * section.width
    return (
        2
        * (replicas - 1)
        / replicas
        * float(prices.parameters[-1])
        * prices.chain.dtype.bytes
        / rate
    )


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
        times = _two_stage_seconds(prices, row.shape, row.stages)
        order = np.argsort(times, kind="stable")[:_MOST_CUTS].tolist()
        yield from ((cut, prices.num_layers) for cut in order if np.isfinite(times[cut]))
        return
    wholes = [whole_seconds(prices, parts, Recompute.NONE) for parts in row.stages]
    one = row.stages[0][0]
    forward, backward = prices.seconds(one.pool, one.width, one.most, Recompute.NONE)
    work = np.maximum(np.diff(forward + backward), 1e-12)
    yield cut_chain(work.tolist(), [wholes[0] / whole for whole in wholes], allow_empty=False).ends


def _two_stage_seconds(
    prices: Prices, shape: Shape, stages: Sequence[tuple[PoolPart, ...]]
) -> FloatArray:
    """(2) for every cut; infinite at the ends of the chain."""
    count, size = shape.num_micro_batches, shape.micro_batch_size
    before, after = (_running(prices, parts) for parts in stages)
    times = before, after[-1] - after
    held = prices.parameters / max(prices.parameters[-1], 1.0)
    sums = [
        share * _exchange(prices, _section(parts))
        for share, parts in zip((held, 1 - held), stages, strict=True)
    ]
    rate = min(
        prices.pools[part.pool].nic_bandwidth or math.inf for parts in stages for part in parts
    )
    hop = size * prices.outputs / rate
    back = size * prices.returned / rate
    found = (
        (count - 1) * np.maximum.reduce([*times, hop])
        + times[0]
        + times[1]
        + (hop + back)
        + np.maximum(*sums)
    )
    found[[0, -1]] = np.inf
    return np.asarray(found)


def _running(prices: Prices, parts: tuple[PoolPart, ...]) -> FloatArray:
    """Running sum of forward + backward on the slowest replica."""
    sums = [prices.seconds(part.pool, part.width, part.most, Recompute.NONE) for part in parts]
    return np.asarray(np.maximum.reduce([forward + backward for forward, backward in sums]))


def _lightest(
    prices: Prices, parts: tuple[PoolPart, ...], first: int, end: int, depth: int, scope: Scope
) -> Option | None:
    vector = tuple(
        sum(part.devices for part in parts if part.pool == pool.index) for pool in prices.pools
    )
    alone = sum(part.replicas for part in parts) == 1
    zeros = (0,) if alone else [zero for zero in sorted(scope.zero, key=_zero_order) if zero < 3]
    for recompute in (recompute for recompute in Recompute if recompute in scope.recompute):
        for zero in zeros:
            option = Option(
                prices=prices, vector=vector, parts=parts, recompute=recompute, zero=zero
            )
            if option.fits(first, end, depth, 1):
                return option
    return None


def _zero_order(zero: int) -> float:
    """ZeRO 1 costs no more than 0 and holds less."""
    return -math.inf if zero == 1 else zero
