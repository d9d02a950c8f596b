"""Find the cheapest assignment of variables whose costs are tables over one or two of them,
exactly.

    (1)  minimise  sum_i c_i(x_i) + sum_(i,j) m_ij(x_i, x_j)

Eliminating a variable replaces every table that names it by one over its neighbours:

    (2)  t(neighbours) = min over x_i of the sum of those tables

A greedy order (smallest resulting table first) keeps (2) small on graphs that are nearly chains, as
training steps are. Backwards through the order, each variable is the minimiser of its (2), so the
optimum is read off.

Equal pieces are done once. Which tables meet where is worked out before any number is looked at
(``_Scheme``): two steps that combine the same tables in the same way are one *kind*, so a graph of
L equal layers has little more kinds than one of them. Tables that the caller shares between pieces
must be the same arrays.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.errors import InfeasibleError

# An array of costs with one axis per variable.
Table = NDArray[np.float64]
# A table with more entries than this is not built; the graph is then too tangled for this method.
MOST_ENTRIES = 1e7


class TangledError(InfeasibleError):
    """Raised if too many choices depend on one another for tables over them."""


@dataclass(frozen=True, kw_only=True)
class AssignmentProblem:
    """An instance of (1) that assigns a choice to each variable."""

    costs: tuple[Table, ...]
    """c_i; its length is the number of choices of variable i."""
    pairs: tuple[tuple[int, int, Table], ...]
    """Triples (i, j, m_ij)."""

    def value(self, choice: Sequence[int]) -> float:
        alone = sum(float(cost[x]) for cost, x in zip(self.costs, choice, strict=True))
        return alone + sum(float(table[choice[i], choice[j]]) for i, j, table in self.pairs)


@dataclass(frozen=True, kw_only=True)
class Found:
    """An assignment, and how far from it the optimum may be."""

    choice: tuple[int, ...]
    value: float
    bound: float
    """No assignment costs less."""


def elimination_order(sizes: Sequence[int], edges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return a greedy order: the variable whose elimination makes the smallest table comes first;
    the lower number on a tie."""
    return order_and_held(sizes, edges)[0]


def _neighbours(count: int, edges: Sequence[tuple[int, int]]) -> list[set[int]]:
    """Return, per variable, those that share an edge with it."""
    near: list[set[int]] = [set() for _ in range(count)]
    for i, j in edges:
        near[i].add(j)
        near[j].add(i)
    return near


def _connected(
    i: int, near: Sequence[set[int]], weights: list[float], logs: Sequence[float]
) -> Iterator[int]:
    """Connect the neighbours of an eliminated variable with each other, and yield each."""
    around, log = near[i], logs[i]
    for j in around:
        theirs = near[j]
        theirs.discard(i)
        weight = weights[j] - log
        for k in around:
            if k != j and k not in theirs:
                theirs.add(k)
                weight += logs[k]
        weights[j] = weight
        yield j


