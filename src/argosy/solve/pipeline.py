"""The pipeline search: which stages, on how many devices of each pool, with how many layers each.

Variables: an ordered list of stages; each takes a range of layers and an ``Option``. Objective: seconds of one
iteration. With f, b the stage's forward and backward, t its slowest and p its quickest forward + backward, x the
least time to hand a micro-batch on, n_q the micro-batches in flight at the q-th stage from the end, M micro-batches,
and rho the largest f / (f + b) of all options, three suffix programmes bound the time of whatever follows, for q
stages from layer a on with at most u devices:

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

from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.space.option import Option, Vector
from argosy.space.price import FloatArray, Prices


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What all plans of one sub-problem share: the micro-batches and the schedule."""

    num_micro_batches: int
    micro_batch_size: int
    schedule: ScheduleSpec

    @property
    def group(self) -> int:
        return self.schedule.k if self.schedule.kind is ScheduleKind.KFKB else 1

    def in_flight(self, from_end: int) -> int:
        """n_q."""
        ahead = 2 * from_end - 1 if self.schedule.kind is ScheduleKind.EAGER else self.group * from_end
        return min(ahead, self.num_micro_batches)

    def depths(self, num_stages: int) -> tuple[int, ...]:
        return tuple(self.in_flight(left) for left in range(num_stages, 0, -1))

    def __repr__(self) -> str:
        return f"{self.num_micro_batches} micro-batches of {self.micro_batch_size}, {self.schedule!r}"


