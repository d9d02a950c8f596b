"""Build tables of what options of a stage cost for ranges of layers: the basis of the bounds.

For option o and layers a..b-1, a and b cuts of a grid (``solve.search.grid``), with M micro-batches
of B samples:

    (1)  slow    t: forward + backward of the slowest replica, with what ZeRO 3 adds between a
                 backward and the next action, (M - 1) / M times
    (2)  gated   g: as (1), with only the part of the backward that the stage before waits for
    (3)  ahead   f: forward of the slowest replica
    (4)  quick   p: forward and gated backward of the replica on the certain way of a micro-batch
                 (``solve.search.kinds``): the quickest of a mixed stage, otherwise the slowest;
                 quick_forward: its forward alone
    (5)  tail    gradient exchange and update; a tied layer whose partner is elsewhere is summed
                 across stages
    (6)  load    seconds per micro-batch that a network is busy: ZeRO's exchanges, or what passes a
                 node's NIC
    (7)  most    micro-batches in flight with which the layers fit

All follow from running sums over the layers and from rates per weight. These are stored; tables are
built only for the requested ranges, because a time to beat leaves a quarter of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.solve.search.grid import CutGrid
from argosy.solve.search.kinds import Ground, leaving_seconds, nic_seconds
from argosy.solve.search.shape import Shape
from argosy.solve.search.tied import tied_costs
from argosy.space.offloaded import copied_weights, copy_seconds, limit_in_flight
from argosy.space.option import Option, PoolPart
from argosy.space.price import FloatArray

Indices = NDArray[np.intp]
_Ranges = tuple[Indices, Indices]
"""The first layers, and the ends."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The tables (1) to (7), each of which is indexed [option, range]."""

    slow: FloatArray
    gated: FloatArray
    """The array ``slow`` itself if whole backwards are waited for."""
    ahead: FloatArray
    quick: FloatArray
    quick_forward: FloatArray
    """The array ``ahead`` itself if the slowest replica is on the certain way."""
    late: FloatArray
    """The least part of a backward that the stage before does not wait for."""
    tail: FloatArray
    load: FloatArray
    most: FloatArray


