"""Find the cheapest distributed program of a captured step: which device holds what, and which
collectives run between.

    (1)  program for given ratios    A* over rows and deliveries (``placement``, ``capped``), exact
                                     for its costs
    (2)  ratios for a given program  a linear programme (``ratios``)
    (3)  (1) and (2) alternate until a round gains nothing; the first round starts from even ratios
         and from ratios by speed, whichever is better

The program found costs no more than the one it started from, and its certificate is for the ratios
that it ends with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from argosy.cost.group import CollectiveMethod, DeviceGroup
from argosy.errors import InfeasibleError
from argosy.solve.programs.capped import Found, cheapest
from argosy.solve.programs.elimination import AssignmentProblem, Table, TangledError
from argosy.solve.programs.placement import Pricing, ProgramPlacement
from argosy.solve.programs.ratios import best_ratios
from argosy.solve.programs.tangled import cheapest_tangled, near, usual_choices
from argosy.space.operations.delivery import Conversion, Delivery, conversions
from argosy.space.operations.rules import CutKind, ShardingRule, StateChoices
from argosy.space.operations.sharding import REPLICATED, Segments
from argosy.units import counted
from argosy.workload.graph import Graph, Phase, Role

MOST_ROUNDS = 6
"""The program (1) and the ratios (2) are improved in turn at most this often."""


@dataclass(frozen=True, kw_only=True)
class ProgramCollective:
    """A collective that a program runs."""

    value: int
    step: Conversion
    way: CollectiveMethod
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Program:
    """A distributed program that defines how every operation is done and where every value is."""

    graph: Graph
    group: DeviceGroup
    segments: Segments
    rows: tuple[ShardingRule, ...]
    deliveries: tuple[Delivery, ...]
    moves: tuple[ProgramCollective, ...]
    row_seconds: tuple[float, ...]
    """For each operation, the longest compute of any device."""
    device_bytes: tuple[float, ...]
    """Bytes of model, gradients, optimizer state and kept activations on each device."""
    bound: float
    """A lower bound on the seconds of any program at these ratios."""
    unknown: tuple[str, ...] = ()
    """Operations without a rule, done in full by every device."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Return the ratios of the first segment, which are those of all if there is one."""
        return self.segments.ratios[0]

    @property
    def compute_seconds(self) -> float:
        return sum(self.row_seconds)

    @property
    def transfer_seconds(self) -> float:
        return sum(move.seconds for move in self.moves)

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of one step, without the optimizer."""
        return self.compute_seconds + self.transfer_seconds

    def phase(self, move: ProgramCollective) -> Phase:
        """Return when a collective runs: when its tensor is made or, if it comes from outside, when
        it is first read."""
        near = self.graph.producer.get(move.value, min(self.graph.consumers[move.value], default=0))
        return self.graph.nodes[near].phase

    def __repr__(self) -> str:
        shares = ", then ".join(
            " / ".join(f"{ratio:.3g}" for ratio in ratios) for ratios in self.segments.ratios
        )
        summary = f"{self.graph.name} on {counted(len(self.group), 'device')} at {shares}"
        return f"{summary}: {self.seconds:.6g} s, {len(self.moves)} collectives"


def find_program(
    graph: Graph,
    pricing: Pricing,
    *,
    ratios: Sequence[float] | Segments | None = None,
    kind: CutKind = CutKind.ANY,
    capped: bool = True,
    rounds: int = MOST_ROUNDS,
) -> Program:
    """Return the program found by (3); with ``ratios`` given, by (1) alone. ``kind`` restricts the
    search to what simpler systems do."""
    choices = StateChoices(graph, len(pricing.group), kind=kind)
    if ratios is not None:
        return program_at(graph, choices, pricing, ratios, capped=capped)
    starts = dict.fromkeys((pricing.group.by_speed, pricing.group.even))
    attempts = [_attempt(graph, choices, pricing, start, capped=capped) for start in starts]
    feasible = [program for program in attempts if isinstance(program, Program)]
    if not feasible:
        raise next(error for error in attempts if isinstance(error, InfeasibleError))
    best = min(feasible, key=lambda program: program.seconds)
    for _ in range(rounds):
        trial = _attempt(
            graph, choices, pricing, best_ratios(best, choices, pricing), capped=capped
        )
        if not isinstance(trial, Program) or trial.seconds >= best.seconds * (1 - 1e-6):
            break
        best = trial
    return best


def _attempt(
    graph: Graph,
    choices: StateChoices,
    pricing: Pricing,
    ratios: Sequence[float] | Segments,
    *,
    capped: bool,
) -> Program | InfeasibleError:
    try:
        return program_at(graph, choices, pricing, ratios, capped=capped)
    except InfeasibleError as error:
        return error


def program_at(
    graph: Graph,
    choices: StateChoices,
    pricing: Pricing,
    ratios: Sequence[float] | Segments,
    *,
    capped: bool = True,
) -> Program:
    """Return the cheapest program for given ratios (1)."""
    placement = ProgramPlacement(graph, choices, pricing, ratios)
    return described(placement, assignment(placement, capped=capped))


def assignment(
    placement: ProgramPlacement, *, capped: bool = True, problem: AssignmentProblem | None = None
) -> Found:
    """Return the cheapest assignment of a placement, or of a problem like its own; exact unless the
    graph is too tangled."""
    problem = placement.problem if problem is None else problem
    weights = placement.memory if capped else None
    solution = _exact(placement, problem, weights)
    if solution is None:
        solution = cheapest_tangled(
            problem, weights, places=placement.places, holds=usual_choices(placement)
        )
    return solution


def _exact(
    placement: ProgramPlacement, problem: AssignmentProblem, weights: Sequence[Table] | None
) -> Found | None:
    """Return the exact solution, or None if the graph is too tangled, which is recorded in its
    choices."""
    if not placement.choices.tangled:
        try:
            return cheapest(problem, weights, places=placement.places)
        except TangledError:
            placement.choices.tangled = True
    return None


def described(placement: ProgramPlacement, found: Found) -> Program:
    """Return the program that an assignment describes."""
    graph, choices = placement.graph, placement.choices
    nodes, costs = len(graph.nodes), placement.problem.costs[: len(graph.nodes)]
    rows = tuple(
        options[x] for options, x in zip(placement.rows, found.choice[:nodes], strict=True)
    )
    taken = tuple(
        options[x] for options, x in zip(placement.deliveries, found.choice[nodes:], strict=True)
    )
    moves = []
    for value, delivery in enumerate(taken):
        steps = steps_of_value(graph, rows, value, delivery)
        assert steps is not None
        for step in steps:
            seconds, way = placement.transfer(value, step)
            moves.append(ProgramCollective(value=value, step=step, way=way, seconds=seconds))
    return Program(
        graph=graph,
        group=placement.pricing.group,
        segments=placement.segments,
        rows=rows,
        deliveries=taken,
        moves=tuple(moves),
        row_seconds=tuple([cost.item(x) for cost, x in zip(costs, found.choice, strict=False)]),
        device_bytes=placement.device_bytes(found.choice),
        bound=found.bound,
        unknown=choices.unknown,
    )


def steps_of_value(
    graph: Graph, rows: Sequence[ShardingRule], value: int, delivery: Delivery
) -> tuple[Conversion, ...] | None:
    """Return the conversions of a value under a program, or None if one collective is not
    enough."""
    if graph.values[value].role in (Role.PARAMETER, Role.RECEIVED):
        assert delivery.stored is not None
        made = delivery.stored
    elif value in graph.producer:
        node = graph.producer[value]
        made = rows[node].outputs[graph.nodes[node].outputs.index(value)]
    else:
        made = REPLICATED
    return conversions(made, delivery)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A delivery that a value could also have, and the seconds of the best program with it."""

    delivery: Delivery
    seconds: float