class Menu:
    """The options of a sub-problem with their tables, grouped by vector (in units of the search's granularity)."""

    def __init__(self, prices: Prices, shape: Shape, options: Mapping[Vector, Sequence[Option]]) -> None:
        self.prices = prices
        self.shape = shape
        self.vectors = sorted(options)
        self.options = [list(options[vector]) for vector in self.vectors]
        self.weights = prices.parameters[None, :] - prices.parameters[:, None]
        self.rho = max(
            float((o.forward[:, -1] / (o.forward[:, -1] + o.backward[:, -1])).max())
            for row in self.options
            for o in row
        )
        self.most = [np.stack([self._most_in_flight(o) for o in row]) for row in self.options]
        self.slow = [np.stack([o.slowest for o in row]) for row in self.options]
        self.quick = [np.stack([o.quickest for o in row]) for row in self.options]
        self.quick_forward = [np.stack([o.quickest_forward for o in row]) for row in self.options]
        self.tail = [np.stack([o.tail(self.weights) for o in row]) for row in self.options]
        self.hop = [np.array([o.hop for o in row]) for row in self.options]

    def _most_in_flight(self, option: Option) -> FloatArray:
        """[a, b]: the most micro-batches in flight with which the layers fit; below 1 they do not fit at all."""
        fixed, each = option.memory(self.shape.group)
        return np.floor((1 - fixed) / np.maximum(each, 1e-30) + 1e-9)

    def least(self, key: int, in_flight: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Tables [a, b] of the least t, p, f and M t + tail over the options of a vector that fit."""
        fits = self.most[key] >= in_flight
        count = self.shape.num_micro_batches
        return (
            np.where(fits, self.slow[key], np.inf).min(axis=0),
            np.where(fits, self.quick[key], np.inf).min(axis=0),
            np.where(fits, self.quick_forward[key], np.inf).min(axis=0),
            np.where(fits, count * self.slow[key] + self.tail[key], np.inf).min(axis=0),
        )


@dataclass(frozen=True)
class Bounds:
    """(1) to (3): per number of stages from the end, an array over (first layer, devices of each pool)."""

    rest: list[FloatArray]
    whole: list[FloatArray]
    tail: list[FloatArray]

    def at(self, num_stages: int, first: int, devices: Vector) -> float:
        """The larger of W and S."""
        place = (first, *devices)
        return max(float(self.whole[num_stages][place]), float(self.tail[num_stages][place]))


def suffix_bounds(menu: Menu, counts: Vector, most_stages: int, upper: float) -> Bounds:
    """(1) to (3) for all suffixes; what cannot stay below ``upper`` becomes infinite."""
    num_layers, count = menu.prices.num_layers, menu.shape.num_micro_batches
    size = (num_layers + 1, *(number + 1 for number in counts))
    start = np.full(size, np.inf)
    start[num_layers] = 0.0
    rest, whole, tail = [start], [start], [start]
    outputs = menu.prices.outputs
    for left in range(1, most_stages + 1):
        in_flight = menu.shape.in_flight(left)
        drained = count - (in_flight - 1) * menu.rho
        new = [np.full(size, np.inf) for _ in range(3)]
        for key, vector in enumerate(menu.vectors):
            slow, quick, ahead, done = menu.least(key, in_flight)
            longest = _longest(slow, done, count, upper)
            if not longest:
                continue
            hop = menu.hop[key].min(axis=0)
            over = np.where(outputs > 0, outputs * hop[0] + hop[1], 0.0)
            source = tuple(slice(0, number + 1 - taken) for number, taken in zip(counts, vector, strict=True))
            target = tuple(slice(taken, None) for taken in vector)
            windows = [_windows(array[-1][(slice(None), *source)], longest) for array in (rest, whole, tail)]
            tables = [_band(table, longest, len(counts)) for table in (slow, quick, ahead, done)]
            hops = _band(np.broadcast_to(over, slow.shape), longest, len(counts))
            passing = tables[1] + 2 * hops
            later = windows[0] + passing
            found = [
                later,
                np.maximum(
                    np.maximum(count * tables[0], windows[1] + passing), windows[0] + (drained * tables[0] + 2 * hops)
                ),
                np.maximum(tables[3], windows[2] + (tables[2] + hops)),
            ]
            for array, values in zip(new, found, strict=True):
                view = array[(slice(None), *target)]
                np.minimum(view, values.min(axis=-1), out=view)
        lost = (new[1] >= upper) | (new[2] >= upper)
        for bounds, values in zip((rest, whole, tail), new, strict=True):
            values[lost] = np.inf
            bounds.append(values)
        if lost.all():
            break
    return Bounds(rest, whole, tail)


def _longest(slow: FloatArray, done: FloatArray, count: int, upper: float) -> int:
    """The most layers that any stage of this vector can take without passing ``upper``."""
    first, end = np.nonzero((count * slow < upper) & (done < upper))
    ahead = end - first
    return int(ahead.max(initial=0))


def _windows(array: FloatArray, length: int) -> FloatArray:
    """[a, u..., l] = array[a + 1 + l, u...], infinite past the end."""
    padding = np.full((length, *array.shape[1:]), np.inf)
    padded = np.concatenate((array[1:], padding))
    return np.lib.stride_tricks.sliding_window_view(padded, length, axis=0)


def _band(table: FloatArray, length: int, num_pools: int) -> FloatArray:
    """[a, 1..., l] = table[a, a + 1 + l], infinite past the end; ones for the pools."""
    size = len(table)
    columns = np.arange(size)[:, None] + 1 + np.arange(length)[None, :]
    inside = columns < size
    values = np.where(inside, table[np.arange(size)[:, None], np.minimum(columns, size - 1)], np.inf)
    return values.reshape(size, *(1,) * num_pools, length)


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

    def __init__(self, menu: Menu, counts: Vector, most_stages: int, upper: float) -> None:
        self.menu = menu
        self.counts = counts
        self.bounds = suffix_bounds(menu, counts, min(most_stages, menu.prices.num_layers), upper)
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
        for root in roots:
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
        for key, vector in enumerate(self.menu.vectors):
            left_over = tuple(have - take for have, take in zip(node.devices, vector, strict=True))
            if min(left_over) < 0:
                continue
            bounds, rest = self._child_bounds(node, key, left_over)
            rows, ends = np.nonzero(bounds < upper)
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
        done = menu.shape.num_micro_batches * slow + menu.tail[key][:, first]
        return slow, menu.quick[key][:, first], menu.quick_forward[key][:, first], done, over

    def _child_bounds(self, node: _Node, key: int, left_over: Vector) -> tuple[FloatArray, FloatArray]:
        menu, left = self.menu, node.left
        in_flight, count = menu.shape.in_flight(left), menu.shape.num_micro_batches
        slow, quick, ahead, done, over = self._terms(node, key)
        place: tuple[slice | int, ...] = (slice(None), *left_over)
        rest, whole, tail = (
            array[left - 1][place] for array in (self.bounds.rest, self.bounds.whole, self.bounds.tail)
        )
        passing = quick + 2 * over
        drained = np.maximum(
            node.drained + passing, node.passed + (count - (in_flight - 1) * menu.rho) * slow + 2 * over
        )
        bound = np.maximum.reduce(
            [
                np.maximum(node.fixed, node.passed + count * slow),
                node.passed_forward + done,
                node.passed + passing + whole,
                drained + rest,
                node.passed_forward + ahead + over + tail,
            ]
        )
        bound[(menu.most[key][:, node.first] < in_flight)] = np.inf
        bound[:, : node.first + 1] = np.inf
        return bound, passing + rest

    def _child(self, node: _Node, key: int, row: int, end: int) -> _Node:
        menu, left = self.menu, node.left
        in_flight, count = menu.shape.in_flight(left), menu.shape.num_micro_batches
        slow, quick, ahead, done, over = (float(term[row, end]) for term in self._terms(node, key))
        passing = quick + 2 * over
        waits = node.passed + (count - (in_flight - 1) * menu.rho) * slow + 2 * over
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
