"""Lower bounds for every plan: suffix programmes over stages, layers and devices.

A plan is an ordered list of stages; each takes a range of layers and an ``Option``. With f, b the stage's forward and
backward, t its slowest and p its quickest forward + backward, x the least time to hand a micro-batch on (2x: forward
and back), n_q the micro-batches in flight at the q-th stage from the end, M micro-batches, and rho the largest f / (f
+ b) of all options, three programmes bound the time of whatever follows, for q stages from layer a on with at most u
devices:

    (1)  R[q, a, u] = min  p + 2x + R[q-1, b, u - v]
    (2)  W[q, a, u] = min  max( M t,  p + 2x + W[q-1, b, u - v],  (M - (n_q - 1) rho) t + 2x + R[q-1, b, u - v] )
    (3)  S[q, a, u] = min  max( M t + tail,  f + x + S[q-1, b, u - v] )

over options of vector v and ends b. Each is a lower bound for every plan in the space because t, p, x and the tail
(gradient exchange and update) are taken at their least over the options that fit in memory, n_q under the schedule that
hides most, and memory under the one that needs least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.space.option import Option, Vector
from argosy.space.price import FloatArray, Prices
from argosy.units import counted


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What all plans of one sub-problem share: how the global batch is cut, and which schedules it may run under."""

    num_micro_batches: int
    micro_batch_size: int
    schedules: tuple[ScheduleSpec, ...]

    def least_in_flight(self, from_end: int) -> int:
        """Under the schedule that needs least memory at the q-th stage from the end."""
        return min(in_flight(schedule, from_end, self.num_micro_batches) for schedule in self.schedules)

    def most_in_flight(self, from_end: int) -> int:
        """Under the schedule that hides most: n_q of (2)."""
        return max(in_flight(schedule, from_end, self.num_micro_batches) for schedule in self.schedules)

    def __repr__(self) -> str:
        return f"{counted(self.num_micro_batches, 'micro-batch', 'micro-batches')} of {self.micro_batch_size}"


def group_size(schedule: ScheduleSpec) -> int:
    """Backwards in a row."""
    return schedule.k if schedule.kind is ScheduleKind.KFKB else 1


def in_flight(schedule: ScheduleSpec, from_end: int, num_micro_batches: int) -> int:
    """Micro-batches in flight at the q-th stage from the end."""
    ahead = 2 * from_end - 1 if schedule.kind is ScheduleKind.EAGER else group_size(schedule) * from_end
    return min(ahead, num_micro_batches)


