"""Find segments of a training step that have ratios of their own.

Operations differ in what limits them: a convolution is limited by the speed of a device, a wide
linear layer by the largest shard that a collective carries. One ratio vector serves the mixture. If
parts of the forward (and the backward that mirrors them) prefer different ratios by more than
re-sharding between them costs, they get them:

    (1)  candidates   boundaries of the forward that few bytes cross
    (2)  estimate     the ratio programme with the operations of each side in a segment of their
                      own, everything else as it is, and every sharded tensor that crosses
                      re-sharded
    (3)  the most promising are searched, program and ratios in turns, and the best is kept if it
         gains
    (4)  from there again, up to the requested number of segments

The result is never slower than the program with one ratio vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from argosy.cost.group import CollectiveMethod, GroupCollective
from argosy.errors import InfeasibleError
from argosy.solve.programs.placement import Pricing, ProgramPlacement
from argosy.solve.programs.ratios import best_ratios, segment_ratios
from argosy.solve.programs.spmd import Program, ProgramCollective, find_program, program_at
from argosy.space.operations.delivery import Conversion
from argosy.space.operations.rules import StateChoices
from argosy.space.operations.sharding import Segments, State, by
from argosy.workload.graph import Graph
from argosy.workload.part import forward_order, part_of_nodes, run_after_run

MOST_SEGMENTS = 3
"""Default maximum number of segments."""
CANDIDATES, SEARCHED, ROUNDS = 12, 2, 4
"""Boundaries that are estimated, those that are searched, and rounds of program and ratios."""
LEAST_GAIN = 1e-3
"""A boundary is not searched if it is estimated to gain less than this share of a step's time."""


def find_segmented(
    graph: Graph,
    pricing: Pricing,
    *,
    most: int = MOST_SEGMENTS,
    capped: bool = True,
    program: Program | None = None,
) -> Program:
    """Return the best program with at most ``most`` segments; ``program`` is the best with one, if
    it is known."""
    best = program if program is not None else find_program(graph, pricing, capped=capped)
    if len(pricing.group) == 1:
        return best
    choices = StateChoices(graph, len(pricing.group))
    ends: tuple[int, ...] = ()
    while len(ends) + 1 < most:
        better = _one_more(best, choices, pricing, ends, capped=capped)
        if better is None:
            break
        best, ends = better
    return best


def _one_more(
    best: Program, choices: StateChoices, pricing: Pricing, ends: tuple[int, ...], *, capped: bool
) -> tuple[Program, tuple[int, ...]] | None:
    """Return a better program with one more boundary, by (1) to (3), or None."""
    now = segment_ratios(best, ProgramPlacement(best.graph, choices, pricing, best.segments))[1]
    trials = []
    for end in boundaries(best.graph):
        if end not in ends:
            cuts = tuple(sorted((*ends, end)))
            guess = _divided(best, segments_at(best.graph, cuts, best.segments.ratios[-1]))
            placement = ProgramPlacement(best.graph, choices, pricing, guess.segments)
            segments, seconds = segment_ratios(guess, placement)
            if seconds < now - LEAST_GAIN * best.seconds:
                trials.append((seconds, cuts, segments))
    winner = best
    where = ends
    for _, cuts, segments in sorted(trials)[:SEARCHED]:
        program = _alternated(best.graph, choices, pricing, segments, capped=capped)
        if program is not None and program.seconds < winner.seconds * (1 - 1e-6):
            winner, where = program, cuts
    return (winner, where) if winner is not best else None


def _alternated(
    graph: Graph, choices: StateChoices, pricing: Pricing, segments: Segments, *, capped: bool
) -> Program | None:
    """Return the best program, with program and ratios chosen in turns from given ratios on."""
    best: Program | None = None
    for _ in range(ROUNDS):
        try:
            trial = program_at(graph, choices, pricing, segments, capped=capped)
        except InfeasibleError:
            break
        if best is not None and trial.seconds >= best.seconds * (1 - 1e-6):
            break
        best, segments = trial, best_ratios(trial, choices, pricing)
    return best


def boundaries(graph: Graph) -> tuple[int, ...]:
    """Return numbers of forward nodes before which to cut, in the order of the forward (1)."""
    nodes = forward_order(graph)
    place = {node: index for index, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for value, maker in graph.producer.items():
        readers = [place[reader] for reader in graph.consumers[value] if reader in place]
        if maker in place and readers:
            change[place[maker] + 1] += graph.values[value].num_bytes
            change[max(readers) + 1] -= graph.values[value].num_bytes
    crossing, total = [], 0
    for amount in change[:-1]:
        total += amount
        crossing.append(total)
    ends: list[int] = []
    width = max(len(nodes) // CANDIDATES, 1)
    for begin in range(1, len(nodes), width):
        run = range(begin, min(begin + width, len(nodes)))
        ends.append(min(run, key=lambda end: (crossing[end], end)))
    return tuple(ends)


def segments_at(graph: Graph, ends: Sequence[int], ratios: tuple[float, ...]) -> Segments:
    """Return segments of the forward cut at the given places, all with the same ratios."""
    count = len(forward_order(graph))
    lengths = [end - begin for begin, end in zip((0, *ends), (*ends, count), strict=True)]
    return Segments((ratios,) * len(lengths), part_of_nodes(graph, run_after_run(lengths)))


def _divided(program: Program, segments: Segments) -> Program:
    """Return the program with every operation in its segment, and everything that crosses
    re-sharded (2)."""
    graph = program.graph
    rows = tuple(row.by(segments.at(index)) for index, row in enumerate(program.rows))
    moves = []
    for move in program.moves:
        home = _home(graph, segments, move.value)
        step = Conversion(move.step.kind, by(move.step.before, home), by(move.step.after, home))
        moves.append(replace(move, step=step))
    deliveries = []
    for value, delivery in enumerate(program.deliveries):
        home = _home(graph, segments, value)
        states = tuple(by(state, home) for state in delivery.states)
        stored = by(delivery.stored, home) if delivery.stored is not None else None
        deliveries.append(replace(delivery, states=states, stored=stored))
        moves += list(_crossing(graph, segments, value, states, home))
    return replace(
        program, segments=segments, rows=rows, moves=tuple(moves), deliveries=tuple(deliveries)
    )


def _home(graph: Graph, segments: Segments, value: int) -> int:
    maker = graph.producer.get(value, min(graph.consumers[value], default=0))
    return segments.at(maker)


def _crossing(
    graph: Graph, segments: Segments, value: int, states: Sequence[State], home: int
) -> Iterator[ProgramCollective]:
    if not all(state.is_sharded for state in states):
        return
    for segment in sorted({segments.at(reader) for reader in graph.consumers[value]} - {home}):
        step = Conversion(GroupCollective.RESHARD, states[0], by(states[0], segment))
        yield ProgramCollective(value=value, step=step, way=CollectiveMethod.GROUPED, seconds=0.0)
