"""Find the cheapest assignment under a cap on a second sum (memory), by A* whose heuristic is the
elimination's cost-to-go.

    (1)  minimise c(x)  with  m(x) <= 1,   c and m sums of tables, m over single variables
    (2)  for every y >= 0:  min over x of c(x) + y (m(x) - 1)  is no more than the optimum of (1)

Bisection on y brackets the cap between two assignments, one on each side of it; (2) at the best y
is a certified lower bound. Crossing the two at every place gives a good assignment that fits. A*
then assigns variables in the reverse of the elimination order: by (3) of ``elimination`` the
estimate of a partial assignment is exact for c + y m, so without a cap it walks straight to the
optimum, and with one it stops as soon as its best assignment is proven within a tolerance.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from argosy.errors import InfeasibleError
from argosy.solve.programs.elimination import (
    AssignmentProblem,
    Elimination,
    Scheme,
    Table,
    eliminate,
)

BISECTIONS = 20
"""Maximum number of multipliers y that are tried."""
MOST_WORK = 2_000_000
"""Maximum number of partial assignments that A* examines, times the number of variables."""
CLOSE = 5e-4
"""In a large problem a multiplier is good enough if the best assignment is within this share of the
bound."""
LARGE = 400
"""A problem with more variables than this counts as large."""
TOLERANCE = 1e-9
"""Values that differ by less than this share count as equal."""
Chain: TypeAlias = "tuple[()] | tuple[int, Chain]"
"""A partial assignment: the last choice, and those before it."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """An assignment that has a proven distance from the optimum."""

    choice: tuple[int, ...]
    value: float
    bound: float
    """No assignment that fits costs less."""
    pops: int = 0
    """Number of partial assignments that A* examined."""


def cheapest(
    problem: AssignmentProblem,
    weights: Sequence[Table] | None = None,
    *,
    places: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
) -> Found:
    """Return the cheapest assignment under the cap (1).

    ``weights`` are the tables of m, None for no cap; ``places`` gives the position of each variable
    along the graph.
    """
    free = eliminate(problem, order=order)
    if not np.isfinite(free.value):
        raise InfeasibleError("no distributed program computes this graph")
    if (
        weights is None
        or sum(table.item(x) for table, x in zip(weights, free.choice, strict=True)) <= 1
    ):
        return Found(choice=free.choice, value=free.value, bound=free.value)
    along = np.array(places if places is not None else range(len(problem.costs)))
    return _Capped(
        problem, weights, [variable for variable, _, _ in free.scheme.steps], along
    ).search(free)


class _Flat:
    """The tables of a problem, which are concatenated so that a whole assignment is looked up at
    once."""

    def __init__(self, problem: AssignmentProblem, weights: Sequence[Table]) -> None:
        self.costs, self.begins = _joined(problem.costs)
        self.weights, self.held = _joined(weights)
        self.pairs, self.corners = _joined([table for _, _, table in problem.pairs])
        self.left = np.array([i for i, _, _ in problem.pairs], dtype=np.int64)
        self.right = np.array([j for _, j, _ in problem.pairs], dtype=np.int64)
        self.width = np.array([table.shape[1] for _, _, table in problem.pairs], dtype=np.int64)

    def cost(self, choice: NDArray[np.int64]) -> Table:
        """Return c_i for each variable."""
        costs: Table = self.costs[self.begins + choice]
        return costs

    def weight(self, choice: NDArray[np.int64]) -> Table:
        """Return the entry of m for each variable."""
        weights: Table = self.weights[self.held + choice]
        return weights

    def pair(self, left: NDArray[np.int64], right: NDArray[np.int64]) -> Table:
        """Return m_ij for each pair, for choices of its two ends."""
        pair_costs: Table = self.pairs[self.corners + left * self.width + right]
        return pair_costs


def _joined(tables: Sequence[Table]) -> tuple[Table, NDArray[np.int64]]:
    """Return the tables end to end, one that occurs often only once, and where each begins."""
    begins: dict[int, int] = {}
    kept, length = [np.zeros(0)], 0
    for table in tables:
        if id(table) not in begins:
            begins[id(table)] = length
            kept.append(table.ravel())
            length += table.size
    return np.concatenate(kept), np.array([begins[id(table)] for table in tables], dtype=np.int64)


class _Capped:
    def __init__(
        self,
        problem: AssignmentProblem,
        weights: Sequence[Table],
        order: Sequence[int],
        places: NDArray[np.int64],
    ) -> None:
        self.problem, self.weights, self.order = problem, weights, order
        marks = [
            (id(cost), id(weight)) for cost, weight in zip(problem.costs, weights, strict=True)
        ]
        self.scheme, self.flat = Scheme(problem, order, marks), _Flat(problem, weights)
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
            raise InfeasibleError(
                f"no program fits in memory: at least {least:.0%} of it would be needed"
            )
        return Found(
            choice=self.best, value=self.value, bound=min(self.bound, self.value), pops=done
        )

    def _priced(self, multiplier: float) -> list[Table]:
        """Return the costs of c + y m; tables that were one array stay one."""
        known: dict[tuple[int, int], Table] = {}
        costs = []
        for cost, weight in zip(self.problem.costs, self.weights, strict=True):
            key = (id(cost), id(weight))
            if key not in known:
                known[key] = cost + multiplier * weight
            costs.append(known[key])
        return costs

    def _weight(self, choice: Sequence[int]) -> float:
        return float(self.flat.weight(np.array(choice)).sum())

    def _offer(self, choice: Sequence[int]) -> None:
        if self._weight(choice) <= 1:
            flat, chosen = self.flat, np.array(choice)
            value = float(
                flat.cost(chosen).sum() + flat.pair(chosen[flat.left], chosen[flat.right]).sum()
            )
            if value < self.value:
                self.best, self.value = tuple(choice), value

    def _bisect(self, free: Elimination) -> tuple[Elimination, float]:
        """Return the elimination and the multiplier of the best bound found by (2)."""
        low, high = 0.0, max(free.value, 1e-9)
        over: tuple[int, ...] = free.choice
        kept, multiplier = free, 0.0
        for round_ in range(BISECTIONS):
            trial = high if self.best is None else (low + high) / 2
            solved = self.scheme.solve(self._priced(trial))
            if solved.value - trial > self.bound or round_ == 0:
                self.bound, kept, multiplier = max(self.bound, solved.value - trial), solved, trial
            if self._weight(solved.choice) <= 1:
                high, under = trial, solved.choice
                self._offer(under)
                self._cross(over, under)
            else:
                over = solved.choice
                low = trial
                high = 4 * high if self.best is None else high
            if self.value <= self.bound * (1 + self.close) or (
                self.best is not None and high - low < 1e-4 * high
            ):
                break
        return kept, multiplier

    def _cross(self, over: Sequence[int], under: Sequence[int]) -> None:
        """Offer the cheapest assignment that fits among those that follow one up to a place and the
        other from there on."""
        for first, second in ((over, under), (under, over)):
            cost, weight = self._crossed(first, second)
            fitting = np.where(weight <= 1, cost, np.inf)
            place = int(np.argmin(fitting))
            if fitting[place] < self.value:
                self._offer(
                    [
                        x if at < place else y
                        for x, y, at in zip(first, second, self.places, strict=True)
                    ]
                )

    def _crossed(self, first: Sequence[int], second: Sequence[int]) -> tuple[Table, Table]:
        """Return cost and weight for every place: variables before it as in the first, from it on
        as in the second."""
        size = int(self.places.max()) + 3
        flat, chosen, alternative = self.flat, np.array(first), np.array(second)
        at = self.places + 1
        cost = _steps(size, (0, at, flat.cost(alternative)), (at, size - 1, flat.cost(chosen)))
        weight = _steps(
            size, (0, at, flat.weight(alternative)), (at, size - 1, flat.weight(chosen))
        )
        left, right = at[flat.left], at[flat.right]
        early, late = np.minimum(left, right), np.maximum(left, right)
        x = np.where(left < right, chosen[flat.left], alternative[flat.left])
        y = np.where(right < left, chosen[flat.right], alternative[flat.right])
        spans = (
            (0, early, flat.pair(alternative[flat.left], alternative[flat.right])),
            (early, late, flat.pair(x, y)),
            (late, size - 1, flat.pair(chosen[flat.left], chosen[flat.right])),
        )
        cost += _steps(
            size, *((a, b, np.where(np.isfinite(amount), amount, 0.0)) for a, b, amount in spans)
        )
        barred = _steps(
            size, *((a, b, np.where(np.isfinite(amount), 0.0, 1.0)) for a, b, amount in spans)
        )
        return np.where(barred > 0.5, np.inf, cost), weight

    def _best_first(self, solved: Elimination, multiplier: float, pops: int) -> int:
        """Run A* in the reverse of the elimination order, on c + y m; return the number of partial
        assignments examined."""
        walk = _Walk(self._priced(multiplier), self.problem.pairs, solved)
        least = np.concatenate(
            [[0.0], np.cumsum([self.weights[s.variable].min() for s in solved.steps])]
        )
        heap: list[tuple[float, int, int, float, Chain]] = [
            (solved.value - multiplier, 0, 0, 0.0, ())
        ]
        done, ticket = 0, 0
        while heap and done < pops:
            estimate, depth, _, weight, chain = heapq.heappop(heap)
            if estimate >= self.value * (1 - TOLERANCE):
                self.bound = max(self.bound, min(estimate, self.value))
                return done
            done += 1
            step = len(solved.steps) + depth - 1  # depth is negative: deeper first among equals
            if step < 0:
                self._offer(walk.values(chain, -depth))
                continue
            choices = walk.extensions(step, chain, -depth)
            for x, extra in enumerate(choices):
                held = weight + float(self.weights[solved.steps[step].variable][x])
                if (
                    np.isfinite(extra)
                    and held + least[step] <= 1 + 1e-12
                    and estimate + extra < self.value
                ):
                    ticket += 1
                    heapq.heappush(heap, (estimate + extra, depth - 1, ticket, held, (x, chain)))
        if heap:
            self.bound = max(self.bound, min(heap[0][0], self.value))
        elif self.best is not None:
            self.bound = self.value
        return done


def _steps(
    size: int, *spans: tuple[NDArray[np.int64] | int, NDArray[np.int64] | int, Table]
) -> Table:
    """Return the sum, at every place, of the amounts whose span (begin, end) covers it."""
    change = np.zeros(size)
    for begin, end, amount in spans:
        change += np.bincount(np.broadcast_to(begin, amount.shape), amount, size)
        change -= np.bincount(np.broadcast_to(end, amount.shape), amount, size)
    return np.cumsum(change)[:-1]


class _Walk:
    """A walk over partial assignments that estimates them from the tables of a solved
    elimination."""

    def __init__(
        self, costs: Sequence[Table], pairs: Sequence[tuple[int, int, Table]], solved: Elimination
    ) -> None:
        self.solved = solved
        place = {step.variable: position for position, step in enumerate(solved.steps)}
        self.factors: list[list[tuple[tuple[int, ...], Table]]] = [
            [((step.variable,), costs[step.variable])] for step in solved.steps
        ]
        for i, j, table in pairs:
            self.factors[min(place[i], place[j])].append(((i, j), table))
        for step in solved.steps:
            if step.scope:
                target = min(step.scope, key=place.__getitem__)
                self.factors[place[target]].append((step.scope, step.table))
        self._chosen = [0] * len(solved.steps)
        self._at: Chain = ()

    def values(self, chain: Chain, depth: int) -> list[int]:
        """Return for each variable the choice among the first ``depth`` choices; successive calls
        usually differ little."""
        at, rest = len(self._chosen) - depth, chain
        while rest and rest is not self._at:
            self._chosen[self.solved.steps[at].variable] = rest[0]
            at, rest = at + 1, rest[1]
        self._at = chain
        return self._chosen

    def extensions(self, step: int, chain: Chain, depth: int) -> Table:
        """Return for each choice of the next variable how much the estimate grows."""
        chosen = self.values(chain, depth)
        here = self.solved.steps[step]
        total = np.zeros(len(self.factors[step][0][1]))
        for names, table in self.factors[step]:
            index = tuple(
                [slice(None) if name == here.variable else chosen[name] for name in names]
            )
            total = total + table[index]
        return total - here.table.item(*[chosen[name] for name in here.scope])