class Menu:
    """The options for one micro-batch size, grouped by vector (in units of the search's granularity), as tables
    [option, a, b] over all ranges of layers a..b-1."""

    def __init__(self, prices: Prices, options: Mapping[Vector, Sequence[Option]], group: int = 1) -> None:
        self.prices = prices
        self.group = group
        self.vectors = sorted(options)
        self.options = [list(options[vector]) for vector in self.vectors]
        self.hop = [np.array([option.hop for option in row]) for row in self.options]
        self.most: list[FloatArray] = []
        """Micro-batches in flight with which the layers fit; below 1 they do not fit."""
        self.slow: list[FloatArray] = []
        self.load: list[FloatArray] = []
        """Seconds per micro-batch that ZeRO keeps the network busy: a bound alone, because it may begin at once."""
        self.quick: list[FloatArray] = []
        self.quick_forward: list[FloatArray] = []
        self.tail: list[FloatArray] = []
        self.rho = 0.0
        for row in self.options:
            self._add_times(row)
            self._add_memory(row)

    def _add_times(self, row: list[Option]) -> None:
        """t, p, f and the tail of every option."""
        prices, parts = self.prices, range(len(row[0].parts))
        forward, backward = _sums(row, parts, least=False)
        least = _sums(row, parts, least=True) if any(p.extra for o in row for p in o.parts) else (forward, backward)
        ahead, total = np.diff(forward), np.diff(forward + backward)
        self.rho = max(self.rho, float(np.divide(ahead, total, out=np.zeros_like(total), where=total > 0).max()))
        slow = np.maximum.reduce([_ranges((forward + backward)[:, part]) for part in parts])
        self.load.append(prices.weigh([option.load for option in row]))
        self.slow.append(slow)
        self.quick.append(np.minimum.reduce([_ranges((least[0] + least[1])[:, part]) for part in parts]))
        self.quick_forward.append(np.minimum.reduce([_ranges(least[0][:, part]) for part in parts]))
        self.tail.append(prices.weigh([o.exchange for o in row]) + prices.weigh([o.update for o in row]))

    def _add_memory(self, row: list[Option]) -> None:
        """How many micro-batches in flight fit, with the receive buffers of the least k."""
        prices = self.prices
        kept = np.array([prices.kept_ranges(option.recompute) for option in row])
        passing = (
            np.array([prices.transient(option.recompute) for option in row])
            + (2 * self.group + 1) * prices.largest_output
        )
        held = prices.weigh([option.state for option in row])
        fits = []
        for part in range(len(row[0].parts)):
            size, samples = (np.array([option.room[part][at] for option in row]) for at in (0, 1))
            free = size[:, None, None] - held - samples[:, None, None] * passing
            fits.append(np.floor(free / np.maximum(samples[:, None, None] * kept, 1e-9) + 1e-9))
        width = np.array([option.width for option in row])
        self.most.append(np.where(width[:, None, None] <= prices.widest, np.minimum.reduce(fits), 0.0))


def _sums(row: list[Option], parts: range, *, least: bool) -> tuple[FloatArray, FloatArray]:
    """[option, part, layer]: running sums of forward and backward for the replica with most (fewest) samples."""
    pairs = [[option.sums(part, part.samples if least else part.most) for part in option.parts] for option in row]
    forward, backward = (
        np.array([[pairs[at][part][way] for part in parts] for at in range(len(row))]) for way in (0, 1)
    )
    return forward, backward


def _ranges(sums: FloatArray) -> FloatArray:
    """[option, a, b] = sums[option, b] - sums[option, a]."""
    return sums[:, None, :] - sums[:, :, None]


