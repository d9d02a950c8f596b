"""The cheapest assignment under a cap on a second sum (memory): A* whose heuristic is the elimination's cost-to-go.

    (1)  minimise c(x)  with  m(x) <= 1,   c and m sums of tables, m over single variables
    (2)  for every y >= 0:  min over x of c(x) + y (m(x) - 1)  is no more than the optimum of (1)

Bisection on y brackets the cap between two assignments, one on each side of it; (2) at the best y is a certified lower
bound. Crossing the two at every place gives a good assignment that fits. A* then assigns variables in the reverse of
the elimination order: by (3) of ``elimination`` the estimate of a partial assignment is exact for c + y m, so without
a cap it walks straight to the optimum, and with one it stops as soon as what it holds is proven, within a tolerance.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from argosy.errors import InfeasibleError
from argosy.solve.elimination import Elimination, Memory, Problem, Table, eliminate, elimination_order

BISECTIONS = 20
MOST_WORK = 2_000_000
"""Partial assignments that A* may look at, times the number of variables."""
CLOSE = 5e-4
"""A multiplier is good enough when the best assignment is this near to the bound and the problem is large."""
LARGE = 400
"""Variables from which on it is."""
TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Found:
    """An assignment, and how far from it the optimum may be."""

    choice: tuple[int, ...]
    value: float
    bound: float
    """No assignment that fits costs less."""
    pops: int = 0
    """Partial assignments that A* looked at."""

    @property
    def gap(self) -> float:
        return self.value / self.bound - 1 if self.bound > 0 else 0.0


def cheapest(problem: Problem, weights: Sequence[Table] | None = None, *, places: Sequence[int] | None = None) -> Found:
    """(1); ``weights`` are the tables of m, None for no cap; ``places`` say where along the graph a variable stands."""
    order = elimination_order([len(cost) for cost in problem.costs], [(i, j) for i, j, _ in problem.pairs])
    memory = Memory()
    free = eliminate(problem, order=order, memory=memory)
    if not np.isfinite(free.value):
        raise InfeasibleError("no distributed program computes this graph")
    if weights is None or _weight(weights, free.choice) <= 1:
        return Found(choice=free.choice, value=free.value, bound=free.value)
    along = np.array(places if places is not None else range(len(problem.costs)))
    return _Capped(problem, weights, order, memory, along).search(free)


def _weight(weights: Sequence[Table], choice: Sequence[int]) -> float:
    return sum(float(table[x]) for table, x in zip(weights, choice, strict=True))


class _Capped:
    def __init__(
        self,
        problem: Problem,
        weights: Sequence[Table],
        order: tuple[int, ...],
        memory: Memory,
        places: NDArray[np.int64],
    ) -> None:
        self.problem, self.weights, self.order, self.memory = problem, weights, order, memory
        self.places = places
        self.close = CLOSE if len(order) > LARGE else TOLERANCE
        self.best: tuple[int, ...] | None = None
        self.value = float("inf")
        self.bound = -float("inf")

    def search(self, free: Elimination) -> Found:
        self.bound = free.value
        solved, multiplier = self._bisect(free)
        done = 0
        if self.value > self.bound * (1 + self.close):
            done = self._best_first(solved, multiplier, MOST_WORK // len(self.order))
        if self.best is None:
            least = sum(float(table.min()) for table in self.weights)
            raise InfeasibleError(f"no program fits in memory: at least {least:.0%} of it would be needed")
        return Found(choice=self.best, value=self.value, bound=min(self.bound, self.value), pops=done)

    def _priced(self, multiplier: float) -> Problem:
        """c + y m; tables that were shared stay shared."""
        known: dict[tuple[int, int], Table] = {}
        costs = []
        for cost, weight in zip(self.problem.costs, self.weights, strict=True):
            key = (id(cost), id(weight))
            if key not in known:
                known[key] = cost + multiplier * weight
            costs.append(known[key])
        return replace(self.problem, costs=tuple(costs))

    def _offer(self, choice: Sequence[int]) -> None:
        if _weight(self.weights, choice) <= 1:
            value = self.problem.value(choice)
            if value < self.value:
                self.best, self.value = tuple(choice), value

    def _bisect(self, free: Elimination) -> tuple[Elimination, float]:
        """(2): the best bound found, its elimination and its multiplier."""
        low, high = 0.0, max(free.value, 1e-9)
        over: tuple[int, ...] = free.choice
        kept, multiplier = free, 0.0
        for round_ in range(BISECTIONS):
            trial = high if self.best is None else (low + high) / 2
            solved = eliminate(self._priced(trial), order=self.order, memory=self.memory)
            if solved.value - trial > self.bound or round_ == 0:
                self.bound, kept, multiplier = max(self.bound, solved.value - trial), solved, trial
            if _weight(self.weights, solved.choice) <= 1:
                high, under = trial, solved.choice
                self._offer(under)
                self._cross(over, under)
            else:
                over = solved.choice
                low = trial
                high = 4 * high if self.best is None else high
            if self.value <= self.bound * (1 + self.close) or (self.best is not None and high - low < 1e-4 * high):
                break
        return kept, multiplier

    def _cross(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Assignments that follow one up to a place and the other from there on, the cheapest that fits."""
        for first, second in ((one, other), (other, one)):
            cost, weight = self._crossed(first, second)
            fitting = np.where(weight <= 1, cost, np.inf)
            place = int(np.argmin(fitting))
            if fitting[place] < self.value:
                self._offer([x if at < place else y for x, y, at in zip(first, second, self.places, strict=True)])

    def _crossed(self, first: Sequence[int], second: Sequence[int]) -> tuple[Table, Table]:
        """Cost and weight for every place: variables before it as in the first, from it on as in the second."""
        size = int(self.places.max()) + 3
        cost, weight = np.zeros(size), np.zeros(size)

        def add(target: Table, begin: int, end: int, amount: float) -> None:
            target[begin] += amount
            target[end] -= amount

        for i, (table, held) in enumerate(zip(self.problem.costs, self.weights, strict=True)):
            at = int(self.places[i]) + 1
            for target, values in ((cost, table), (weight, held)):
                add(target, 0, at, float(values[second[i]]))
                add(target, at, size - 1, float(values[first[i]]))
        barred = np.zeros(size)
        for i, j, table in self.problem.pairs:
            early, late = sorted((int(self.places[i]) + 1, int(self.places[j]) + 1))
            x = first[i] if self.places[i] < self.places[j] else second[i]
            y = first[j] if self.places[j] < self.places[i] else second[j]
            for begin, end, amount in (
                (0, early, table[second[i], second[j]]),
                (early, late, table[x, y]),
                (late, size - 1, table[first[i], first[j]]),
            ):
                add(cost, begin, end, float(amount)) if np.isfinite(amount) else add(barred, begin, end, 1.0)
        total = np.cumsum(cost)[:-1]
        return np.where(np.cumsum(barred)[:-1] > 0.5, np.inf, total), np.cumsum(weight)[:-1]

    def _best_first(self, solved: Elimination, multiplier: float, pops: int) -> int:
        """A* in the reverse of the elimination order, on c + y m."""
        walk = _Walk(self._priced(multiplier), solved)
        least = np.concatenate([[0.0], np.cumsum([self.weights[s.variable].min() for s in solved.steps])])
        heap: list[tuple[float, int, int, float, tuple[object, ...]]] = [(solved.value - multiplier, 0, 0, 0.0, ())]
        done, ticket = 0, 0
        while heap and done < pops:
            estimate, depth, _, weight, chain = heapq.heappop(heap)
            if estimate >= self.value * (1 - TOLERANCE):
                self.bound = max(self.bound, min(estimate, self.value))
                return done
            done += 1
            step = len(solved.steps) + depth - 1  # depth is negative: deeper first among equals
            if step < 0:
                self._offer(walk.assignment(chain))
                continue
            choices = walk.extensions(step, chain)
            for x, extra in enumerate(choices):
                held = weight + float(self.weights[solved.steps[step].variable][x])
                if np.isfinite(extra) and held + least[step] <= 1 + 1e-12 and estimate + extra < self.value:
                    ticket += 1
                    heapq.heappush(heap, (estimate + extra, depth - 1, ticket, held, (x, chain)))
        if heap:
            self.bound = max(self.bound, min(heap[0][0], self.value))
        elif self.best is not None:
            self.bound = self.value
        return done


