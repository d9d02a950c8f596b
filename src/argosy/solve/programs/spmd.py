"""Find the cheapest distributed program of a captured step: which device holds what, and which
collectives run between.

    (1)  program for given ratios    elimination over rows and deliveries (``placement``), exact
                                     for its costs
    (2)  ratios for a given program  a linear programme (``ratios``)
    (3)  (1) and (2) alternate until a round gains nothing; the first round starts from even ratios
         and from ratios by speed, whichever is better

The program found costs no more than the one it started from, and its certificate is for the ratios
that it ends with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from argosy.cost.group import CollectiveMethod, DeviceGroup
from argosy.solve.programs.elimination import AssignmentProblem, Found, TangledError, cheapest
from argosy.solve.programs.placement import Pricing, ProgramPlacement
from argosy.solve.programs.ratios import best_ratios
from argosy.solve.programs.tangled import cheapest_tangled, usual_choices
from argosy.space.operations.delivery import Conversion, Delivery, conversions
from argosy.space.operations.rules import CutKind, ShardingRule, StateChoices
from argosy.space.operations.sharding import REPLICATED, State
from argosy.units import counted
from argosy.workload.graph import Graph, Role

# The program (1) and the ratios (2) are improved in turn at most this often.
MOST_ROUNDS = 6


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
    ratios: tuple[float, ...]
    rows: tuple[ShardingRule, ...]
    deliveries: tuple[Delivery, ...]
    moves: tuple[ProgramCollective, ...]
    row_seconds: tuple[float, ...]
    """Per operation, the longest compute of any device."""
    bound: float
    """A lower bound on the seconds of any program at these ratios."""
    unknown: tuple[str, ...] = ()
    """Operations without a rule, done in full by every device."""

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

    def __repr__(self) -> str:
        shares = " / ".join(f"{ratio:.3g}" for ratio in self.ratios)
        title = f"{self.graph.name} on {counted(len(self.group), 'device')} at {shares}"
        return f"{title}: {self.seconds:.6g} s, {len(self.moves)} collectives"


def find_program(
    graph: Graph,
    pricing: Pricing,
    *,
    ratios: Sequence[float] | None = None,
    kind: CutKind = CutKind.ANY,
) -> Program:
    """Search by (3); with ``ratios`` given, by (1) alone. ``kind`` restricts which cuts are looked
    at."""
    choices = StateChoices(graph, len(pricing.group), kind=kind)
    if ratios is not None:
        return program_at(graph, choices, pricing, ratios)
    starts = dict.fromkeys((pricing.group.by_speed, pricing.group.even))
    best = min(
        (program_at(graph, choices, pricing, start) for start in starts),
        key=lambda candidate: candidate.seconds,
    )
    for _ in range(MOST_ROUNDS):
        trial = program_at(graph, choices, pricing, best_ratios(best, choices, pricing))
        if trial.seconds >= best.seconds * (1 - 1e-6):
            break
        best = trial
    return best


def program_at(
    graph: Graph, choices: StateChoices, pricing: Pricing, ratios: Sequence[float]
) -> Program:
    """Search by (1)."""
    placement = ProgramPlacement(graph, choices, pricing, ratios)
    return described(placement, assignment(placement))


def tensor_program(
    graph: Graph,
    pricing: Pricing,
    ratios: Sequence[float],
    *,
    whole: Iterable[int] = (),
    stored: Mapping[int, State] | None = None,
) -> Program:
    """Return the cheapest program of tensor and sequence parallelism.

    Torch keeps a gathered weight until its backward. So only those weights are gathered that tensor
    parallelism gathers without sequence parallelism.
    """
    among = partial(StateChoices, graph, len(ratios), whole=frozenset(whole), stored=stored)
    plain = program_at(graph, among(kind=CutKind.TENSOR), pricing, ratios)
    choices = among(kind=CutKind.SEQUENCE)
    choices.gathered = frozenset(
        value for value, delivery in enumerate(plain.deliveries) if delivery.is_gathered
    )
    return program_at(graph, choices, pricing, ratios)


def assignment(placement: ProgramPlacement, problem: AssignmentProblem | None = None) -> Found:
    """Return the cheapest assignment of a placement, or of a problem of the same shape.

    It is exact unless the graph is too tangled.
    """
    problem = placement.problem if problem is None else problem
    if not placement.choices.tangled:
        try:
            return cheapest(problem)
        except TangledError:
            placement.choices.tangled = True
    return cheapest_tangled(problem, holds=usual_choices(placement))


def described(placement: ProgramPlacement, result: Found) -> Program:
    """Return the program that an assignment describes."""
    graph, choices = placement.graph, placement.choices
    nodes, costs = len(graph.nodes), placement.problem.costs[: len(graph.nodes)]
    rows = tuple(
        options[x] for options, x in zip(placement.rows, result.choice[:nodes], strict=True)
    )
    taken = tuple(
        options[x] for options, x in zip(placement.deliveries, result.choice[nodes:], strict=True)
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
        ratios=placement.ratios,
        rows=rows,
        deliveries=taken,
        moves=tuple(moves),
        row_seconds=tuple([cost.item(x) for cost, x in zip(costs, result.choice, strict=False)]),
        bound=result.bound,
        unknown=choices.unknown,
    )


def steps_of_value(
    graph: Graph, rows: Sequence[ShardingRule], value: int, delivery: Delivery
) -> tuple[Conversion, ...] | None:
    """Return the conversions of a value under a program; None if no single collective does."""
    if graph.values[value].role is Role.PARAMETER:
        assert delivery.stored is not None
        made = delivery.stored
    elif value in graph.producer:
        node = graph.producer[value]
        made = rows[node].outputs[graph.nodes[node].outputs.index(value)]
    else:
        made = REPLICATED
    return conversions(made, delivery)