def alternatives(program: Program, pricing: Pricing, value: int) -> tuple[Alternative, ...]:
    """Explain why a value is placed as it is: return the cheapest program for every delivery of it,
    best first.

    In a graph that is too tangled, this is the cheapest program that holds the same variables as
    the search does at their choices in the given program.
    """
    placement = ProgramPlacement(
        program.graph, StateChoices(program.graph, len(program.group)), pricing, program.segments
    )
    problem = placement.problem
    variable = len(program.graph.nodes) + value
    options = []
    for place, delivery in enumerate(placement.deliveries[value]):
        fixed = problem.costs[variable].copy()
        fixed[[x for x in range(len(fixed)) if x != place]] = float("inf")
        trial = replace(
            problem, costs=(*problem.costs[:variable], fixed, *problem.costs[variable + 1 :])
        )
        try:
            solved = _beside(program, placement, trial, variable)
        except InfeasibleError:
            continue
        options.append(Alternative(delivery=delivery, seconds=solved.value))
    return tuple(sorted(options, key=lambda option: option.seconds))


def _beside(
    program: Program, placement: ProgramPlacement, problem: AssignmentProblem, variable: int
) -> Found:
    """Return the best assignment of a changed problem, if it can be found; otherwise the best
    around the program's own."""
    solution = _exact(placement, problem, placement.memory)
    if solution is not None:
        return solution
    options, taken = (*placement.rows, *placement.deliveries), (*program.rows, *program.deliveries)
    choice = [ways.index(way) for ways, way in zip(options, taken, strict=True)]
    return near(problem, placement.memory, choice, places=placement.places, free=variable)
