"""Programs for graphs that tie many layers to one another: some choices are held while all others
are solved exactly.

Where every layer reads one value and adds to its gradient (T5: the encoder's output, the position
bias), the tables of an elimination grow with the number of layers. Then:

    (1)  order    greedy as ever; where the next table would be too large, the variable that most hangs on is *held*
    (2)  round    held variables keep their choices; everything else is the optimum for them (``capped``)
    (3)  rounds   what was held before is held last, so that in turn everything is free; none loses, and the first that
                  gains nothing is the last
    (4)  bound    each table that names a held variable gives way to its least entry per choice of the other: a problem
                  in which it ties nothing, and which costs no more, whatever it chooses

The first round begins with held variables at choices that go with any other (whole), or often (cut
by samples). What comes out is no proven optimum; (4) says how far from one it may be, over all
programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from argosy.errors import InfeasibleError
from argosy.solve.programs.capped import Found, cheapest
from argosy.solve.programs.elimination import AssignmentProblem, Table, order_and_held
from argosy.solve.programs.placement import ProgramPlacement
from argosy.space.operations.delivery import Delivery
from argosy.space.operations.rules import ShardingRule
from argosy.space.operations.sharding import REPLICATED, State
from argosy.workload.graph import Role

MOST_ENTRIES = 1e6
"""Of a table; beyond, something is held."""
ROUNDS = 4
NO_GAIN = 1e-6
NEVER = 1 << 30


def cheapest_tangled(
    problem: AssignmentProblem,
    weights: Sequence[Table] | None = None,
    *,
    places: Sequence[int] | None = None,
    holds: Sequence[Sequence[int]],
) -> Found:
    """(1) to (4); ``holds``: ways to begin, each per variable the choice at which it is held."""
    times = [0] * len(problem.costs)
    order, held = _split(problem, times)
    free, lighter = _without(problem, weights, dict.fromkeys(held))
    bound = cheapest(free, lighter, places=places, order=order).bound
    best, why = None, None
    for choices in holds:
        try:
            found = _round(problem, weights, places, order, {i: choices[i] for i in held})
        except InfeasibleError as error:
            why = error
        else:
            best = found if best is None or found.value < best.value else best
    if best is None:
        assert why is not None
        raise why
    for _ in range(ROUNDS):
        for i in held:
            times[i] += 1
        order, held = _split(problem, times)
        found = _round(problem, weights, places, order, {i: best.choice[i] for i in held})
        if found.value >= best.value * (1 - NO_GAIN):
            break
        best = found
    return replace(best, bound=min(bound, best.value))


def usual_choices(placement: ProgramPlacement) -> tuple[tuple[int, ...], ...]:
    """Two choices per variable that go with most others: everything whole, and by samples what can
    be."""
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


def near(
    problem: AssignmentProblem,
    weights: Sequence[Table] | None,
    choice: Sequence[int],
    *,
    places: Sequence[int] | None = None,
    free: int,
) -> Found:
    """One round from a given assignment with one variable free; what is held is held as it is
    there."""
    times = [0] * len(problem.costs)
    times[free] = NEVER
    order, held = _split(problem, times)
    return _round(problem, weights, places, order, {i: choice[i] for i in held})


def _split(
    problem: AssignmentProblem, times: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(1) and (3): an order, what is held first, and what is held; ``times``: how often each
    was."""
    sizes = [len(cost) for cost in problem.costs]

    def chosen(around: Mapping[int, float]) -> int:
        return min(around, key=lambda i: (times[i], -around[i], i))

    order, held = order_and_held(
        sizes, [(i, j) for i, j, _ in problem.pairs], most=MOST_ENTRIES, chosen=chosen
    )
    return (*held, *order), held


def _round(
    problem: AssignmentProblem,
    weights: Sequence[Table] | None,
    places: Sequence[int] | None,
    order: Sequence[int],
    held: Mapping[int, int],
) -> Found:
    """(2)."""
    part, lighter = _without(problem, weights, held)
    found = cheapest(part, lighter, places=places, order=order)
    choice = list(found.choice)
    for i, x in held.items():
        choice[i] = x
    return replace(found, choice=tuple(choice))


def _without(
    problem: AssignmentProblem, weights: Sequence[Table] | None, held: Mapping[int, int | None]
) -> tuple[AssignmentProblem, Sequence[Table] | None]:
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
    lighter = weights
    if weights is not None:
        lighter = [np.array([_at(w, held[i])]) if i in held else w for i, w in enumerate(weights)]
    return AssignmentProblem(costs=tuple(costs), pairs=tuple(pairs)), lighter


def _at(table: Table, x: int | None) -> Table:
    """A table at a choice of its first variable, or at the least."""
    found: Table = table.min(0) if x is None else table[x]
    return found