def order_and_held(
    sizes: Sequence[int],
    edges: Sequence[tuple[int, int]],
    *,
    most: float = math.inf,
    chosen: Callable[[Mapping[int, float]], int] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the order, and the variables that are held.

    If a table would have more than ``most`` entries, one of its variables is held instead:
    ``chosen`` selects it from those that would be left, given how strongly each is connected.
    """
    near = _neighbours(len(sizes), edges)
    logs = [math.log(size) for size in sizes]
    weights = [sum([logs[j] for j in around], own) for own, around in zip(logs, near, strict=True)]
    count = len(sizes)
    current = [int(weight * 1e6 + 0.5) * count + i for i, weight in enumerate(weights)]
    heap = current.copy()
    heapq.heapify(heap)
    order, held = [], []

    def push(j: int) -> None:
        current[j] = int(weights[j] * 1e6 + 0.5) * count + j
        heapq.heappush(heap, current[j])

    limit = (int(math.log(most) * 1e6 + 0.5) + 1) * count if chosen is not None else math.inf
    while heap:
        first = heapq.heappop(heap)
        i = first % count
        if first != current[i]:
            continue
        if first >= limit and near[i]:
            assert chosen is not None
            gone = chosen({j: len(near[j]) * logs[j] for j in sorted(near[i])})
            held.append(gone)
            current[gone] = -1
            for j in near[gone]:
                near[j].discard(gone)
                weights[j] -= logs[gone]
                push(j)
            continue
        order.append(i)
        current[i] = -1
        for j in _connected(i, near, weights, logs):
            push(j)
    return tuple(order), tuple(held)


@dataclass(frozen=True)
class _Kind:
    """A kind of step that combines certain tables in a certain way."""

    own: int
    """A variable whose cost represents theirs."""
    pairs: tuple[Table, ...]
    """Tables over pairs, with their axes in place."""
    made: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    """Results of earlier kinds: which one, how its axes are permuted, and where in the sum they lie
    (see ``_spread``)."""
    rank: int


class _Scheme:
    """The steps of an elimination: everything about (2) but the costs of single variables."""

    def __init__(self, problem: AssignmentProblem, order: Sequence[int]) -> None:
        self.sizes = sizes = [len(cost) for cost in problem.costs]
        self.steps: list[tuple[int, tuple[int, ...], int]] = []
        """Triples (variable, its neighbours, kind)."""
        self.kinds: list[_Kind] = []
        self.entries = 1
        place = [0] * len(sizes)
        for position, i in enumerate(order):
            place[i] = position
        pairs: list[list[tuple[int, int, Table]]] = [[] for _ in sizes]
        """For each pair, by the end that is eliminated first: the other end, its axis of the table,
        the table."""
        for i, j, table in problem.pairs:
            # A variable with one choice gets no axis (numpy has 64), so the other has the table.
            if sizes[j] == 1 or (sizes[i] > 1 and place[i] < place[j]):
                pairs[i].append((j, 1, table))
            else:
                pairs[j].append((i, 0, table))
        made: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in sizes]
        known: dict[object, int] = {}
        for i in order:
            around = {j for j, _, _ in pairs[i] if sizes[j] > 1}
            for names, _ in made[i]:
                around.update(names)
            around.discard(i)
            scope = tuple(sorted(around))
            axes = {j: axis for axis, j in enumerate(scope, 1)}
            axes[i] = 0
            own = [(axes.get(j, -1), side, id(table)) for j, side, table in pairs[i]]
            earlier = [(kind, tuple([axes[j] for j in names])) for names, kind in made[i]]
            own.sort()
            key = (id(problem.costs[i]), tuple(own), tuple(sorted(earlier)))
            kind = known.get(key)
            if kind is None:
                kind = known[key] = len(self.kinds)
                self.kinds.append(self._kind(i, scope, pairs[i], earlier))
            self.steps.append((i, scope, kind))
            if scope:
                made[min(scope, key=place.__getitem__)].append((scope, kind))

    def _kind(
        self,
        i: int,
        scope: tuple[int, ...],
        pairs: list[tuple[int, int, Table]],
        earlier: list[tuple[int, tuple[int, ...]]],
    ) -> _Kind:
        sizes = [self.sizes[i], *[self.sizes[j] for j in scope]]
        entries = math.prod(sizes)
        if entries > MOST_ENTRIES:
            raise TangledError(
                f"the graph is too tangled for an exact search: a table of {entries:,} entries"
            )
        self.entries = max(self.entries, entries)
        spread = []
        for j, side, table in pairs:
            shape = [sizes[0], *[self.sizes[j] if k == j else 1 for k in scope]]
            spread.append((table if side == 1 else table.T).reshape(shape))
        made = tuple([(kind, *_spread(places, sizes)) for kind, places in earlier])
        return _Kind(i, tuple(spread), made, len(sizes))

    def solve(self, costs: Sequence[Table]) -> tuple[float, tuple[int, ...]]:
        """The optimum for these costs by (2), and its choices; infinite if nothing is allowed."""
        tables: list[Table] = []
        best: list[NDArray[np.int64]] = []
        for kind in self.kinds:
            cost = costs[kind.own]
            total: Table = cost.reshape(-1, *(1,) * (kind.rank - 1))
            for table in kind.pairs:
                total = total + table
            for number, turn, shape in kind.made:
                total = total + tables[number].transpose(turn).reshape(shape)
            tables.append(np.minimum.reduce(total, 0))
            best.append(total.argmin(0))
        choice = [0] * len(self.sizes)
        for i, scope, number in reversed(self.steps):
            choice[i] = best[number].item(*[choice[j] for j in scope])
        value = sum(float(tables[number]) for _, scope, number in self.steps if not scope)
        return value, tuple(choice)


def cheapest(problem: AssignmentProblem, *, order: Sequence[int] | None = None) -> Found:
    """Return the optimum of (1); raise an ``InfeasibleError`` if nothing is allowed."""
    if order is None:
        order = elimination_order(
            [len(cost) for cost in problem.costs], [(i, j) for i, j, _ in problem.pairs]
        )
    value, choice = _Scheme(problem, order).solve(problem.costs)
    if not math.isfinite(value):
        raise InfeasibleError("no distributed program computes this graph")
    return Found(choice=choice, value=value, bound=value)


def _spread(axes: tuple[int, ...], sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how to permute and reshape a table so that its axes lie at the given places of a
    larger one."""
    turn = tuple(sorted(range(len(axes)), key=axes.__getitem__))
    return turn, tuple([size if axis in axes else 1 for axis, size in enumerate(sizes)])
