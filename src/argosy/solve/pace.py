"""One clock for programs and pipelines of programs where links and devices change: prices of time 0, at a pace.

A program is priced with the cluster as it is at time 0. What it does goes on at

    (1)  computing     c(t) = least over its devices of  speed at t / speed at 0
    (2)  collectives   n(t) = price of all of its collectives at 0 / their price on the ring as it is at t, 0 while a
                       link of it is down
    (3)  the program   operations and collectives one after the other, as they are priced, each until the integral of
                       its pace has reached its seconds

The stages of a pipeline are played with (2) for their collectives and their devices' own speeds (``staging.play``), so
where nothing changes both take what they are priced at, and a small change is a small difference to both. The rehearsal
(``rehearse``) says more of one program, because its collectives overlap with its computing; those of stages do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from argosy.cluster.lasting import last_change
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace, minimum
from argosy.cost.communicate import DOWN
from argosy.cost.group import Ring
from argosy.solve.placement import Placement, Pricing
from argosy.solve.spmd import Program
from argosy.space.rules import Choices

STEADY = Trace.constant(1.0)
MOST_CHANGES = 2_000
"""That are looked at; after them a pace stays as it is."""


def is_calm(cluster: Cluster) -> bool:
    """Whether nothing changes."""
    return last_change([cluster]) == 0


def computing_pace(names: Sequence[str], cluster: Cluster) -> Trace:
    """(1)."""
    speeds = [cluster.device(name).speed for name in names]
    return minimum(speed.scaled(1 / speed.at(0.0)) for speed in speeds)


def network_pace(program: Program, pricing: Pricing, cluster: Cluster) -> Trace:
    """(2)."""
    ring = Ring(cluster, program.group.names)
    now = program.transfer_seconds
    if not now or len(ring.changes) == 1:
        return STEADY
    placement = Placement(program.graph, Choices(program.graph, len(program.group)), pricing, program.segments)
    known: dict[object, float] = {}

    def pace(time: float) -> float:
        state = ring.at(time)
        if state.bandwidth <= DOWN:
            return 0.0
        if state not in known:
            group = replace(pricing.group, bandwidth=state.bandwidth, latency=state.latency, inside=state.inside)
            placement.pricing = replace(pricing, group=group)  # which shares do not depend on
            known[state] = now / sum(placement.transfer(move.value, move.step)[0] for move in program.moves)
        return known[state]

    return Trace.from_steps(((time, pace(time)) for time in ring.changes[1:MOST_CHANGES]), initial=1.0)


def hand_over_pace(ends: Sequence[tuple[str, str]], cluster: Cluster) -> Trace:
    """Of sums between stages, as far as the narrowest of the routes between them goes."""
    if not ends:
        return STEADY
    narrowest = minimum(cluster.bandwidth(cluster.fastest(*end, 1e6)) for end in ends)
    return narrowest.scaled(1 / max(DOWN, narrowest.at(0.0)))


def seconds_under_changes(program: Program, pricing: Pricing, cluster: Cluster) -> float:
    """(3); the price itself where nothing changes."""
    if is_calm(cluster):
        return program.seconds
    paces = computing_pace(program.group.names, cluster), network_pace(program, pricing, cluster)
    now = 0.0
    for is_move, seconds in _in_order(program):
        now = paces[is_move].advance(now, seconds)
    return now


def _in_order(program: Program) -> Iterator[tuple[bool, float]]:
    """Whether it is a collective, and its seconds: a collective follows what makes its value, or comes before what
    reads it first."""
    before: dict[int, float] = {}
    behind: dict[int, float] = {}
    for move in program.moves:
        made = program.graph.producer.get(move.value)
        if made is not None:
            behind[made] = behind.get(made, 0.0) + move.seconds
        else:
            first = min(program.graph.consumers[move.value], default=0)
            before[first] = before.get(first, 0.0) + move.seconds
    for index, seconds in enumerate(program.row_seconds):
        yield True, before.get(index, 0.0)
        yield False, seconds
        yield True, behind.get(index, 0.0)
