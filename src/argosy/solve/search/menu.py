"""Group the options of a search by the devices that they take, with their costs as tables for the
bounds.

For a stage from cut a to cut b of a grid, (1) to (7) of ``solve.search.tables``, and

    (8)  over      sending a micro-batch on across cut b, once, by the place of the next stage
                   (``solve.search.row.Where``)
    (9)  crossing  seconds that links need for all samples of a micro-batch that crosses cut b, by
                   the place of the next stage
    (10) sending   seconds that links need for what one replica on the certain way sends of it, by
                   the place of the next stage
    (11) line      seconds that the links need for what has passed them before the certain way ends:
                   (9) if it may be that of any sample, or of all at once, and otherwise (10)
    (12) back      the same of gradients, 0 if only one replica is followed
    (13) arriving  seconds that the links need for what a replica of the next stage takes of it, at
                   least; it does n forwards before its first backward
"""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from argosy.solve.budget import never
from argosy.solve.search.grid import CutGrid, all_cuts
from argosy.solve.search.kinds import (
    Ground,
    PlanKind,
    SiteWays,
    arriving_seconds,
    crossing_seconds,
    even_hops,
    hop_inside,
    hop_outside,
    hop_to_site,
    kinds_of,
    sending_seconds,
)
from argosy.solve.search.row import Beginnings
from argosy.solve.search.shape import Shape
from argosy.solve.search.tables import Costs, Indices, Tables, distinct_parts
from argosy.solve.search.tied import tied_apart
from argosy.space.option import Option, PoolPart, Vector
from argosy.space.price import FloatArray, Prices

# All cuts of a grid.
_ALL = slice(None)


