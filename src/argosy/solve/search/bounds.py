"""Compute lower bounds for every plan: suffix programmes over stages, layers and devices.

A plan is an ordered list of stages; each takes a range of layers and an ``Option``. The terms come
from the tables of ``solve.search.menu``: t and g are the slowest replica's seconds per micro-batch,
f its forward, p the quickest replica's way there and back, f_p its forward, w the part of a
backward that the stage before does not wait for, x a transfer to the next stage and 2x both ways.
With M micro-batches and n_q forwards before the first backward at the q-th stage from the end, four
programmes bound everything that follows, for q stages from layer a on with at most u devices:

    (0)  P[q, a, u] = min  p + 2x + P'
    (1)  R[q, a, u] = min  max( p + 2x + R',  (n_q - 1) f_p + p,  p + 2x + (n_(q-1) - 1) y )
    (2)  W[q, a, u] = min max( M g, p + 2x + W', M g - (n_q - 1) f + 2x + R', p + 2x + (M - 1) s +
         P', p + 2x + (M - 1) s' + R' ) =: min w*
    (3)  S[q, a, u] = min  max( w* + w + tail,  M t + tail,  f_p + x + S' )

over options of vector v and ends b; a prime is the suffix [q-1, b, u - v]. P is the way of any
micro-batch there and back; R is that of the first one from its forward to the end of its backward,
which n_q forwards precede; W is the time from the first forward of a stage until it has sent the
last gradient back; S is the time until the stages have exchanged gradients and updated. The last
term of (1): before its first backward the next stage receives n_(q-1) micro-batches, each in y
seconds; W takes it as part of R'. The third term of (2): when the first micro-batch is back, M -
n_q forwards and all M backwards are still to come. The fourth: what sends for s seconds per
micro-batch sends the last one after all others. The last: gradients need their link for s' seconds
per micro-batch, and the first one is sent when the first micro-batch is through the stages behind.
Layers a and b are cuts of a grid (``solve.search.grid``). Each value is a lower bound for every
plan in the space, because every number is taken at its minimum over the options that fit in memory:
n_q in (2) under the schedule that overlaps most, in (1) under the one that overlaps least, and
memory under the one that needs least.

A menu of one kind of plans (``solve.search.kinds``) also has options that make plans of a later
kind, which belong to another menu. With A a value over all plans, O over those with an *odd* stage
(one that makes a plan of this kind) and o an option,

    (4)  O = min( o O' over all options,  o A' over odd options ).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from argosy.solve.budget import TimeIsUpError
from argosy.solve.search.menu import Menu
from argosy.solve.search.row import Moves, States, Where
from argosy.solve.search.shape import Shape
from argosy.space.option import Vector
from argosy.space.price import FloatArray

# About this many numbers of a table are computed at once, so that they stay in a processor's cache.
_CELLS = 16384

Values = FloatArray
"""The values P, R, W, S as [beginning or group of them (``solve.search.row``), programme, state,
first layer]; P is 0 under several schedules, which never use it."""


@dataclass(frozen=True)
class Bounds:
    """The bounds (0) to (3) that hold for each number of stages from the end."""

    states: States
    any: list[Values]
    """Bounds over all plans."""
    odd: list[Values] | None
    """Bounds by (4), if not all options are odd."""

    def after(self, *, has_odd: bool) -> list[Values]:
        """Return the bounds of what follows stages of which one is odd already (``has_odd``), or
        none."""
        return self.any if self.odd is None or has_odd else self.odd

    def root(self, num_stages: int, devices: Vector) -> float:
        """Return the bound of all plans of ``num_stages`` stages, in seconds."""
        values = self.after(has_odd=False)[num_stages][0, :, self.states.index(devices), 0]
        return max(float(values[2]), float(values[3]))


def gathered(
    values: Values, group: NDArray[np.intp], state: NDArray[np.intp], cut: NDArray[np.intp]
) -> FloatArray:
    """Return [programme, row]: P, R, W and S for rows of groups, states and first layers."""
    if len(values) == 1:
        return np.asarray(values[0][:, state, cut])
    return np.asarray(values[group, :, state, cut].T)


def suffix_bounds(
    menu: Menu, counts: Vector, most_stages: int, upper: float, *, only_kind: bool = False
) -> Bounds:
    """Return lower bounds (0) to (3) for all suffixes, with (4) if plans of later kinds do not
    count.

    Values that cannot stay below ``upper`` become infinite. ``TimeIsUpError`` is raised if the menu
    is late.
    """
    states, size, beginnings = States(counts), menu.grid.size, menu.beginnings
    never = np.full((len(beginnings.groups), 4, len(states), size + 1), np.inf)
    start = never.copy()
    start[..., size] = 0.0
    has_odd = only_kind and not menu.odd.all()
    bounds = Bounds(states, [start], [never] if has_odd else None)
    strips = _strips(menu, menu.rows, upper)
    odd = _strips(menu, [rows[menu.odd[rows]] for rows in menu.rows], upper) if has_odd else []
    moves = [beginnings.moves(states, vector) for vector in menu.vectors]
    for left in range(1, most_stages + 1):
        if menu.is_late():
            raise TimeIsUpError
        following = bounds.any[-1]
        if bounds.odd is not None:
            later = _advance(menu, strips, left, moves, bounds.odd[-1])
            here = _advance(menu, odd, left, moves, following)
            bounds.odd.append(beginnings.grouped(_below(np.minimum(later, here), upper)))
        new = _below(_advance(menu, strips, left, moves, following), upper)
        bounds.any.append(beginnings.grouped(new))
        if np.isinf(new[:, 2]).all():
            break
    return bounds


def _strips(menu: Menu, rows: Sequence[NDArray[np.intp]], upper: float) -> list[_Strip]:
    """Return the strips of some rows, cached for the other schedules of the same options."""
    key = (upper, sum(map(len, rows)))
    if key not in menu.shared:
        menu.shared[key] = [_Strip(menu, vector_rows, upper) for vector_rows in rows]
    return cast(list[_Strip], menu.shared[key])


def _below(new: Values, upper: float) -> Values:
    for values in new:
        values[:, (values[2] >= upper) | (values[3] >= upper)] = np.inf
    return new


def _advance(
    menu: Menu,
    strips: Sequence[_Strip],
    left: int,
    moves: Sequence[Sequence[Moves]],
    following: Values,
) -> Values:
    """Return the values with one more stage in front, the ``left``-th from the end: any of the
    given strips, by its beginning."""
    new = np.full((menu.beginnings.count, *following.shape[1:]), np.inf)
    skipped = 0 if len(menu.shape.schedules) == 1 else 1
    new[:, :skipped] = 0.0
    goes_on = [np.isfinite(values[2]) for values in following]
    # States with fewer devices than stages, or with too slow ones, are useless.
    is_left = [np.asarray(can_follow.any(axis=1)) for can_follow in goes_on]
    for strip, strip_moves, ways, may_end in zip(
        strips, moves, menu.beginnings.ways, menu.may_end, strict=True
    ):
        if left == 1 and not may_end:
            continue
        for where, group in ways:
            least = None
            for beginnings, before, after in strip_moves:
                which = is_left[group][after]
                target, source = before[which], after[which]
                if not len(source):
                    continue
                least = least or strip.least(menu.shape, left, where)
                if least is None:
                    break
                at, values = _step(
                    least, following[group][skipped:, source], goes_on[group][source]
                )
                for beginning in beginnings:
                    current = new[beginning, skipped:]
                    current[:, target, at] = np.minimum(current[:, target, at], values)
    return new


def _step(
    least: _Least, following: FloatArray, goes_on: NDArray[np.bool_]
) -> tuple[slice, FloatArray]:
    """Return the first layers, and the programmes of one more stage in front of what follows from
    some states."""
    ends = np.nonzero(goes_on.any(axis=0))[0]
    # Other stages end where nothing continues.
    begin = max(0, int(ends[0]) - least.fewest - least.length + 1)
    at = slice(begin, int(ends[-1]) - least.fewest + 1)
    num_programmes, num_states, _ = following.shape
    values = np.empty((num_programmes, num_states, at.stop - at.start))
    step = max(1, _CELLS // max(1, least.length * values.shape[2]))
    for first in range(0, num_states, step):
        states = slice(first, first + step)
        _programmes(least, at, following[:, states], values[:, states])
    return at, values


def _programmes(least: _Least, at: slice, following: FloatArray, values: FloatArray) -> None:
    """Write the programmes of one more stage in front of what follows from some states to
    ``values``."""
    *way, rest, whole, tail = _windows(following, least, at)
    if least.arriving is not None:
        rest = np.maximum(rest, least.arriving[:, :, at])
    passing, busy = least.passing[:, :, at], least.busy[:, :, at]
    later = rest + passing
    longest = whole + passing
    if least.sent is not None:
        sent = passing + least.sent[:, :, at]
        if way:
            np.maximum(longest, sent + way[0], out=longest)
        else:
            busy = np.maximum(busy, sent)
    np.maximum(longest, busy, out=longest)
    other = rest + least.drained[:, :, at]
    np.maximum(longest, other, out=longest)
    if least.back is not None:
        np.add(rest, passing + least.back[:, :, at], out=other)
        np.maximum(longest, other, out=longest)
    longest.min(axis=0, out=values[-2])
    np.maximum(later, least.warm[:, :, at], out=later)
    later.min(axis=0, out=values[-3])
    np.add(tail, least.ahead[:, :, at], out=other)
    longest += least.after[:, :, at]
    np.maximum(longest, least.done[:, :, at], out=longest)
    np.maximum(longest, other, out=longest)
    longest.min(axis=0, out=values[-1])
    for before in way:
        np.add(before, passing, out=other).min(axis=0, out=values[0])


class _Least(NamedTuple):
    """The terms that are minimal over those options of one vector that fit: [l, 1, a] for a stage
    from cut a to cut a + fewest + l; the axis of length 1 is for the states."""

    fewest: int
    length: int
    """Number of lengths l."""
    passing: FloatArray
    """Way of a micro-batch through the stage and back, with both transfers: p + 2x."""
    warm: FloatArray
    """Forwards before the first backward, and the first way there and back: (n - 1) f_p + p."""
    busy: FloatArray
    """Seconds for all micro-batches: M g, or what the links need to send them on."""
    drained: FloatArray
    """Seconds of work that remain when the first micro-batch is back: M g - (n - 1) f + 2x."""
    after: FloatArray
    """Seconds after the last gradient was sent back: w + tail."""
    done: FloatArray
    """Seconds of all micro-batches, exchange and update: M t + tail."""
    ahead: FloatArray
    """Forward and transfer to the next stage: f_p + x."""
    sent: FloatArray | None
    """Seconds in which all other micro-batches are sent before the last: (M - 1) s; None if that is
    0."""
    back: FloatArray | None
    """The same of gradients that return: (M - 1) s'; None if that is not counted."""
    arriving: FloatArray | None
    """Seconds in which a replica of the next stage receives all that it needs before its first
    backward: (n_(q-1) - 1) y; None if that is 0."""


