"""Find programs for graphs that connect many layers to one another: some choices are held while all
others are solved exactly.

If every layer reads one value and adds to its gradient (T5: the encoder's output, the position
bias), the tables of an elimination grow with the number of layers. Then:

    (1)  order    greedy as before; if the next table would be too large, the most connected
                  variable is *held*
    (2)  round    held variables keep their choices; everything else is the optimum for them
    (3)  rounds   variables that were held before are held last, so that in turn everything is free;
                  no round loses, and the first that gains nothing is the last
    (4)  bound    each table that names a held variable is replaced by its least entry per choice of
                  the other: a problem in which it connects nothing, and which costs no more for any
                  choice

The first round begins with held variables at choices that are compatible with any other (whole), or
often (cut by samples). The result is no proven optimum; (4) states how far from one it may be, over
all programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from argosy.errors import InfeasibleError
from argosy.solve.programs.elimination import (
    AssignmentProblem,
    Found,
    Table,
    cheapest,
    order_and_held,
)
from argosy.solve.programs.placement import ProgramPlacement
from argosy.space.operations.delivery import Delivery
from argosy.space.operations.rules import ShardingRule
from argosy.space.operations.sharding import REPLICATED, State
from argosy.workload.graph import Role

# A table has at most this many entries; otherwise a variable is held.
MOST_ENTRIES = 1e6
# Maximum number of rounds (3).
ROUNDS = 4
# A round that improves the best value by less than this share is the last one.
NO_GAIN = 1e-6


def cheapest_tangled(problem: AssignmentProblem, *, holds: Sequence[Sequence[int]]) -> Found:
    """Return the best assignment found by (1) to (4).

    ``holds`` lists ways to begin; each gives, for every variable, the choice at which it is held.
    """
    times = [0] * len(problem.costs)
    order, held = _split(problem, times)
    bound = cheapest(_without(problem, dict.fromkeys(held)), order=order).bound
    best, why = None, None
    for choices in holds:
        try:
            trial = _round(problem, order, {i: choices[i] for i in held})
        except InfeasibleError as error:
            why = error
        else:
            best = trial if best is None or trial.value < best.value else best
    if best is None:
        assert why is not None
        raise why
    for _ in range(ROUNDS):
        for i in held:
            times[i] += 1
        order, held = _split(problem, times)
        trial = _round(problem, order, {i: best.choice[i] for i in held})
        if trial.value >= best.value * (1 - NO_GAIN):
            break
        best = trial
    return replace(best, bound=min(bound, best.value))


def usual_choices(placement: ProgramPlacement) -> tuple[tuple[int, ...], ...]:
    """Return two choices for each variable that are compatible with most others: everything whole,
    and everything possible cut by samples."""
    graph = placement.graph
    shapes = [graph.values[value].shape for value in graph.with_role(Role.INPUT)]
    counts = {shape[0] for shape in shapes if shape}

    def by_samples(state: State) -> bool:
        return state.dim == 0 and state.outer == 1 and state.units in counts

    def choice(options: Sequence[ShardingRule | Delivery], *, cut: bool) -> int:
        whole = None
        for x, option in enumerate(options):
            states = (
                option.states if isinstance(option, Delivery) else (*option.inputs, *option.outputs)
            )
            if (
                cut
                and any(map(by_samples, states))
                and (isinstance(option, ShardingRule) or len(states) == 1)
            ):
                return x
            if whole is None and all(state is REPLICATED for state in states):
                whole = x
        return whole or 0

    variables: list[Sequence[ShardingRule | Delivery]] = [*placement.rows, *placement.deliveries]
    return tuple(
        tuple([choice(options, cut=cut) for options in variables]) for cut in (False, True)
    )


def _split(
    problem: AssignmentProblem, times: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return an order, held variables first, and the held variables, by (1) and (3); ``times``
    counts how often each was held."""
    sizes = [len(cost) for cost in problem.costs]

    def chosen(around: Mapping[int, float]) -> int:
        return min(around, key=lambda i: (times[i], -around[i], i))

    order, held = order_and_held(
        sizes, [(i, j) for i, j, _ in problem.pairs], most=MOST_ENTRIES, chosen=chosen
    )
    return (*held, *order), held


def _round(problem: AssignmentProblem, order: Sequence[int], held: Mapping[int, int]) -> Found:
    """Solve (2): the optimum while some variables keep their choices."""
    solution = cheapest(_without(problem, held), order=order)
    choice = list(solution.choice)
    for i, x in held.items():
        choice[i] = x
    return replace(solution, choice=tuple(choice))


def _without(problem: AssignmentProblem, held: Mapping[int, int | None]) -> AssignmentProblem:
    """The problem with held variables at their choices; at None, at whatever is least for each
    other one: (4)."""
    costs, known = list(problem.costs), dict[object, Table]()
    fixed = {i: _at(problem.costs[i], x) for i, x in held.items()}
    pairs = []
    for i, j, table in problem.pairs:
        if i not in held and j not in held:
            pairs.append((i, j, table))
        elif i in held and j in held:
            fixed[i] = fixed[i] + _at(_at(table, held[i]), held[j])
        else:
            gone, left, turned = (i, j, table) if i in held else (j, i, table.T)
            key = (id(costs[left]), id(table), gone == i, held[gone])
            if key not in known:
                known[key] = costs[left] + _at(turned, held[gone])
            costs[left] = known[key]
    for i, cost in fixed.items():
        costs[i] = np.array([cost])
    return AssignmentProblem(costs=tuple(costs), pairs=tuple(pairs))


def _at(table: Table, x: int | None) -> Table:
    """Return a table at a choice of its first variable, or its minimum over that variable."""
    return table.min(0) if x is None else table[x]
