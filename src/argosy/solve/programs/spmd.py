"""The cheapest distributed program of a captured step: which device holds what, and which
collectives run between.

    (1)  program for given ratios    A* over rows and deliveries (``placement``, ``capped``), exact for its costs
    (2)  ratios for a given program  a linear programme (``ratios``)
    (3)  (1) and (2) alternate until a round gains nothing; the first round starts from even ratios
         and from ratios by speed, whichever is better

The program found costs no more than what it started from, and its certificate is for the ratios
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


@dataclass(frozen=True, kw_only=True)
class ProgramCollective:
    """One collective of a program."""

    value: int
    step: Conversion
    way: CollectiveMethod
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Program:
    """A distributed program: for every operation how it is done, for every value where it is."""

    graph: Graph
    group: DeviceGroup
    segments: Segments
    rows: tuple[ShardingRule, ...]
    deliveries: tuple[Delivery, ...]
    moves: tuple[ProgramCollective, ...]
    row_seconds: tuple[float, ...]
    """Per operation, the longest compute of any device."""
    device_bytes: tuple[float, ...]
    """Model, gradients, optimizer state and kept activations per device."""
    bound: float
    """Seconds below which no program at these ratios gets."""
    unknown: tuple[str, ...] = ()
    """Operations that no rule knows, done in full by every device."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of the first segment, and of all where there is one."""
        return self.segments.ratios[0]

    @property
    def compute_seconds(self) -> float:
        return sum(self.row_seconds)

    @property
    def transfer_seconds(self) -> float:
        return sum(move.seconds for move in self.moves)

    @property
    def seconds(self) -> float:
        """Predicted time of one step, the optimizer apart."""
        return self.compute_seconds + self.transfer_seconds

    def phase(self, move: ProgramCollective) -> Phase:
        """When a collective runs: as its tensor is made, or, where it comes from outside, first
        read."""
        near = self.graph.producer.get(move.value, min(self.graph.consumers[move.value], default=0))
        return self.graph.nodes[near].phase

    def __repr__(self) -> str:
        shares = ", then ".join(
            " / ".join(f"{ratio:.3g}" for ratio in ratios) for ratios in self.segments.ratios
        )
        what = f"{self.graph.name} on {counted(len(self.group), 'device')} at {shares}"
        return f"{what}: {self.seconds:.6g} s, {len(self.moves)} collectives"


def find_program(
    graph: Graph,
    pricing: Pricing,
    *,
    ratios: Sequence[float] | Segments | None = None,
    kind: CutKind = CutKind.ANY,
    capped: bool = True,
    rounds: int = MOST_ROUNDS,
) -> Program:
    """(3); with ``ratios`` given, (1) alone. ``kind`` restricts the search to what simpler systems
    do."""
    choices = StateChoices(graph, len(pricing.group), kind=kind)
    if ratios is not None:
        return program_at(graph, choices, pricing, ratios, capped=capped)
    starts = dict.fromkeys((pricing.group.by_speed, pricing.group.even))
    found = [_attempt(graph, choices, pricing, start, capped=capped) for start in starts]
    feasible = [program for program in found if isinstance(program, Program)]
    if not feasible:
        raise next(error for error in found if isinstance(error, InfeasibleError))
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
    """(1)."""
    placement = ProgramPlacement(graph, choices, pricing, ratios)
    return described(placement, assignment(placement, capped=capped))


def assignment(
    placement: ProgramPlacement, *, capped: bool = True, problem: AssignmentProblem | None = None
) -> Found:
    """The cheapest assignment of a placement, or of a problem like its own; exact unless it is too
    tangled."""
    problem = placement.problem if problem is None else problem
    weights = placement.memory if capped else None
    found = _exact(placement, problem, weights)
    if found is None:
        found = cheapest_tangled(
            problem, weights, places=placement.places, holds=usual_choices(placement)
        )
    return found


def _exact(
    placement: ProgramPlacement, problem: AssignmentProblem, weights: Sequence[Table] | None
) -> Found | None:
    """None if the graph is too tangled, which its choices then remember."""
    if not placement.choices.tangled:
        try:
            return cheapest(problem, weights, places=placement.places)
        except TangledError:
            placement.choices.tangled = True
    return None


def described(placement: ProgramPlacement, found: Found) -> Program:
    """The program that an assignment means."""
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
    """The conversions of a value under a program; None if no one collective delivers it so."""
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
    """Another place for a value, and what the best program with it costs."""

    delivery: Delivery
    seconds: float


def alternatives(program: Program, pricing: Pricing, value: int) -> tuple[Alternative, ...]:
    """Why a value is placed as it is: the cheapest program for every other delivery of it, best
    first.

    In a graph that is too tangled, the cheapest that keeps what such a search holds as it is in the
    given program.
    """
    placement = ProgramPlacement(
        program.graph, StateChoices(program.graph, len(program.group)), pricing, program.segments
    )
    problem = placement.problem
    variable = len(program.graph.nodes) + value
    found = []
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
        found.append(Alternative(delivery=delivery, seconds=solved.value))
    return tuple(sorted(found, key=lambda one: one.seconds))


def _beside(
    program: Program, placement: ProgramPlacement, problem: AssignmentProblem, variable: int
) -> Found:
    """The best assignment of a changed problem, where it can be found; else the best around the
    program's own."""
    found = _exact(placement, problem, placement.memory)
    if found is not None:
        return found
    options, taken = (*placement.rows, *placement.deliveries), (*program.rows, *program.deliveries)
    choice = [ways.index(one) for ways, one in zip(options, taken, strict=True)]
    return near(problem, placement.memory, choice, places=placement.places, free=variable)
