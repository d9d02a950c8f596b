"""The pipeline search: which stages, on how many devices of each pool, with how many layers each.

Variables: an ordered list of stages; each takes a range of layers and an ``Option``. Objective: seconds of one
iteration. With f, b the stage's forward and backward, t its slowest and p its quickest forward + backward, x the
least time to hand a micro-batch on, n_q the micro-batches in flight at the q-th stage from the end, M micro-batches,
and rho the largest f / (f + b) of a layer in any option, three suffix programmes bound the time of whatever follows,
for q stages from layer a on with at most u devices:

    (1)  R[q, a, u] = min  p + 2x + R[q-1, b, u - v]
    (2)  W[q, a, u] = min  max( M t,  p + 2x + W[q-1, b, u - v],  (M - (n_q - 1) rho) t + 2x + R[q-1, b, u - v] )
    (3)  S[q, a, u] = min  max( M t + tail,  f + x + S[q-1, b, u - v] )

over options of vector v and ends b. Each is a lower bound for every plan in the space because t, p, x and the tail
(gradient exchange and update) are taken at their least over the options that fit in memory with n_q in flight. Fixed
stages in front of a suffix enter through running sums (``_Node``), so that

    (4)  bound(node) = max( M t and tails of the fixed stages,  H + W,  Y + R,  H_f + S )

never decreases along a path: a best-first search on it meets complete plans in the order of their bounds, and
whatever is left in the queue when the best plan is no slower than the next bound is proven no better.

Not in here: contention between boundaries, changes over time, placement. The simulator judges those.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.space.option import Option, Vector
from argosy.space.price import FloatArray, Prices

_DESCENTS = 3
"""Numbers of stages for which the bounds are followed down at once."""


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
        return f"{self.num_micro_batches} micro-batches of {self.micro_batch_size}"


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

    def __init__(self, prices: Prices, options: Mapping[Vector, Sequence[Option]]) -> None:
        self.prices = prices
        self.vectors = sorted(options)
        self.options = [list(options[vector]) for vector in self.vectors]
        self.hop = [np.array([option.hop for option in row]) for row in self.options]
        self.most: list[FloatArray] = []
        """Micro-batches in flight with which the layers fit; below 1 they do not fit."""
        self.slow: list[FloatArray] = []
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
        loads = np.array([option.load for option in row])
        if loads.any():
            np.maximum(slow, loads[:, :1, None] * prices.held + loads[:, 1:, None], out=slow)
        exchange = np.array([(o.exchange[0] + o.update, o.exchange[1]) for o in row])
        self.slow.append(slow)
        self.quick.append(np.minimum.reduce([_ranges((least[0] + least[1])[:, part]) for part in parts]))
        self.quick_forward.append(np.minimum.reduce([_ranges(least[0][:, part]) for part in parts]))
        self.tail.append(exchange[:, :1, None] * prices.held + exchange[:, 1:, None])

    def _add_memory(self, row: list[Option]) -> None:
        """How many micro-batches in flight fit, at k = 1."""
        prices = self.prices
        kept = np.array([prices.kept_ranges(option.recompute) for option in row])
        passing = np.array([prices.transient(option.recompute) for option in row]) + 3 * prices.largest_output
        per_weight = np.array([option.bytes_per_weight for option in row])
        fits = []
        for part in range(len(row[0].parts)):
            size, samples = (np.array([option.room[part][at] for option in row]) for at in (0, 1))
            free = size[:, None, None] - per_weight[:, None, None] * prices.held - samples[:, None, None] * passing
            fits.append(np.floor(free / np.maximum(samples[:, None, None] * kept, 1e-9) + 1e-9))
        width = np.array([option.width for option in row])
        self.most.append(np.where(width[:, None, None] <= prices.widest, np.minimum.reduce(fits), 0.0))


def _sums(row: list[Option], parts: range, *, least: bool) -> tuple[FloatArray, FloatArray]:
    """[option, part, layer]: running sums of forward and backward for the replica with most (fewest) samples."""
    pairs = [
        [
            option.prices.seconds(part.pool, part.width, part.samples if least else part.most, option.recompute)
            for part in option.parts
        ]
        for option in row
    ]
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
            passing = quick + 2 * strip.hop
            later = rest + passing
            longest = whole + passing
            np.maximum(longest, count * slow, out=longest)
            np.maximum(longest, rest + (drained * slow + 2 * strip.hop), out=longest)
            ending = tail + (ahead + strip.hop)
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
        least_hop = menu.hop[key].min(axis=0)
        self.hop = np.where(outputs > 0, outputs * least_hop[0] + least_hop[1], 0.0)[columns][:, None, :]
        self.most = menu.most[key][:, rows, columns]
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


def _windows(array: FloatArray, length: int) -> FloatArray:
    """[l, state, a] = array[state, a + 1 + l], infinite past the end."""
    num_states, size = array.shape
    padded = np.full((num_states, size + length), np.inf)
    padded[:, : size - 1] = array[:, 1:]
    across, along = padded.strides
    return np.lib.stride_tricks.as_strided(padded, (length, num_states, size), (along, across, along), writeable=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """A stage of a partial plan."""

    option: Option
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Node:
    """Stages fixed from the front, with the running sums of (4)."""

    choices: tuple[Choice, ...]
    left: int
    """Stages still to come."""
    first: int
    """The first layer that is not placed."""
    devices: Vector
    passed: float = 0.0
    """H: p + 2x of the fixed stages."""
    passed_forward: float = 0.0
    """H_f: f + x of the fixed stages."""
    fixed: float = 0.0
    """Largest M t and tail of the fixed stages, with what lies in front of them."""
    drained: float = 0.0
    """Y: largest (M - (n - 1) rho) t of a fixed stage, with what lies around it up to the suffix."""


@dataclass(order=True)
class _Entry:
    """A node's next-best child, not yet looked at; its siblings follow when it is taken."""

    bound: float
    tie: tuple[int, ...]
    children: Iterator[tuple[float, _Node]] = field(compare=False)
    node: _Node = field(compare=False)


