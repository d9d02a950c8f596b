"""The cheapest assignment of variables whose costs are tables over one or two of them, exactly.

    (1)  minimise  sum_i c_i(x_i) + sum_(i,j) m_ij(x_i, x_j)

Eliminating a variable replaces every table that names it by one over its neighbours:

    (2)  t(neighbours) = min over x_i of the sum of those tables

A greedy order (smallest resulting table first) keeps (2) small on graphs that are nearly chains, as training steps are.
Backwards through the order, each variable is the minimiser of its (2), so the optimum is read off; and for every
partial assignment of the variables eliminated last,

    (3)  the rest costs exactly the constant that their own tables give: the perfect cost-to-go of a search

Equal pieces are done once: a step is looked up by the identity of its tables, so a graph of L equal layers costs little
more than one of them. Tables that the caller shares between pieces must be the same arrays.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argosy.errors import InfeasibleError

Table = NDArray[np.float64]
MOST_ENTRIES = 1e7
"""A table larger than this is not built; the graph is too tangled for this method."""


class TangledError(InfeasibleError):
    """Too many choices hang together for tables over them."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """(1)."""

    costs: tuple[Table, ...]
    """c_i; its length is the number of choices of variable i."""
    pairs: tuple[tuple[int, int, Table], ...]
    """(i, j, m_ij)."""

    def value(self, choice: Sequence[int]) -> float:
        alone = sum(float(cost[x]) for cost, x in zip(self.costs, choice, strict=True))
        return alone + sum(float(table[choice[i], choice[j]]) for i, j, table in self.pairs)


@dataclass(frozen=True)
class Step:
    """One elimination: the variable, its neighbours, and per choice of theirs the best of its own."""

    variable: int
    scope: tuple[int, ...]
    best: NDArray[np.int64]
    table: Table
    """(2)."""


@dataclass
class Memory:
    """Steps that were done before, by the identity of what went in."""

    tables: dict[tuple[object, ...], tuple[Table, NDArray[np.int64]]] = field(default_factory=dict)
    held: list[Table] = field(default_factory=list)
    """Keeps tables alive, so that no identity is used twice."""


@dataclass(frozen=True, kw_only=True)
class Elimination:
    """A solved problem."""

    value: float
    choice: tuple[int, ...]
    steps: tuple[Step, ...]
    constant: float
    """Sum of the tables that were left without variables."""
    entries: int
    """Size of the largest table, the eliminated variable included."""


def elimination_order(sizes: Sequence[int], edges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Greedy: the variable whose elimination makes the smallest table comes first; the lower number on a tie."""
    near: list[set[int]] = [set() for _ in sizes]
    for i, j in edges:
        near[i].add(j)
        near[j].add(i)
    logs = [math.log(size) for size in sizes]

    def weight(i: int) -> float:
        return round(logs[i] + sum(logs[j] for j in near[i]), 6)

    current = [weight(i) for i in range(len(sizes))]
    heap = [(w, i) for i, w in enumerate(current)]
    heapq.heapify(heap)
    order, gone = [], [False] * len(sizes)
    while heap:
        w, i = heapq.heappop(heap)
        if gone[i] or w != current[i]:
            continue
        order.append(i)
        gone[i] = True
        around = near[i]
        for j in around:
            near[j] |= around
            near[j] -= {i, j}
        for j in around:
            current[j] = weight(j)
            heapq.heappush(heap, (current[j], j))
    return tuple(order)


def eliminate(problem: Problem, *, order: Sequence[int] | None = None, memory: Memory | None = None) -> Elimination:
    """The optimum of (1). Infinite costs forbid; if nothing is allowed, that is said."""
    sizes = [len(cost) for cost in problem.costs]
    if order is None:
        order = elimination_order(sizes, [(i, j) for i, j, _ in problem.pairs])
    memory = memory if memory is not None else Memory()
    buckets: list[list[tuple[tuple[int, ...], Table]]] = [[((i,), cost)] for i, cost in enumerate(problem.costs)]
    place = [0] * len(sizes)
    for position, i in enumerate(order):
        place[i] = position
    for i, j, table in problem.pairs:
        first = i if place[i] < place[j] else j
        buckets[first].append(((i, j), table))
    steps, constant, entries = [], 0.0, 1
    for i in order:
        scope = sorted({j for names, _ in buckets[i] for j in names if j != i})
        entries = max(entries, sizes[i] * math.prod(sizes[j] for j in scope))
        if entries > MOST_ENTRIES:
            raise TangledError(f"the graph is too tangled for an exact search: a table of {entries:,} entries")
        table, best = _combined(i, scope, buckets[i], sizes, memory)
        buckets[i] = []
        steps.append(Step(i, tuple(scope), best, table))
        if scope:
            target = min(scope, key=place.__getitem__)
            buckets[target].append((tuple(scope), table))
        else:
            constant += float(table)
    choice = _read_off(steps, len(sizes))
    return Elimination(value=constant, choice=choice, steps=tuple(steps), constant=constant, entries=entries)


def _combined(
    i: int, scope: list[int], factors: list[tuple[tuple[int, ...], Table]], sizes: list[int], memory: Memory
) -> tuple[Table, NDArray[np.int64]]:
    """(2), or its earlier result."""
    axes = {j: axis for axis, j in enumerate([i, *scope])}
    parts = sorted(((id(table), tuple(axes[j] for j in names)) for names, table in factors))
    key = (len(scope), *parts)
    if key not in memory.tables:
        shape = [sizes[i], *(sizes[j] for j in scope)]
        total = np.zeros(shape)
        for names, table in factors:
            total += _spread(table, [axes[j] for j in names], len(shape))
        memory.tables[key] = (total.min(0), total.argmin(0))
        memory.held.extend(table for _, table in factors)
    return memory.tables[key]


def _spread(table: Table, axes: list[int], rank: int) -> Table:
    """A table with its axes at the given places and length 1 elsewhere."""
    turn = sorted(range(len(axes)), key=axes.__getitem__)
    shape = [1] * rank
    for axis in range(len(axes)):
        shape[axes[axis]] = table.shape[axis]
    return table.transpose(turn).reshape(shape)


def _read_off(steps: Sequence[Step], count: int) -> tuple[int, ...]:
    choice = [0] * count
    for step in reversed(steps):
        choice[step.variable] = int(step.best[tuple(choice[j] for j in step.scope)])
    return tuple(choice)