class _Strip:
    """The tables that some options of one vector have, as [option, l, a] for stages from cut a to
    cut a + fewest + l, as far as any of them stays below a bound."""

    def __init__(self, menu: Menu, rows: NDArray[np.intp], upper: float) -> None:
        count, size = menu.shape.num_micro_batches, menu.grid.size
        self.fewest, self.length = menu.grid.fewest, menu.lengths(rows, upper)
        if self.length < 1:
            return
        begin = np.broadcast_to(np.arange(size + 1), (self.length, size + 1))
        columns = begin + self.fewest + np.arange(self.length)[:, None]
        outside = columns > size
        columns = np.minimum(columns, size)
        tables = menu.costs.tables(rows, begin.ravel(), columns.ravel())

        def strip(table: FloatArray) -> FloatArray:
            return table.reshape(len(rows), *columns.shape)

        tail = strip(tables.tail)
        self.busy = count * strip(tables.gated)
        self.done = (
            count * strip(tables.slow) if tables.gated is not tables.slow else self.busy
        ) + tail
        self.after = strip(tables.late) + tail if menu.shape.gate < 1 else tail
        self.forward = strip(tables.ahead)
        self.quick = strip(tables.quick)
        self.quick_forward = strip(tables.quick_forward)
        self.over = [over[rows].min(axis=0)[columns] for over in menu.over]
        # Terms of links are not counted if the next stage may be anywhere.
        self.full = {
            where: np.maximum(self.busy, count * table[rows][:, columns])
            if where != Where.ANYWHERE
            else self.busy
            for where, table in enumerate(menu.crossing)
        }
        self.has_lines = menu.has_lines
        self.sent, self.back, self.arriving = (
            {
                where: table[rows].min(axis=0)[columns]
                for where, table in enumerate(tables_by_place)
                if where != Where.ANYWHERE
            }
            for tables_by_place in (
                menu.line,
                menu.back if menu.has_lines else (),
                menu.arriving if menu.has_lines else (),
            )
        )
        self.most = strip(tables.most)
        self.most[count * strip(tables.load) >= upper] = 0.0
        self.most[:, outside] = 0.0
        self.mask: NDArray[np.bool_] | None = None
        # Room for sums, which takes longer to allocate than to fill.
        self.sums, self.terms = np.empty_like(self.busy), np.empty_like(self.busy)

    def least(self, shape: Shape, left: int, where: int) -> _Least | None:
        """Return the terms of the q-th stage from the end, by the place of the next one
        (``solve.search.row.Where``)."""
        if self.length < 1:
            return None
        least, most = shape.least_in_flight(left), shape.most_in_flight(left)
        fits = self.most >= least
        if self.mask is None or not np.array_equal(fits, self.mask):
            self.mask = fits
            self.misfit = np.where(fits, 0.0, np.inf)
            self.warm: dict[int, FloatArray] = {}
            self.drained: dict[int, FloatArray] = {}
            self.fullest: dict[int, FloatArray] = {}
            self.known = [
                self._least(values)
                for values in (self.done, self.after, self.quick, self.quick_forward)
            ]
        done, after, quick, quick_forward = self.known
        if least not in self.warm:  # cached: far from the end all micro-batches are in flight
            np.multiply(least - 1, self.quick_forward, out=self.terms)
            np.add(self.quick, self.terms, out=self.terms)
            self.warm[least] = self._least(self.terms) if least > 1 else quick
        if most not in self.drained:
            np.multiply(most - 1, self.forward, out=self.terms)
            np.subtract(self.busy, self.terms, out=self.terms)
            self.drained[most] = self._least(self.terms)
        is_free, others = where == Where.ANYWHERE, shape.num_micro_batches - 1
        has_lines = self.has_lines and not is_free
        before = shape.least_in_flight(left - 1) - 1 if left > 1 else 0
        if where not in self.fullest:
            self.fullest[where] = self._least(self.full[where])
        over = self.over[where][:, None, :]
        return _Least(
            fewest=self.fewest,
            length=self.length,
            passing=quick + 2 * over,
            warm=self.warm[least],
            busy=self.fullest[where],
            drained=self.drained[most] + 2 * over,
            after=after,
            done=done,
            ahead=quick_forward + over,
            sent=None if is_free else others * self.sent[where][:, None, :],
            back=others * self.back[where][:, None, :] if has_lines else None,
            arriving=before * self.arriving[where][:, None, :] if has_lines and before else None,
        )

    def _least(self, values: FloatArray) -> FloatArray:
        np.add(values, self.misfit, out=self.sums)
        least: FloatArray = self.sums.min(axis=0)[:, None, :]
        return least


def _windows(values: FloatArray, least: _Least, at: slice) -> FloatArray:
    """Return [programme, l, state, a] = values[programme, state, a + fewest + l] for some a,
    infinity past the end."""
    num_programmes, num_states, _ = values.shape
    length, count = least.length, at.stop - at.start
    padded = np.full((num_programmes, num_states, count + length - 1), np.inf)
    within = values[:, :, at.start + least.fewest : at.stop + least.fewest + length - 1]
    padded[:, :, : within.shape[2]] = within
    programme, across, along = padded.strides
    shape = (num_programmes, length, num_states, count)
    return np.ndarray(shape, np.float64, padded, strides=(programme, along, across, along))
