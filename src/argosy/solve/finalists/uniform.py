"""Add uniform pipelines, which an expert would write by hand, to the results of the search.

The search takes devices in coarse units and ranks plans by a recurrence that models contention only
roughly, so a plain plan that the exact engine finds faster may be missing among its finalists.
These are such plans: the layouts of ``solve.finalists.layouts`` with layers cut exactly by the
speed of the stages (``solve.search.chain``). With W_s the time of the whole model for a micro-batch
on stage s alone, such a plan of M micro-batches and S stages takes about

    (1)  (M + S - 1) / sum over stages of 1 / W_s + exchange of gradients / S

if layers and weights could be divided perfectly. It ranks them. Two stages may differ in size, and
their cut also depends on bytes and weights:

    (2)  (M - 1) max(L_1, L_2, x) + L_1 + L_2 + 2 x + max(exchange_1, exchange_2)

Most layouts are excluded before anything is cut. For any cut of the layers, stage s takes t_s for a
micro-batch, sum of t_s / W_s >= c with c the least sum of the layers' shares in W_s, and the first
and the last micro-batch pass the stages before: theta sum_{i < s} t_i + M t_s <= T, with theta the
share of a backward that must be waited for. For any y >= 0 with M y_s + theta sum_{i > s} y_i >= 1
/ W_s, such as

    (3)  y_s = max(0, (1 / W_s - theta sum_{i > s} y_i) / M),

the sum over stages of y_s times their inequalities gives c <= T sum of y_s. With E_s the least
exchange of all weights, and c also the least of the shares in the weights,

    (4)  T >= c / sum over stages of 1 / (M W_s + E_s).

A layout is skipped if (3) or (4) exceeds the best time so far. It is also skipped if its stages do
not hold the chain when, one after the other,

    (5)  stage s takes as many layers as keep the way there and back, its M micro-batches and its
         exchange below T,

which errs only if one layer less in front would give the stages behind room for more than one
layer.

No certificate depends on this: the bounds cover a plan omitted here like any other.
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
from argosy.space.price import FloatArray, Prices
from argosy.space.shares import share_samples, whole_seconds

# At most this many plans are cut and judged, those with the least (1) first.
_MOST_CUT = 48
# The plans that are judged have at most this product of stages and micro-batches together, and one
# of them has at most an eighth of it.
_MOST_JUDGED = 30_000
# A layout is not cut if (1) without the exchange is above this times the best time: on six of the
# bundled clusters no layout was judged to take less than 0.88 of (1).
_NEAR = 1.15
# At most this many cuts of two stages are tried for one that fits.
_MOST_CUTS = 8


@dataclass(frozen=True)
class _Row:
    """A row of stages that a plan has before its layers are cut."""

    estimate: float
    """Estimate in seconds, by (1) or (2)."""
    shape: Shape
    stages: tuple[tuple[PoolPart, ...], ...]


def uniform_candidates(
    prices: Prices, judge: Judge, shapes: Sequence[Shape], scope: Scope, below: float, most: int
) -> list[Candidate]:
    """Return at most ``most`` candidates of different sorts that the judge finds fastest, below a
    time.

    Sets of pools take turns, because the judge is least accurate about the network between pools.
    """
    table = LayoutTable(prices, layouts_of(prices, scope))
    groups: dict[frozenset[int], list[_Row]] = {}
    for shape in shapes:
        for row in rows_of(prices, table, shape, scope, below):
            used = frozenset(part.pool for parts in row.stages for part in parts)
            groups.setdefault(used, []).append(row)
    quota = max(16, _MOST_CUT // max(1, len(groups)))
    groups_judged = []
    for rows in groups.values():
        judged = itertools.islice(_judged(prices, judge, _varied(rows), scope, below), quota)
        groups_judged.append(diverse(sorted(judged), most))
    groups_judged.sort(key=lambda group: group[:1])
    turns = itertools.chain(*itertools.zip_longest(*groups_judged))
    return [candidate for candidate in turns if candidate is not None][:most]


def _varied(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows in the order of (1), with numbers of stages taking turns: deep pipelines look
    best if only compute counts."""
    turn: Counter[int] = Counter()
    places: list[tuple[int, float, int, _Row]] = []
    for row in sorted(rows, key=lambda candidate: candidate.estimate):
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
    """A table of layouts that holds the section at each place, and the exchanges of the
    sections."""

    def __init__(self, prices: Prices, layouts: Iterable[Layout]) -> None:
        numbers: dict[Section, int] = {}
        # The list keeps sections alive, so that an id identifies one: hashing them is slow.
        known = list(layouts)
        alone = {id(section): section for layout in known for section in layout}
        number_of = {at: numbers.setdefault(section, len(numbers)) for at, section in alone.items()}
        rows = [[number_of[id(section)] for section in layout] for layout in known]
        self.sections = tuple(numbers)
        self.replicas = [section.devices // section.width for section in self.sections]
        self.lengths = np.array([len(row) for row in rows], dtype=np.intp)
        longest = max(map(len, rows), default=0)
        self.rows = np.full((len(rows), longest), len(numbers), dtype=np.intp)
        """[layout, place] = number of a section, or one past the last for none."""
        is_section = np.arange(longest) < self.lengths[:, None]
        self.rows[is_section] = list(itertools.chain(*rows))
        self.exchanges = np.array(
            [*(_least_exchange(prices, section) for section in self.sections), 0.0]
        )
        self.estimates = np.array([*(_exchange(prices, section) for section in self.sections), 0.0])
        """Seconds for each section, and 0 for none."""

    def used(self, rows: NDArray[np.intp]) -> list[int]:
        """Return the sections of some rows, in order."""
        is_used = np.zeros(len(self.sections) + 1, dtype=np.bool_)
        is_used[rows] = True
        return np.nonzero(is_used[:-1])[0].tolist()


def rows_of(
    prices: Prices, table: LayoutTable, shape: Shape, scope: Scope, below: float
) -> Iterator[_Row]:
    """Yield every layout that has a sample for each replica, is allowed and measured, and may stay
    below a time.

    A row has no more stages than micro-batches, as long as these could be smaller.
    """
    size, count = shape.micro_batch_size, shape.num_micro_batches
    rows = table.rows[table.lengths <= count] if size > 1 else table.rows
    wholes = np.full(len(table.sections) + 1, np.inf)
    for number in table.used(rows):
        section, total = table.sections[number], table.replicas[number]
        few = total > size
        wholes[number] = math.nan if few else _least_whole(prices, section, total, size, scope)
    rows = _near_rows(shape, table, rows, wholes, below)
    covered = _least_shares(prices, [table.sections[at] for at in table.used(rows)], size)
    rows = _possible_rows(shape, table, rows, wholes, covered, below)
    shared: dict[int, tuple[PoolPart, ...]] = {}
    for number in table.used(rows):
        wholes[number] = math.nan
        parts = _parts(prices, table.sections[number], size, scope)
        if parts is not None:
            shared[number], wholes[number] = parts, whole_seconds(prices, parts, Recompute.NONE)
    rows = _near_rows(shape, table, rows, wholes, below)
    rows = _possible_rows(shape, table, rows, wholes, covered, below)
    rates = (1 / wholes[rows]).sum(axis=1).tolist()
    exchanges = table.estimates[rows].max(axis=1, initial=0.0).tolist()
    for row, rate, exchange in zip(rows.tolist(), rates, exchanges, strict=True):
        stages = tuple(shared[number] for number in row if number < len(table.sections))
        if len(stages) == 2:
            yield _Row(float(_two_stage_seconds(prices, shape, stages).min()), shape, stages)
        else:
            compute = (count + len(stages) - 1) / rate
            yield _Row(compute + exchange / len(stages), shape, stages)


def _near_rows(
    shape: Shape,
    table: LayoutTable,
    rows: NDArray[np.intp],
    wholes: FloatArray,
    below: float,
) -> NDArray[np.intp]:
    """Return the rows whose compute by (1) is near a time, with W of the sections or lower bounds
    on it."""
    lengths = (rows < len(table.sections)).sum(axis=1)
    compute = (shape.num_micro_batches + lengths - 1) / (1 / wholes)[rows].sum(axis=1)
    near: NDArray[np.intp] = rows[compute < _NEAR * below]
    return near


def _possible_rows(
    shape: Shape,
    table: LayoutTable,
    rows: NDArray[np.intp],
    wholes: FloatArray,
    covered: tuple[float, float],
    below: float,
) -> NDArray[np.intp]:
    """Return the rows that may stay below a time by (3) and (4), with W of the sections or lower
    bounds on it, and c of both."""
    count, gate = shape.num_micro_batches, shape.gate
    slopes = 1 / (count * wholes + table.exchanges)
    rows = rows[covered[1] < below * slopes[rows].sum(axis=1)]
    longest = int((rows < len(table.sections)).sum(axis=1).max(initial=0))
    total = np.zeros(len(rows))
    for rate in (1 / wholes)[rows[:, :longest]].T[::-1]:
        total += np.maximum(0.0, (rate - gate * total) / count)
    possible: NDArray[np.intp] = rows[covered[0] < below * total]
    return possible


def _least_whole(prices: Prices, section: Section, total: int, size: int, scope: Scope) -> float:
    """Return a lower bound on W of a section with ``total`` replicas.

    A mixed section is priced as if all samples were processed in one large batch. A measured
    profile may be faster at any size, so with one the samples are shared.
    """
    width = section.width
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
    """Return E: between nodes, all weights pass the slowest NIC at least once, unless ZeRO 3
    overlaps that."""
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


def _least_shares(prices: Prices, sections: Sequence[Section], size: int) -> tuple[float, float]:
    """Return the least sums of the layers' shares, c of (3) and c of (4)."""
    ways = {(pool, section.width) for section in sections for pool, _ in section.taken}
    layer_shares = []
    for pool, width in sorted(ways):
        fewest, most = prices.sample_range(pool, width) or (1, 0)
        highest = int(min(size, most))
        for samples in sorted({fewest, highest}) if fewest <= highest else ():
            layer_shares.append(prices.shares(prices.seconds_by_layer(pool, width, samples)))
    if not layer_shares:
        return 1.0, 1.0
    least = [min(ways_of_layer) for ways_of_layer in zip(*layer_shares, strict=True)]
    distinct = [prices.chain.layers[at] for at in prices.distinct_layers]
    weights = prices.shares([layer.parameters for layer in distinct])
    return prices.total(least), prices.total(map(min, least, weights))


class _Filling:
    """A check of (5) that caches repeated results."""

    def __init__(self, prices: Prices, judge: Judge, below: float) -> None:
        self.prices = prices
        self.judge = judge
        self.below = below
        self.weights = prices.parameters
        self.outputs = prices.outputs.tolist()
        self.costs: dict[tuple[int, tuple[PoolPart, ...]], tuple[list[float], list[float]]] = {}

    def works(self, row: _Row) -> bool:
        """Return whether all layers can be placed below the time."""
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
        """Return running sums over the layers: an iteration of a stage with its exchange, and one
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
    """Return samples shared so that the slowest replica is as fast as possible; None if there are
    too few samples or the scope forbids it."""
    groups = [(pool, section.width, number // section.width) for pool, number in section.taken]
    parts = share_samples(prices, groups, size, Recompute.NONE)
    return parts if parts is not None and is_allowed(prices, parts, scope) else None


def is_allowed(prices: Prices, parts: tuple[PoolPart, ...], scope: Scope) -> bool:
    """Return whether the scope allows the parts and a profile, if there is one, has times for this
    width with these samples."""
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
    """Return the seconds in which the replicas of a section that holds all weights would sum
    gradients."""
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
    """Return each stage with the least recomputation and ZeRO that fit; None if nothing does."""
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
    """Yield ends of stages: by speed or, for two stages, the few best cuts by (2)."""
    if len(row.stages) == 2:
        times = _two_stage_seconds(prices, row.shape, row.stages)
        order = np.argsort(times, kind="stable")[:_MOST_CUTS].tolist()
        yield from ((cut, prices.num_layers) for cut in order if np.isfinite(times[cut]))
        return
    wholes = [whole_seconds(prices, parts, Recompute.NONE) for parts in row.stages]
    part = row.stages[0][0]
    forward, backward = prices.seconds(part.pool, part.width, part.most, Recompute.NONE)
    work = np.maximum(np.diff(forward + backward), 1e-12)
    yield cut_chain(work.tolist(), [wholes[0] / whole for whole in wholes], allow_empty=False).ends


def _two_stage_seconds(
    prices: Prices, shape: Shape, stages: Sequence[tuple[PoolPart, ...]]
) -> FloatArray:
    """Return the estimated seconds of two stages (2) for every cut; infinity at the ends of the
    chain."""
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
    seconds = (
        (count - 1) * np.maximum.reduce([*times, hop])
        + times[0]
        + times[1]
        + (hop + back)
        + np.maximum(*sums)
    )
    seconds[[0, -1]] = np.inf
    return np.asarray(seconds)


def _running(prices: Prices, parts: tuple[PoolPart, ...]) -> FloatArray:
    """Return running sums of forward + backward seconds on the slowest replica."""
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
    """Return a sort key: ZeRO 1 comes first, because it costs no more than 0 and holds less."""
    return -math.inf if zero == 1 else zero