class States:
    """How many devices of each pool are left, numbered: the vectors up to ``counts`` in row order."""

    def __init__(self, counts: Vector) -> None:
        self.sizes = tuple(number + 1 for number in counts)
        self.vectors = np.stack([axis.ravel() for axis in np.indices(self.sizes)], axis=1)
        steps = [int(np.prod(self.sizes[at + 1 :])) for at in range(len(counts))]
        self.steps = np.array(steps)

    def __len__(self) -> int:
        return len(self.vectors)

    def index(self, vector: Vector) -> int:
        return int(np.dot(vector, self.steps))

    def taking(self, vector: Vector) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The states that have a vector to give, and what they become."""
        rich = np.nonzero((self.vectors >= np.array(vector)).all(axis=1))[0]
        return rich, rich - self.index(vector)


@dataclass(frozen=True)
class Bounds:
    """(1) to (3): per number of stages from the end, an array [state, first layer]."""

    states: States
    rest: list[FloatArray]
    whole: list[FloatArray]
    tail: list[FloatArray]

    def at(self, num_stages: int, first: int, devices: Vector) -> float:
        """The larger of W and S."""
        state = self.states.index(devices)
        return max(float(self.whole[num_stages][state, first]), float(self.tail[num_stages][state, first]))


def suffix_bounds(menu: Menu, shape: Shape, counts: Vector, most_stages: int, upper: float) -> Bounds:
    """(1) to (3) for all suffixes; what cannot stay below ``upper`` becomes infinite."""
    num_layers, count = menu.prices.num_layers, shape.num_micro_batches
    states = States(counts)
    start = np.full((len(states), num_layers + 1), np.inf)
    start[:, num_layers] = 0.0
    bounds = Bounds(states, [start], [start], [start])
    arrays = (bounds.rest, bounds.whole, bounds.tail)
    strips = [_Strip(menu, key, count, upper) for key in range(len(menu.vectors))]
    moves = [states.taking(vector) for vector in menu.vectors]
    for left in range(1, most_stages + 1):
        drained = count - (shape.most_in_flight(left) - 1) * menu.rho
        new = [np.full(start.shape, np.inf) for _ in range(3)]
        for strip, (target, source) in zip(strips, moves, strict=True):
            if not strip.length:
                continue
            rest, whole, tail = (_windows(array[-1][source], strip.length) for array in arrays)
            slow, quick, ahead, done = strip.least(shape.least_in_flight(left))
            passing = quick + strip.both
            later = rest + passing
            longest = whole + passing
            np.maximum(longest, count * slow, out=longest)
            np.maximum(longest, rest + (drained * slow + strip.both), out=longest)
            ending = tail + (ahead + strip.over)
            np.maximum(ending, done, out=ending)
            for least, values in zip(new, (later, longest, ending), strict=True):
                least[target] = np.minimum(least[target], values.min(axis=0))
        lost = (new[1] >= upper) | (new[2] >= upper)
        for array, values in zip(arrays, new, strict=True):
            values[lost] = np.inf
            array.append(values)
        if lost.all():
            break
    return bounds


class _Strip:
    """The tables of one vector as [option, l, a] = those of layers a..a+l, as far as any option stays below a bound."""

    def __init__(self, menu: Menu, key: int, count: int, upper: float) -> None:
        slow = menu.slow[key]
        first, end = np.nonzero(count * slow.min(axis=0) < upper)
        self.length = int((end - first).max(initial=0))
        if not self.length:
            return
        rows = np.arange(slow.shape[1])[None, :]
        columns = rows + 1 + np.arange(self.length)[:, None]
        self.outside = np.where(columns < slow.shape[1], 0.0, np.inf)
        columns = np.minimum(columns, slow.shape[1] - 1)
        outputs = menu.prices.outputs
        over, both = hand_over(menu.hop[key].min(axis=0, keepdims=True), outputs)
        self.over, self.both = over[0, columns][:, None, :], both[0, columns][:, None, :]
        self.most = np.where(count * menu.load[key] < upper, menu.most[key], 0.0)[:, rows, columns]
        self.slow = slow[:, rows, columns]
        self.quick = menu.quick[key][:, rows, columns]
        self.quick_forward = menu.quick_forward[key][:, rows, columns]
        self.done = count * self.slow + menu.tail[key][:, rows, columns]

    def least(self, in_flight: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """[l, 1, a]: the least t, p, f and M t + tail over the options that fit; the 1 is for the states."""
        misfit = np.where(self.most >= in_flight, self.outside, np.inf)
        return (
            (self.slow + misfit).min(axis=0)[:, None, :],
            (self.quick + misfit).min(axis=0)[:, None, :],
            (self.quick_forward + misfit).min(axis=0)[:, None, :],
            (self.done + misfit).min(axis=0)[:, None, :],
        )


def hand_over(hop: FloatArray, outputs: FloatArray) -> tuple[FloatArray, FloatArray]:
    """[option, cut]: x forward, and x forward and back, 0 at the ends of the chain."""
    over = outputs * hop[:, :1] + hop[:, 2:]
    back = outputs * hop[:, 1:2] + hop[:, 2:]
    inside = outputs > 0
    return np.where(inside, over, 0.0), np.where(inside, over + back, 0.0)


def _windows(array: FloatArray, length: int) -> FloatArray:
    """[l, state, a] = array[state, a + 1 + l], infinite past the end."""
    num_states, size = array.shape
    padded = np.full((num_states, size + length), np.inf)
    padded[:, : size - 1] = array[:, 1:]
    across, along = padded.strides
    return np.lib.stride_tricks.as_strided(padded, (length, num_states, size), (along, across, along), writeable=False)
