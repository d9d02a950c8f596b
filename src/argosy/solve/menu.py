"""What every option of a stage costs for every range of layers, as tables: the ground of the bounds.

For option o and layers a..b-1, a and b cuts of a grid (``solve.grid``), with M micro-batches of B samples:

    (1)  slow    t: forward + backward of the slowest replica, with what ZeRO 3 adds between a backward and the next
                 action, (M - 1) / M times
    (2)  gated   g: as (1), of the backward only what the stage before waits for
    (3)  ahead   f: forward of the slowest replica
    (4)  quick   p: forward and gated backward of the replica on the certain way of a micro-batch (``solve.kinds``):
                 the quickest of a mixed stage, otherwise the slowest;   quick_forward  its forward alone
    (5)  tail       gradient exchange and update; a tied layer whose partner is elsewhere is summed across stages
    (6)  load       seconds per micro-batch that a network is busy: ZeRO's exchanges, or what passes a node's NIC
    (7)  most       micro-batches in flight with which the layers fit
    (8)  over, both  handing a micro-batch on across cut b, and both ways
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from argosy.solve.grid import Grid, all_cuts
from argosy.solve.kinds import Ground, Kind, hop_per_byte, kinds_of, nic_seconds, tied_seconds
from argosy.solve.shape import Shape
from argosy.space.option import Option, Part, Vector
from argosy.space.price import FloatArray, Prices, Rates

_TABLES = ("slow", "gated", "ahead", "quick", "quick_forward", "late", "tail", "load", "most", "over", "both")


class Menu:
    """Options grouped by vector (in units of the search's granularity), with (1) to (8)."""

    def __init__(
        self,
        prices: Prices,
        options: Mapping[Vector, Sequence[Option]],
        shape: Shape,
        ground: Ground,
        grid: Grid | None = None,
    ) -> None:
        self.prices = prices
        self.grid = grid or all_cuts(prices)
        self.at = (self.grid.first, self.grid.end)
        self.shape = shape
        self.ground = ground
        self.vectors = sorted(options)
        self.options = [option for vector in self.vectors for option in options[vector]]
        self.vector_of = np.repeat(np.arange(len(self.vectors)), [len(options[vector]) for vector in self.vectors])
        self.shared: dict[object, object] = {}
        """What searches under several schedules have in common."""
        self.kinds = np.array(kinds_of(self.options, ground))
        self.kind = Kind.MIXED if (self.kinds == Kind.MIXED).any() else Kind.ALIKE
        """Of the plans that it makes; its bounds hold for those of later kinds too."""
        self._add_times()
        self._add_tails()
        self.load = self._loads()
        self.most = self._fitting()
        self.over, self.both = self._hops()

    @cached_property
    def rows(self) -> list[NDArray[np.intp]]:
        """Per vector, its options."""
        ends = np.searchsorted(self.vector_of, range(len(self.vectors) + 1))
        return [np.arange(first, end) for first, end in itertools.pairwise(ends)]

    @property
    def odd(self) -> NDArray[np.bool_]:
        """The options of which a plan has one at least, if it is of this kind and of no later one."""
        odd: NDArray[np.bool_] = self.kinds == self.kind
        return odd

    @cached_property
    def loose(self) -> Menu:
        """What bounds plans with any cuts, for a menu of the cuts of a coarse grid."""
        return Menu(self.prices, self._by_vector(), self.shape, self.ground, self.grid.loose)

    def _by_vector(self) -> dict[Vector, list[Option]]:
        by_vector: dict[Vector, list[Option]] = defaultdict(list)
        for option, vector in zip(self.options, self.vector_of, strict=True):
            by_vector[self.vectors[vector]].append(option)
        return by_vector

    def under(self, shape: Shape) -> Menu:
        """The menu for some of the schedules; memory stays that of all of them."""
        assert self.grid.loose is None, "a coarse grid is for a first look"
        if shape.gate != self.shape.gate:
            return Menu(self.prices, self._by_vector(), shape, self.ground)
        menu = copy.copy(self)
        menu.shape = shape
        return menu

    def by_kind(self) -> Iterator[Menu]:
        """The menus of all kinds of plans, those with the tightest bounds first."""
        even, alike = self.kinds == Kind.EVEN, self.kinds != Kind.MIXED
        if even.any():
            menu = self._part(even, Kind.EVEN)
            menu._follow_threads(*_sums(menu.options, least=False))
            menu.over, menu.both = menu._full_hops()
            yield menu
        if (self.kinds == Kind.ALIKE).any():
            if alike.all():
                yield self
                return
            menu = self._part(alike, Kind.ALIKE)
            menu._follow_threads(*_sums(menu.options, least=False))
            menu.over, menu.both = menu._hops()
            yield menu
        if not alike.all():
            yield self

    def _part(self, which: NDArray[np.bool_], kind: Kind) -> Menu:
        keep = np.nonzero(which)[0]
        menu = copy.copy(self)
        for name in ("rows", "_alike", "_gathering"):
            menu.__dict__.pop(name, None)
        numbers = sorted(set(self.vector_of[keep].tolist()))
        menu.vectors = [self.vectors[number] for number in numbers]
        menu.options = [self.options[row] for row in keep]
        menu.vector_of = np.searchsorted(numbers, self.vector_of[keep])
        menu.kinds, menu.kind, menu.shared = self.kinds[keep], kind, {}
        for name in _TABLES:
            setattr(menu, name, getattr(self, name)[keep])
        return menu

    def _follow_threads(self, forward: FloatArray, backward: FloatArray) -> None:
        """(4) and (8) where all stages are alike: the thread of the first sample passes a slowest replica."""
        gate = self.shape.gate
        self.quick_forward = self.ahead
        self.quick = self._ranges(forward + gate * backward)[0]
        if gate < 1:
            self.late = (1 - gate) * self._ranges(backward)[0]

    def undominated(self, fits: NDArray[np.bool_], first: int, in_flight: int, slack: float) -> NDArray[np.bool_]:
        """*dominance*: of options with the same parts that ``fits`` allows ([option, end]) for stages from ``first``
        on, those to which no earlier one is equal or better in times, load and memory, and in exchange and update but
        for ``slack`` seconds.

        Safe because with the same parts a stage differs in these numbers only (recomputation and ZeRO), bounds and
        judged times grow with each of them, memory beyond ``in_flight`` micro-batches and load below the time of
        computing are of no use, and one exchange at most counts in the time of a plan: what is removed is faster than
        what stays by ``slack`` at most.
        """
        result = fits.copy()
        ends = np.nonzero(fits.any(axis=0))[0]
        at = slice(int(ends[0]), int(ends[-1]) + 1) if len(ends) else slice(0)
        for rows in self._alike:
            some = fits[rows, at]
            if some.sum(axis=0).max(initial=0) < 2:
                continue
            slow, tail = self.slow[rows, first, at], self.tail[rows, first, at]
            load = np.maximum(self.load[rows, first, at], slow)
            most, quick = np.minimum(self.most[rows, first, at], in_flight), self.quick[rows, first, at]
            better = some[:, None] & (slow[:, None] <= slow) & (tail[:, None] <= tail + slack)
            better &= (load[:, None] <= load) & (most[:, None] >= most) & (quick[:, None] <= quick)
            for row in range(1, len(rows)):
                some[row] &= ~(better[:row, row] & some[:row]).any(axis=0)
            result[rows, at] = some
        return result

    @cached_property
    def _alike(self) -> list[NDArray[np.intp]]:
        """Options with the same parts, where there are several."""
        groups: dict[tuple[Part, ...], list[int]] = defaultdict(list)
        for row, option in enumerate(self.options):
            groups[option.parts].append(row)
        return [np.array(rows) for rows in groups.values() if len(rows) > 1]

    def _add_times(self) -> None:
        """(1) to (4), and what is late: the least of a backward that the stage before does not wait for."""
        gate, count = self.shape.gate, self.shape.num_micro_batches
        forward, backward = _sums(self.options, least=False)
        self.ahead = _largest(self._ranges(forward))
        self.slow = _largest(self._ranges(forward + backward))
        self.gated = self.slow if gate == 1 else _largest(self._ranges(forward + gate * backward))
        self.late = np.zeros(self.slow.shape)
        if self.kind is Kind.MIXED:
            first, second = _sums(self.options, least=True)
            self.quick_forward = self._ranges(first).min(axis=0)
            self.quick = self._ranges(first + gate * second).min(axis=0)
            self.late = (1 - gate) * self._ranges(second).min(axis=0) if gate < 1 else self.late
        else:
            self._follow_threads(forward, backward)
        if gate == 1 and len(self._gathering):
            stretch = self._weigh([self.options[row].stretch for row in self._gathering])
            self.slow[self._gathering] += stretch * ((count - 1) / count)

    @cached_property
    def _gathering(self) -> NDArray[np.intp]:
        """Options under ZeRO 3."""
        return np.array([row for row, option in enumerate(self.options) if option.zero == 3], dtype=np.intp)

    def _add_tails(self) -> None:
        """(5)."""
        prices = self.prices
        exchange = self._exchange(0)
        if any(len(option.exchanges) > 1 for option in self.options):
            np.minimum(exchange, self._exchange(-1), out=exchange)
        for index, partner, weights in prices.tied:
            alone = self._holds(index) != self._holds(partner)
            least = np.array([tied_seconds(option, weights, self.ground) for option in self.options])
            exchange[:, alone] = np.maximum(exchange[:, alone], least[:, None])
        exchange += self._weigh([option.update for option in self.options])
        self.tail = exchange

    def _exchange(self, way: int) -> FloatArray:
        """By one algorithm, with what ZeRO 3 stretches the last backward by."""
        rates = [option.exchanges[way] for option in self.options]
        if self.shape.gate < 1:
            return np.maximum(self._weigh(rates), 0.0)
        for row in self._gathering.tolist():
            one, more = rates[row], self.options[row].stretch
            rates[row] = one[0] + more[0], one[1] + more[1], one[2] + more[2]
        return self._weigh(rates)

    def _loads(self) -> FloatArray:
        """(6)."""
        prices = self.prices
        if self.ground.plain:
            crossing = prices.outputs[self.grid.first] + prices.outputs[self.grid.end]
            busy = np.array([self._nic_load(option) for option in self.options])[:, None, None] * crossing
        else:
            busy = np.zeros(self.slow.shape)
        rows = [row for row, option in enumerate(self.options) if option.zero > 1]
        if rows:
            busy[rows] = np.maximum(busy[rows], self._weigh([self.options[row].load for row in rows]))
        return busy

    def _nic_load(self, option: Option) -> float:
        """Seconds per byte and sample that the NICs of the busiest part need, as far as its bytes must pass them."""
        both = zip(option.parts, option.pools, strict=True)
        return max(nic_seconds(part, pool) if self.ground.whole[pool.index] else 0.0 for part, pool in both)

    def _fitting(self) -> FloatArray:
        """(7), with the receive buffers of the least group."""
        prices, options = self.prices, self.options
        buffers = (2 * self.shape.group + 1) * prices.largest_output
        weights = self._weigh([option.state for option in options])
        least: FloatArray | None = None
        for part in range(max(len(option.parts) for option in options)):
            rooms = [option.room[min(part, len(option.parts) - 1)] for option in options]
            size, samples = _columns([(room, float(number)) for room, number in rooms])
            fits = size - weights
            for recompute in sorted({option.recompute for option in options}):
                rows = np.array([row for row, option in enumerate(options) if option.recompute is recompute])
                some = fits[rows]
                some -= samples[rows] * (prices.transient(recompute)[self.at] + buffers)
                some /= np.maximum(samples[rows] * prices.kept_ranges(recompute)[self.at], 1e-9)
                fits[rows] = some
            fits += 1e-9
            np.floor(fits, out=fits)
            least = fits if least is None else np.minimum(least, fits)
        assert least is not None
        width, widest = np.array([option.width for option in options]), prices.widest[self.at]
        if self.grid.single is not None:
            np.fill_diagonal(widest, widest.max())
            least[:, self.grid.single, self.grid.single] = 0.0
        for row in np.nonzero(width > prices.widest[0, -1])[0].tolist():
            least[row][width[row] > widest] = 0.0
        return least

    def _hops(self) -> tuple[FloatArray, FloatArray]:
        """(8) along a thread: [option, cut], 0 at the ends of the chain."""
        common = 1 if self.kind is Kind.MIXED else min(option.parts[0].most for option in self.options)
        hops = np.array([hop_per_byte(option, self.ground, common) for option in self.options])
        return self._both_ways(hops)

    def _full_hops(self) -> tuple[FloatArray, FloatArray]:
        """(8) of even plans."""
        pools = [option.pools[0] for option in self.options]
        pairs = zip(self.options, pools, strict=True)
        return self._both_ways(np.array([(nic_seconds(o.parts[0], pool), pool.nic_latency) for o, pool in pairs]))

    def _both_ways(self, hops: FloatArray) -> tuple[FloatArray, FloatArray]:
        outputs = self.prices.outputs[self.grid.cuts]
        over = np.where(outputs > 0, outputs * hops[:, :1] + hops[:, 1:], 0.0)
        return over, 2 * over

    def _ranges(self, sums: FloatArray) -> FloatArray:
        """[part, option, a, b] = sums[part, option, b] - sums[part, option, a]."""
        return np.asarray(sums.take(self.grid.end, axis=2) - sums.take(self.grid.first, axis=2))

    def _holds(self, layer: int) -> NDArray[np.bool_]:
        """[a, b]: whether layers a..b-1 have a layer."""
        holds: NDArray[np.bool_] = (self.grid.first <= layer) & (layer < self.grid.end)
        return holds

    def _weigh(self, rates: Sequence[Rates]) -> FloatArray:
        return self.prices.weigh(rates, self.at)


def _sums(options: Sequence[Option], *, least: bool) -> tuple[FloatArray, FloatArray]:
    """[part, option, layer]: running sums of forward and backward for the replica with most (fewest) samples; options
    of fewer parts repeat their last."""
    parts = range(max(len(option.parts) for option in options))
    pairs = [[_seconds(option, at, least=least) for option in options] for at in parts]
    forward = np.array([[pair[0] for pair in row] for row in pairs])
    return forward, np.array([[pair[1] for pair in row] for row in pairs])


def _seconds(option: Option, at: int, *, least: bool) -> tuple[FloatArray, FloatArray]:
    part = option.parts[min(at, len(option.parts) - 1)]
    return option.sums(part, part.samples if least else part.most)


def _largest(tables: FloatArray) -> FloatArray:
    """Over the parts."""
    largest: FloatArray = tables[0] if len(tables) == 1 else tables.max(axis=0)
    return largest


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[FloatArray, FloatArray]:
    table = np.array(pairs)
    return table[:, 0, None, None], table[:, 1, None, None]