class Costs:
    """The sums and rates from which (1) to (7) of some options are computed."""

    def __init__(
        self,
        options: Sequence[Option],
        shape: Shape,
        ground: Ground,
        grid: CutGrid,
        *,
        is_mixed: bool,
        group: int,
    ) -> None:
        """Compute sums and rates; ``group`` is the number of micro-batches in a row whose receive
        buffers count."""
        self.prices = options[0].prices
        self.grid = grid
        self.count, self.gate = shape.num_micro_batches, shape.gate
        self.is_mixed = is_mixed
        self._add_sums(options)
        self._add_exchanges(options)
        self._add_links(*distinct_parts(options), ground)
        self._add_memory(options, group)
        self.options = options
        self.offloads = np.array([bool(option.offload) for option in options])

    def _add_sums(self, options: Sequence[Option]) -> None:
        """Add running sums as [part, option, layer]."""
        self.ahead, self.backward = _sums(options, least=False)
        self.slow = self.ahead + self.backward
        self.gated = self.ahead + self.gate * self.backward
        self.quick_forward, self.quick = self.ahead, self.gated
        if self.is_mixed:
            self.quick_forward, self.backward = _sums(options, least=True)
            self.quick = self.quick_forward + self.gate * self.backward

    def _add_exchanges(self, options: Sequence[Option]) -> None:
        """Add rates of options that exchange something, and which options these are."""
        self.gathers = np.array([option.zero == 3 for option in options])
        self.loads = np.array([option.zero > 1 for option in options])
        self.stretch = np.array(
            [option.stretch if option.zero == 3 else (0.0, 0.0, 0.0) for option in options]
        )
        self.load = np.array(
            [option.load if option.zero > 1 else (0.0, 0.0, 0.0) for option in options]
        )
        self.update = np.array([option.update for option in options])
        ways = (0, -1) if any(len(option.exchanges) > 1 for option in options) else (0,)
        self.exchanges = [np.array([option.exchanges[way] for option in options]) for way in ways]
        if self.gate == 1:
            self.exchanges = [rates + self.stretch for rates in self.exchanges]

    def _add_links(self, distinct: Sequence[Option], same: Indices, ground: Ground) -> None:
        """Add what depends on the parts of an option only, which ``same`` takes from ``distinct``
        options."""
        tied = tied_costs(distinct, ground)
        self.tied = [(layer, partner, least[same]) for layer, partner, least in tied]
        self.leaving = np.array([leaving_seconds(option, ground) for option in distinct])[same]
        """Seconds per output byte that the NICs need for a micro-batch that leaves the nodes of a
        stage."""
        self.nic = np.array([_always_leaving(option, ground) for option in distinct])[same]
        """Seconds per output byte that the NICs need for parts that fill nodes, in any place."""

    def _add_memory(self, options: Sequence[Option], group: int) -> None:
        self.buffers = (2 * group + 1) * self.prices.largest_output
        self.state = np.array([option.state for option in options])
        parts = range(max(len(option.parts) for option in options))
        rooms = [
            [option.room[min(part, len(option.parts) - 1)] for option in options] for part in parts
        ]
        self.room = np.array(rooms, dtype=np.float64)
        """[part, option]: bytes of memory, and samples."""
        kinds = [
            (option.recompute, option.width, option.offload.activations is not None)
            for option in options
        ]
        distinct = sorted(set(kinds))
        self.kind = np.array([distinct.index(kind) for kind in kinds])
        """Combination of recomputation, width of tensor-parallel groups, and offloaded
        activations."""
        self.examples = [kinds.index(kind) for kind in distinct]
        """One option of each of these combinations."""
        self.holds_frozen = np.array([option.offload.weights is None for option in options])
        self.width = np.array([option.width for option in options])
        self.whole = np.array([option.whole for option in options])
        self.expert = np.array([option.expert for option in options])
        self.context = np.array([option.context for option in options])

    def tables(self, rows: Indices, first: Indices, end: Indices) -> Tables:
        """Return the tables of some options, for stages from cut to cut."""
        at = self.grid.layers(first, end)
        held = self.prices.held_by_kind[:, at[0], at[1]]
        alone, ahead = (
            _largest(_ranges(self.slow, rows, at)),
            _largest(_ranges(self.ahead, rows, at)),
        )
        if self.gate == 1 and self.offloads[rows].any():
            alone, ahead = self._with_copies(alone, ahead, rows, at)
        slow = self._stretched(alone, rows, held)
        is_whole = self.gate == 1
        return Tables(
            slow=slow,
            gated=slow if is_whole else _largest(_ranges(self.gated, rows, at)),
            ahead=ahead,
            quick=alone
            if is_whole and not self.is_mixed
            else _smallest(_ranges(self.quick, rows, at)),
            quick_forward=_smallest(_ranges(self.quick_forward, rows, at))
            if self.is_mixed
            else ahead,
            late=np.zeros(slow.shape)
            if is_whole
            else (1 - self.gate) * _smallest(_ranges(self.backward, rows, at)),
            tail=self._tails(rows, at, held),
            load=self._loads(rows, at, held),
            most=self._fitting(rows, first, end, held),
        )

    def seconds(self, rows: Indices, first: Indices, end: Indices) -> FloatArray:
        """Return the seconds per micro-batch of the slowest replica (1)."""
        at = self.grid.layers(first, end)
        return self._stretched(
            _largest(_ranges(self.slow, rows, at)), rows, self.prices.held_by_kind[:, at[0], at[1]]
        )

    def _stretched(self, alone: FloatArray, rows: Indices, held: FloatArray) -> FloatArray:
        """Return the seconds per micro-batch of the slowest replica (1), given those of compute
        alone."""
        gathers = self.gathers[rows]
        if self.gate < 1 or not gathers.any():
            return alone
        slow = alone.copy()
        stretch = self.prices.weigh(self.stretch[rows[gathers]], held)
        slow[gathers] += stretch * ((self.count - 1) / self.count)
        return slow

    def _with_copies(
        self, alone: FloatArray, ahead: FloatArray, rows: Indices, at: _Ranges
    ) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of the slowest replica (1) and of its forward (3) with copies to
        hosts, given those of compute alone.

        The copies are at their minimum: nothing waits for a first layer, and links are free of
        others.
        """
        alone, ahead = alone.copy(), ahead.copy()
        for row in np.nonzero(self.offloads[rows])[0].tolist():
            option = self.options[rows[row]]
            both, forwards = [], []
            for part in option.parts:
                sums, copied = (
                    option.sums(part, part.most),
                    copy_seconds(option, part, *at, alone=True),
                )
                forward, backward = (
                    np.maximum(stage_sum[at[1]] - stage_sum[at[0]], copy)
                    for stage_sum, copy in zip(sums, copied, strict=True)
                )
                both.append(forward + backward)
                forwards.append(forward)
            alone[row] = np.maximum(alone[row], _largest(both))
            ahead[row] = np.maximum(ahead[row], _largest(forwards))
        return alone, ahead

    def _tails(self, rows: Indices, at: _Ranges, held: FloatArray) -> FloatArray:
        """Return the seconds of gradient exchange and update (5), by the best algorithm for each
        range."""
        ways = [self.prices.weigh(rates[rows], held) for rates in self.exchanges]
        exchange = ways[0] if len(ways) == 1 else np.minimum(*ways)
        if self.gate < 1:
            exchange = np.maximum(exchange, 0.0)
        for layer, tied_layer, least in self.tied:
            alone = _holds(at, layer) & ~_holds(at, tied_layer)
            exchange[:, alone] = np.maximum(exchange[:, alone], least[rows, None])
        exchange += self.prices.weigh(self.update[rows], held)
        return exchange

    def _loads(self, rows: Indices, at: _Ranges, held: FloatArray) -> FloatArray:
        """Return the seconds per micro-batch that a network is busy (6)."""
        outputs, row_loads = self.prices.outputs, self.loads[rows]
        returned = self.prices.returned
        passing = outputs[at[0]] + outputs[at[1]]
        if returned is not outputs:  # then incoming and outgoing bytes differ
            passing = np.maximum(outputs[at[0]] + returned[at[1]], returned[at[0]] + outputs[at[1]])
        busy = self.nic[rows, None] * passing
        if row_loads.any():
            busy[row_loads] = np.maximum(
                busy[row_loads], self.prices.weigh(self.load[rows[row_loads]], held)
            )
        return busy

    def _fitting(self, rows: Indices, first: Indices, end: Indices, held: FloatArray) -> FloatArray:
        """Return the most micro-batches in flight with which the layers fit (7)."""
        at, kind = self.grid.layers(first, end), self.kind[rows]
        weights = self.prices.weigh(self.state[rows], held)
        whole = self.whole[rows]
        for expert in (
            set(self.expert[rows].tolist()) if self.prices.chain.frozen_parameters else ()
        ):
            is_chosen = (self.expert[rows] == expert) & self.holds_frozen[rows]
            frozen = self.prices.frozen(expert)
            assert frozen is not None, "a chain with frozen parameters has their bytes"
            weights[is_chosen] += np.multiply.outer(self.context[rows][is_chosen], frozen[at])
        for expert in set(self.expert[rows][whole > 0].tolist()):
            is_chosen = (whole > 0) & (self.expert[rows] == expert)
            weights[is_chosen] += np.multiply.outer(
                whole[is_chosen], self.prices.largest_layer(expert)[at]
            )
        examples = [self.options[row] for row in self.examples]
        place = at[0] * (self.prices.num_layers + 1) + at[1]
        passing, kept = (
            np.array([table.ravel().take(place) for table in tables])[kind]
            for tables in (
                [option.transient for option in examples],
                [option.kept_ranges for option in examples],
            )
        )
        passing += self.buffers
        offloading = np.nonzero(self.offloads[rows])[0].tolist()
        for row in offloading:
            weights[row] += copied_weights(self.options[rows[row]], *at)
        fitting = []
        for part in self.room[:, rows]:
            size, samples = part[:, :1], part[:, 1:]
            fits = size - weights
            fits -= samples * passing
            fits /= np.maximum(samples * kept, 1e-9)
            fits += 1e-9
            fitting.append(np.floor(fits, out=fits))
        most = _smallest(fitting)
        for row in offloading:
            most[row] = np.minimum(most[row], limit_in_flight(self.options[rows[row]], *at))
        self._refuse_wide(most, self.width[rows], first, end)
        return most

    def _refuse_wide(self, most: FloatArray, width: Indices, first: Indices, end: Indices) -> None:
        """Set ``most`` to 0 for layers that cannot be split this way; for a stage within a bundle
        it is unknown which layer it has."""
        grid, widest = self.grid, self.prices.widest
        allowed = widest[grid.layers(first, end)]
        if grid.single is not None:
            inside = first == end
            allowed[inside] = widest[grid.first, grid.end].max()
            most[:, inside & np.isin(first, grid.single)] = 0.0
        for row in np.nonzero(width > widest[0, -1])[0].tolist():
            most[row][width[row] > allowed] = 0.0


def distinct_parts(options: Sequence[Option]) -> tuple[list[Option], Indices]:
    """Return an option for each of the parts that occur, and for every option the number of the one
    with its parts."""
    numbers: dict[tuple[PoolPart, ...], int] = {}
    same = [numbers.setdefault(option.parts, len(numbers)) for option in options]
    firsts = dict(zip(reversed(same), reversed(options), strict=True))
    return [firsts[number] for number in range(len(firsts))], np.array(same, dtype=np.intp)


def _always_leaving(option: Option, ground: Ground) -> float:
    both = zip(option.parts, option.pools, strict=True)
    full = [nic_seconds(part, pool) for part, pool in both if ground.leaves_nodes(part, pool)]
    return max(full, default=0.0) if ground.through_nics else 0.0


def _holds(at: _Ranges, layer: int) -> NDArray[np.bool_]:
    """Return whether each range a..b-1 contains a layer."""
    holds: NDArray[np.bool_] = (at[0] <= layer) & (layer < at[1])
    return holds


def _ranges(sums: FloatArray, rows: Indices, at: _Ranges) -> FloatArray:
    """Return [part, option, range] = sums[part, option, b] - sums[part, option, a]."""
    row_sums = sums[:, rows]
    return np.asarray(row_sums.take(at[1], axis=2) - row_sums.take(at[0], axis=2))


def _largest(tables: Sequence[FloatArray] | FloatArray) -> FloatArray:
    """Return the maximum over the parts of options; usually there is only one part."""
    largest: FloatArray = tables[0] if len(tables) == 1 else np.max(tables, axis=0)
    return largest


def _smallest(tables: Sequence[FloatArray] | FloatArray) -> FloatArray:
    smallest: FloatArray = tables[0] if len(tables) == 1 else np.min(tables, axis=0)
    return smallest


def _sums(options: Sequence[Option], *, least: bool) -> tuple[FloatArray, FloatArray]:
    """Return [part, option, layer]: running sums of forward and backward for the replica with most
    (fewest) samples; options of fewer parts repeat their last."""
    parts = range(max(len(option.parts) for option in options))
    pairs = [[_seconds(option, at, least=least) for option in options] for at in parts]
    forward = np.array([[pair[0] for pair in row] for row in pairs])
    return forward, np.array([[pair[1] for pair in row] for row in pairs])


def _seconds(option: Option, at: int, *, least: bool) -> tuple[FloatArray, FloatArray]:
    part = option.parts[min(at, len(option.parts) - 1)]
    return option.sums(part, part.samples if least else part.most)
