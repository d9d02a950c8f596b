"""The pipeline search: which stages, on how many devices of each pool, with how many layers each.

Stages are fixed one after the other from the front. With R, W and S the suffix bounds of ``solve.bounds``, and running
sums over the fixed stages (``_Node``),

    (1)  bound(node) = max( M t and tails of the fixed stages,  H + W,  Y + R,  H_f + S )

never decreases along a path: a best-first search on it meets complete plans in the order of their bounds, and whatever
is left in the queue when the best plan is no slower than the next bound is proven no better. Children of a node are
looked at one by one, the best first, so that the queue stays as long as the search is deep.

Not in here: contention between boundaries, changes over time, placement. The simulator judges those.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from argosy.solve.bounds import Menu, Shape, hand_over, suffix_bounds
from argosy.space.option import Option, Vector
from argosy.space.price import FloatArray

_DESCENTS = 3
"""Numbers of stages for which the bounds are followed down at once."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A stage of a partial plan."""

    option: Option
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Node:
    """Stages fixed from the front, with the running sums of (1)."""

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
        """All ways to add the next stage that stay below ``upper``, by (1), ties by the shortest rest."""
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
        """Per option and end: t, p, f, M t + tail, x, 2x, for a stage that begins at the node's first layer."""
        menu, first = self.menu, node.first
        outputs = menu.prices.outputs
        over, both = hand_over(menu.hop[key], outputs)
        slow = menu.slow[key][:, first]
        done = self.shape.num_micro_batches * slow + menu.tail[key][:, first]
        return slow, menu.quick[key][:, first], menu.quick_forward[key][:, first], done, over, both

    def _child_bounds(self, node: _Node, key: int, left_over: Vector) -> tuple[FloatArray, FloatArray]:
        menu, left = self.menu, node.left
        count = self.shape.num_micro_batches
        slow, quick, ahead, done, over, both = self._terms(node, key)
        state = self.bounds.states.index(left_over)
        rest, whole, tail = (
            array[left - 1][state] for array in (self.bounds.rest, self.bounds.whole, self.bounds.tail)
        )
        passing = quick + both
        drained = np.maximum(node.drained + passing, node.passed + self._drain(left) * slow + both)
        bound = np.maximum.reduce(
            [
                np.maximum(node.fixed, node.passed + count * slow),
                node.passed_forward + done,
                node.passed + passing + whole,
                drained + rest,
                node.passed_forward + ahead + over + tail,
                count * menu.load[key][:, node.first],
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
        slow, quick, ahead, done, over, both = (float(term[row, end]) for term in self._terms(node, key))
        passing = quick + both
        load = count * float(menu.load[key][row, node.first, end])
        waits = node.passed + self._drain(left) * slow + both
        return _Node(
            choices=(*node.choices, Choice(menu.options[key][row], node.first, end)),
            left=left - 1,
            first=end,
            devices=tuple(have - take for have, take in zip(node.devices, menu.vectors[key], strict=True)),
            passed=node.passed + passing,
            passed_forward=node.passed_forward + ahead + over,
            fixed=max(node.fixed, node.passed + count * slow, node.passed_forward + done, load),
            drained=max(node.drained + passing, waits),
        )