class _Walk:
    """Estimates of partial assignments, from the tables of a solved elimination."""

    def __init__(self, problem: Problem, solved: Elimination) -> None:
        self.solved = solved
        place = {step.variable: position for position, step in enumerate(solved.steps)}
        self.factors: list[list[tuple[tuple[int, ...], Table]]] = [
            [((step.variable,), problem.costs[step.variable])] for step in solved.steps
        ]
        for i, j, table in problem.pairs:
            self.factors[min(place[i], place[j])].append(((i, j), table))
        for step in solved.steps:
            if step.scope:
                target = min(step.scope, key=place.__getitem__)
                self.factors[place[target]].append((step.scope, step.table))

    def values(self, chain: tuple[object, ...]) -> dict[int, int]:
        found: dict[int, int] = {}
        links = []
        while chain:
            links.append(chain[0])
            chain = chain[1]  # type: ignore[assignment]
        for step, x in zip(reversed(self.solved.steps), reversed(links), strict=False):
            assert isinstance(x, int)
            found[step.variable] = x
        return found

    def assignment(self, chain: tuple[object, ...]) -> tuple[int, ...]:
        found = self.values(chain)
        return tuple(found[i] for i in range(len(found)))

    def extensions(self, step: int, chain: tuple[object, ...]) -> Table:
        """Per choice of the next variable, how much the estimate grows."""
        chosen = self.values(chain)
        here = self.solved.steps[step]
        total = np.zeros(len(self.factors[step][0][1]))
        for names, table in self.factors[step]:
            index = tuple(slice(None) if name == here.variable else chosen[name] for name in names)
            total = total + table[index]
        base = float(here.table[tuple(chosen[name] for name in here.scope)]) if here.scope else float(here.table)
        return total - base