class PlanSearch:
    """Best-first search over the complete plans of one sub-problem."""

    def __init__(self, menu: Menu, shape: Shape, counts: Vector, most_stages: int, upper: float) -> None:
        self.menu = menu
        self.shape = shape
        self.counts = counts
        self.bounds = suffix_bounds(menu, shape, counts, min(most_stages, menu.prices.num_layers), upper)
        self.heap: list[_Entry] = []
        self.tie = itertools.count()
        self.expanded = 0
        for left in range(1, len(self.bounds.whole)):
            bound = self.bounds.at(left, 0, counts)
            if bound < upper:
                root = _Node((), left, 0, counts)
                self._push(bound, iter(()), root)

    @property
    def bound(self) -> float:
        """No plan that has not come out yet is faster."""
        return self.heap[0].bound if self.heap else np.inf

    def descend(self, upper: float) -> Iterator[tuple[Choice, ...]]:
        """For each number of stages, the plan that the bounds lead to directly, most promising first."""
        roots = sorted((entry for entry in self.heap if not entry.node.choices), key=lambda entry: entry.bound)
        for root in roots[:_DESCENTS]:
            node: _Node | None = root.node
            if root.bound >= upper:
                return
            while node is not None and node.left:
                node = next((child for _, child in self._children(node, upper * 1.5, best_only=True)), None)
            if node is not None:
                yield node.choices

    def next_plan(self, upper: float) -> tuple[float, tuple[Choice, ...]] | None:
        """The next complete plan in the order of bounds, or None if the next bound is ``upper`` or more."""
        while self.heap and self.heap[0].bound < upper:
            entry = heapq.heappop(self.heap)
            following = next(entry.children, None)
            if following is not None:
                self._push(following[0], entry.children, following[1])
            if not entry.node.left:
                return entry.bound, entry.node.choices
            children = self._children(entry.node, upper)
            self.expanded += 1
            first = next(children, None)
            if first is not None:
                self._push(first[0], children, first[1])
        return None

    def _push(self, bound: float, children: Iterator[tuple[float, _Node]], node: _Node) -> None:
        heapq.heappush(self.heap, _Entry(bound, (node.left, next(self.tie)), children, node))

    def _children(self, node: _Node, upper: float, *, best_only: bool = False) -> Iterator[tuple[float, _Node]]:
        """All ways to add the next stage that stay below ``upper``, by (4), ties by the shortest rest."""
        found: list[tuple[float, float, int, int, int]] = []
        best = upper
        for key, vector in enumerate(self.menu.vectors):
            left_over = tuple(have - take for have, take in zip(node.devices, vector, strict=True))
            if min(left_over) < 0:
                continue
            bounds, rest = self._child_bounds(node, key, left_over)
            if best_only:
                best = min(best, float(bounds.min()) * (1 + 1e-9))
            rows, ends = np.nonzero(bounds <= best) if best_only else np.nonzero(bounds < upper)
            for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
                found.append((float(bounds[row, end]), float(rest[row, end]), key, row, end))
        found.sort()
        for bound, _, key, row, end in found[:1] if best_only else found:
            yield bound, self._child(node, key, row, end)

    def _terms(self, node: _Node, key: int) -> tuple[FloatArray, ...]:
        """Per option and end: t, p, f, M t + tail, x, for a stage that begins at the node's first layer."""
        menu, first = self.menu, node.first
        outputs = menu.prices.outputs
        hop = menu.hop[key]
        over = np.where(outputs > 0, outputs * hop[:, :1] + hop[:, 1:], 0.0)
        slow = menu.slow[key][:, first]
        done = self.shape.num_micro_batches * slow + menu.tail[key][:, first]
        return slow, menu.quick[key][:, first], menu.quick_forward[key][:, first], done, over

    def _child_bounds(self, node: _Node, key: int, left_over: Vector) -> tuple[FloatArray, FloatArray]:
        menu, left = self.menu, node.left
        count = self.shape.num_micro_batches
        slow, quick, ahead, done, over = self._terms(node, key)
        state = self.bounds.states.index(left_over)
        rest, whole, tail = (
            array[left - 1][state] for array in (self.bounds.rest, self.bounds.whole, self.bounds.tail)
        )
        passing = quick + 2 * over
        drained = np.maximum(node.drained + passing, node.passed + self._drain(left) * slow + 2 * over)
        bound = np.maximum.reduce(
            [
                np.maximum(node.fixed, node.passed + count * slow),
                node.passed_forward + done,
                node.passed + passing + whole,
                drained + rest,
                node.passed_forward + ahead + over + tail,
            ]
        )
        bound[menu.most[key][:, node.first] < self.shape.least_in_flight(left)] = np.inf
        bound[:, : node.first + 1] = np.inf
        return bound, passing + rest

    def _drain(self, left: int) -> float:
        """M - (n_q - 1) rho."""
        return self.shape.num_micro_batches - (self.shape.most_in_flight(left) - 1) * self.menu.rho

    def _child(self, node: _Node, key: int, row: int, end: int) -> _Node:
        menu, left = self.menu, node.left
        count = self.shape.num_micro_batches
        slow, quick, ahead, done, over = (float(term[row, end]) for term in self._terms(node, key))
        passing = quick + 2 * over
        waits = node.passed + self._drain(left) * slow + 2 * over
        return _Node(
            choices=(*node.choices, Choice(menu.options[key][row], node.first, end)),
            left=left - 1,
            first=end,
            devices=tuple(have - take for have, take in zip(node.devices, menu.vectors[key], strict=True)),
            passed=node.passed + passing,
            passed_forward=node.passed_forward + ahead + over,
            fixed=max(node.fixed, node.passed + count * slow, node.passed_forward + done),
            drained=max(node.drained + passing, waits),
        )