class Menu:
    """A set of options that are grouped by vector (in units of the search's granularity)."""

    def __init__(
        self,
        prices: Prices,
        options: Mapping[Vector, Sequence[Option]],
        shape: Shape,
        ground: Ground,
        grid: CutGrid | None = None,
        *,
        kind: PlanKind | None = None,
        group: int | None = None,
        spanning: bool = False,
    ) -> None:
        self.prices = prices
        self.grid = grid or all_cuts(prices)
        self.shape = shape
        self.ground = ground
        self.vectors = sorted(options)
        self.options = [option for vector in self.vectors for option in options[vector]]
        self.vector_of = np.repeat(
            np.arange(len(self.vectors)), [len(options[vector]) for vector in self.vectors]
        )
        self.distinct, self.same = distinct_parts(self.options)
        self.shared: dict[object, object] = {}
        """Results that searches under several schedules share."""
        self.starts: dict[tuple[int, int], Tables] = {}
        """Tables of ``starting`` that searches under several schedules share."""
        self.may_end = np.ones(len(self.vectors), dtype=bool)
        """For each vector, whether the last stage may take it."""
        self.last_site: int | None = None
        """Site of the last stage of all plans; None if it may be anywhere."""
        self.spanning = spanning
        """Whether a plan counts only if it has a tensor-parallel group across nodes."""
        is_mixed = any(len(option.parts) > 1 for option in self.options)
        self.kind = kind or (PlanKind.MIXED if is_mixed else PlanKind.ALIKE)
        """Kind of the plans that the menu makes; its bounds hold for those of later kinds too."""
        self.is_late: Callable[[], bool] = never
        """Whether the time of the search is up; suffix programmes are then abandoned."""
        self.group = group or shape.group
        """Number of micro-batches in a row whose receive buffers count."""
        self.beginnings = Beginnings(prices.pools, ground, self.vectors)
        has_sites = self.beginnings.num_sites > 1
        self.follows_any = self.kind is PlanKind.MIXED or (
            self.kind is PlanKind.ALIKE and has_sites
        )
        """Whether the certain way is the quickest one of any sample. Between sites that is worth
        more than the slowest replicas: what all replicas send there counts."""
        self.costs = Costs(
            self.options, shape, ground, self.grid, is_mixed=self.follows_any, group=self.group
        )
        self._add_transfers(has_lines=has_sites or not ground.is_quick)

    def _add_transfers(self, *, has_lines: bool) -> None:
        """Add the tables (8) to (13)."""
        self.over = self._full_hops() if self.kind is PlanKind.EVEN else self._hops()
        self.crossing = self._crossings()
        self.sending = self._sending()
        counts_all = self.follows_any or self.kind is PlanKind.EVEN
        self.line = self.crossing if counts_all else self.sending
        self.has_lines = has_lines
        """Whether (12) and (13) count; on one site they are worth their time in a proof only."""
        nothing = np.zeros(self.crossing.shape if has_lines else (0, 0, 0))
        self.back = self._gradients() if counts_all and self.has_lines else nothing
        self.arriving = self._arriving() if self.has_lines else nothing

    @cached_property
    def kinds(self) -> NDArray[np.str_]:
        """Return for each option the kind of the plans that have only stages of it."""
        return np.array(kinds_of(self.options, self.ground))

    @cached_property
    def rows(self) -> list[NDArray[np.intp]]:
        """Return the options of each vector."""
        ends = np.searchsorted(self.vector_of, range(len(self.vectors) + 1))
        return [np.arange(first, end) for first, end in itertools.pairwise(ends)]

    @property
    def odd(self) -> NDArray[np.bool_]:
        """Return the options of which a plan has at least one if it is of this kind and of no later
        one, or if it counts at all with ``spanning``."""
        if self.spanning:
            return np.array([option.has_spanning_group for option in self.options])
        odd: NDArray[np.bool_] = self.kinds == self.kind
        return odd

    @cached_property
    def loose(self) -> Menu:
        """Return the menu that bounds plans with any cuts, for a menu of the cuts of a coarse
        grid."""
        assert self.grid.loose is not None, "only coarse grids have loose bounds"
        menu = copy.copy(self)
        menu.grid, menu.costs = self.grid.loose, copy.copy(self.costs)
        menu.costs.grid, menu.shared, menu.starts = menu.grid, {}, {}
        return menu

    def _by_vector(self, rows: Iterable[int]) -> dict[Vector, list[Option]]:
        by_vector: dict[Vector, list[Option]] = defaultdict(list)
        for row in rows:
            by_vector[self.vectors[self.vector_of[row]]].append(self.options[row])
        return by_vector

    def under(self, shape: Shape) -> Menu:
        """Return the menu for some of the schedules; memory stays that of all of them."""
        assert self.grid.loose is None, "a coarse grid is for a first look"
        if shape.gate != self.shape.gate:
            options = self._by_vector(range(len(self.options)))
            menu = Menu(self.prices, options, shape, self.ground, spanning=self.spanning)
            menu.is_late = self.is_late
            return menu
        menu = copy.copy(self)
        menu.shape = shape
        return menu

    def by_kind(self) -> Iterator[Menu]:
        """Yield the menus of all kinds of plans, those with the tightest bounds first.

        With ``spanning``, even plans count only if they have a group across nodes. For plans of
        other kinds only their own kind is required: more plans than needed are searched again.
        """
        even, alike = self.kinds == PlanKind.EVEN, self.kinds != PlanKind.MIXED
        if even.any():
            yield self._part(even, PlanKind.EVEN)
        if (self.kinds == PlanKind.ALIKE).any():
            yield self._of_kind() if alike.all() else self._part(alike, PlanKind.ALIKE)
        if not alike.all():
            yield self._of_kind()

    def _of_kind(self) -> Menu:
        """Return the menu for all plans of its kind."""
        if not self.spanning:
            return self
        menu = copy.copy(self)
        menu.spanning, menu.shared, menu.starts = False, {}, {}
        return menu

    def _part(self, which: NDArray[np.bool_], kind: PlanKind) -> Menu:
        options = self._by_vector(np.nonzero(which)[0].tolist())
        menu = Menu(
            self.prices,
            options,
            self.shape,
            self.ground,
            self.grid,
            kind=kind,
            group=self.group,
            spanning=self.spanning and kind is PlanKind.EVEN,
        )
        menu.is_late = self.is_late
        return menu

    def by_last_site(self) -> Iterator[Menu]:
        """Yield the menus of plans whose last stage is in one site, for each, and of all others.

        There are none if there is only one site, or if this is such a menu.
        """
        if self.beginnings.num_sites == 1 or not self.may_end.all():
            return
        sites = [
            {pool.site for pool, n in zip(self.prices.pools, v, strict=True) if n}
            for v in self.vectors
        ]
        for site in (*range(self.beginnings.num_sites), None):
            menu = copy.copy(self)
            menu.last_site = site
            menu.may_end = np.array(
                [
                    vector_sites == {site} if site is not None else len(vector_sites) > 1
                    for vector_sites in sites
                ]
            )
            if menu.may_end.any():
                yield menu

    def apart(self, upper: float) -> Menu | None:
        """Return the menu for first stages of plans whose tied weights are not in one node
        (``solve.search.tied``); None if that makes no difference."""
        tied = (
            tied_apart(self.options, self.ground, self.last_site, upper)
            if len(self.shape.schedules) == 1
            else []
        )
        if not tied:
            return None
        menu = copy.copy(self)
        menu.starts, menu.costs = {}, copy.copy(self.costs)
        menu.costs.tied = tied
        return menu

    def lengths(self, rows: Indices, upper: float) -> int:
        """Return how many lengths of a stage, from the shortest on, keep some of the options below
        a time by compute alone: more layers never take less."""
        size, count = self.grid.size, self.shape.num_micro_batches

        def is_long(length: int) -> bool:
            first = np.arange(size + 1 - length)
            return bool(count * self.costs.seconds(rows, first, first + length).min() >= upper)

        return bisect_left(range(self.grid.fewest, size + 1), True, key=is_long) if len(rows) else 0

    def is_returned(self, cut: int) -> bool:
        """Return whether gradients cross a cut."""
        return bool(self.grid.cuts[cut] > self.prices.chain.first_backward)

    def starting(self, first: int, lengths: int) -> Tables:
        """Return [option, end] for the stages from a cut on, of at most ``lengths`` bundles."""
        key = (first, lengths)
        if key not in self.starts:
            end = np.arange(first + 1, min(first + lengths, self.grid.size) + 1)
            self.starts[key] = self.costs.tables(
                np.arange(len(self.options)), np.full(len(end), first), end
            )
        return self.starts[key]

    def undominated(
        self, tables: Tables, fits: NDArray[np.bool_], in_flight: int, slack: float
    ) -> NDArray[np.bool_]:
        """Return the options that no earlier one dominates (rule *dominance*).

        Only options with the same parts that ``fits`` allows ([option, end]) for the stages of
        ``starting`` tables are compared. An option is dominated by one that is equal or better in
        times, load and memory, and in exchange and update except for ``slack`` seconds.

        This is safe because with the same parts a stage differs in these numbers only
        (recomputation and ZeRO), bounds and judged times grow with each of them, memory beyond
        ``in_flight`` micro-batches and load below the time of computing are useless, and at most
        one exchange counts in the time of a plan: what is removed is faster than what stays by at
        most ``slack``.
        """
        result = fits.copy()
        ends = np.nonzero(fits.any(axis=0))[0]
        at = slice(int(ends[0]), int(ends[-1]) + 1) if len(ends) else slice(0)
        for rows in self._alike:
            fitting = fits[rows, at]
            if fitting.sum(axis=0).max(initial=0) < 2:
                continue
            slow, tail = tables.slow[rows, at], tables.tail[rows, at]
            load = np.maximum(tables.load[rows, at], slow)
            most, quick = np.minimum(tables.most[rows, at], in_flight), tables.quick[rows, at]
            better = fitting[:, None] & (slow[:, None] <= slow) & (tail[:, None] <= tail + slack)
            better &= (load[:, None] <= load) & (most[:, None] >= most) & (quick[:, None] <= quick)
            for row in range(1, len(rows)):
                fitting[row] &= ~(better[:row, row] & fitting[:row]).any(axis=0)
            result[rows, at] = fitting
        return result

    @cached_property
    def _alike(self) -> list[NDArray[np.intp]]:
        """Return groups of options with the same parts, if there are several."""
        groups: dict[tuple[PoolPart, ...], list[int]] = defaultdict(list)
        for row, option in enumerate(self.options):
            groups[option.parts].append(row)
        return [np.array(rows) for rows in groups.values() if len(rows) > 1]

    def _hops(self) -> FloatArray:
        """Return the seconds of transfers along a thread (8): [where, option, cut], 0 at the ends
        of the chain."""
        self._common = (
            1 if self.follows_any else min(option.parts[0].most for option in self.options)
        )
        hops = [
            [hop_inside(option, self.ground, self._common) for option in self.distinct],
            [hop_outside(option, self._common) for option in self.distinct],
        ]
        for site in self._other_sites:
            hops.append([hop_to_site(option, self._common, site) for option in self.distinct])
        self._thread_hops = np.array(hops)[:, self.same]
        """[where, option, 2]: seconds per output byte of ``_common`` samples, and latency."""
        return self._at_cuts(self._thread_hops)

    def paired(
        self, row: int, rows: Indices, cut: int, is_outside: NDArray[np.bool_]
    ) -> FloatArray:
        """Return the seconds of transfers (8) at a cut from a stage of option ``row`` to stages of
        the options ``rows``; 0 if no more is known than without the second stage.

        In plans of kind *alike*, the first replicas of both stages hold the first samples. They
        have as many in common as the smaller of the two has, and each end needs its time for
        them.
        """
        if self.kind is not PlanKind.ALIKE or self.follows_any or not self._own_samples[row]:
            return np.zeros(len(rows))
        common, place = np.minimum(self._own_samples[row], self._own_samples[rows]), is_outside * 1
        ends = np.array([self._sample_hops[place, row], self._sample_hops[place, rows]])
        ends[..., 0] *= common
        longer = self._at_cuts(ends, slice(cut, cut + 1)).max(axis=0)[:, 0]
        return np.where(common > 0, longer, 0.0)

    @cached_property
    def _sample_hops(self) -> FloatArray:
        """Return [inside or outside a node, option, 2]: seconds per output byte of one sample, and
        latency."""
        return np.asarray(self._thread_hops[:2] / (self._common, 1.0))

    @cached_property
    def _own_samples(self) -> NDArray[np.int64]:
        """Return the samples of the first replica of every option; 0 if parts of a sequence or
        experts are shared, which are sent by several members."""
        return np.array(
            [
                0 if option.context > 1 or option.expert > 1 else option.parts[0].most
                for option in self.options
            ]
        )

    def _full_hops(self) -> FloatArray:
        """Return the seconds of transfers in even plans (8): [where, option, cut]."""
        hops = [even_hops(option, self.ground, self._other_sites) for option in self.options]
        return self._at_cuts(np.array(hops).swapaxes(0, 1))

    def _crossings(self) -> FloatArray:
        """Return the seconds that links need for a micro-batch (9): [where, option, cut]."""
        leaving = self.costs.leaving
        by_side = [np.zeros(len(leaving)), leaving]
        for ways in self._site_ways:
            crossing = [
                0.0 if self._is_at(option, ways.site) else crossing_seconds(option, ways)
                for option in self.options
            ]
            by_side.append(np.maximum(leaving, crossing))
        return np.multiply.outer(np.array(by_side), self.prices.outputs[self.grid.cuts])

    @staticmethod
    def _is_at(option: Option, site: int) -> bool:
        return any(pool.site == site for pool in option.pools)

    def _sending(self) -> FloatArray:
        """Return the seconds that links need for one replica's part of a micro-batch (10): [where,
        option, cut]. Replicas of even plans send at the same moment."""
        if self.kind is PlanKind.EVEN:
            return self.crossing
        by_side = [
            np.zeros(len(self.options)),
            np.array([self._sending_seconds(option) for option in self.distinct])[self.same],
        ]
        for ways in self._site_ways:
            by_side.append(
                np.array([self._sending_seconds(option, ways) for option in self.distinct])[
                    self.same
                ]
            )
        if not self.ground.through_nics:
            by_side = [np.zeros(len(self.options)) for _ in by_side]
        return np.multiply.outer(np.array(by_side), self.prices.outputs[self.grid.cuts])

    def _arriving(self) -> FloatArray:
        """Return (13): [where, option, cut]. Replicas of even plans take all samples at the same
        moment."""
        if self.kind is PlanKind.EVEN:
            return self.crossing
        fewest = min(part.samples for option in self.options for part in option.parts)
        by_side = [[0.0] * len(self.options)]
        for ways in (None, *self._site_ways):
            by_side.append([arriving_seconds(option, self.ground, ways) for option in self.options])
        outputs = self.prices.outputs[self.grid.cuts]
        return fewest * np.multiply.outer(np.array(by_side), outputs)

    def _sending_seconds(self, option: Option, ways: SiteWays | None = None) -> float:
        return sending_seconds(option, ways, fewest=self.follows_any)

    @cached_property
    def _site_ways(self) -> list[SiteWays]:
        """Return the ways to each site, if there are several.

        A stage that is at several sites takes from a stage at another one over several lines.
        """
        sites = [
            {pool.site for pool, n in zip(self.prices.pools, vector, strict=True) if n}
            for vector in self.vectors
        ]
        is_spread = len(self._other_sites) > 2 and any(len(some) > 1 for some in sites)
        lines = self.ground.has_single_lines
        return [
            SiteWays(site=site, is_spread=is_spread, has_single_lines=lines)
            for site in self._other_sites
        ]

    def _gradients(self) -> FloatArray:
        """Return (12): [where, option, cut]."""
        cuts = self.grid.cuts
        is_returned = self.prices.returned[cuts] >= self.prices.outputs[cuts]
        return self.crossing * (is_returned * self.ground.is_duplex)

    @property
    def _other_sites(self) -> range:
        sites = self.beginnings.num_sites
        return range(sites if sites > 1 else 0)

    def _at_cuts(self, hops: FloatArray, which: slice = _ALL) -> FloatArray:
        """Return seconds of transfers at some cuts, half of them if nothing comes back there.

        Bounds count a transfer there and back as two of these; if there is only one, two halves are
        too little, which a bound may be.
        """
        cuts = self.grid.cuts[which]
        outputs, returned = self.prices.outputs[cuts], self.prices.returned[cuts]
        over = np.where(outputs > 0, outputs * hops[..., :1] + hops[..., 1:], 0.0)
        return (
            over
            if self.prices.returned is self.prices.outputs
            else np.where(returned > 0, over, over / 2)
        )
