"""Compute how busy stages and edges were in an iteration of T seconds, and which stage limits it.

(1)  load of a stage = time that its busiest device computes, or else takes part in collectives,
     over T
(2)  bottleneck      = the stage whose computation and collectives make up most of the critical path
(3)  load of an edge = bytes over its capacity in T, on its busiest link
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from argosy.cluster.host import with_host_links
from argosy.cluster.topology import Cluster
from argosy.plan.plan import Plan
from argosy.timeline import SpanKind, Timeline


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """The load of a stage, given as shares of the iteration (1), (2)."""

    stage: int
    computing: float
    exchanging: float
    critical: float
    """The share of the iteration that the stage takes on the critical path."""

    @property
    def busy(self) -> float:
        """Return the share of the iteration in which the stage computes or takes part in
        collectives."""
        return self.computing + self.exchanging


@dataclass(frozen=True, kw_only=True)
class EdgeLoad:
    """The share of an edge's capacity that is used (3)."""

    edge: str
    utilisation: float


def stage_loads(plan: Plan, timeline: Timeline) -> tuple[StageLoad, ...]:
    """Return the load of every stage in order (1), (2)."""
    computing: dict[str, list[tuple[float, float]]] = defaultdict(list)
    exchanging: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind is SpanKind.COLLECTIVE:
            for name in span.where.split(">"):
                exchanging[name].append((span.start, span.end))
        elif not span.kind.is_communication:
            computing[span.where].append((span.start, span.end))
    total, critical = timeline.iteration_ends[0], timeline.critical_seconds()
    loads = []
    for index, stage in enumerate(plan.stages):
        shares = [
            (
                _covered([*computing[name], *exchanging[name]]) / total,
                _covered(computing[name]) / total,
            )
            for name in stage.devices
        ]
        busy, computed = max(shares)
        on_path = critical.get(index, 0.0) / total
        loads.append(
            StageLoad(stage=index, computing=computed, exchanging=busy - computed, critical=on_path)
        )
    return tuple(loads)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that at least one of the intervals covers."""
    covered = reach = 0.0
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return covered


def bottleneck(loads: Iterable[StageLoad]) -> StageLoad:
    """Return the load of the bottleneck (2); the earlier stage on a tie."""
    return max(loads, key=lambda load: load.critical)


def edge_loads(cluster: Cluster, timeline: Timeline) -> tuple[EdgeLoad, ...]:
    """Return the load of every edge that carried bytes, the busiest first (3)."""
    edge_of = {link.name: link.edge for link in with_host_links(cluster).links}
    most: dict[str, float] = {}
    for use in timeline.links:
        most[edge_of[use.link]] = max(most.get(edge_of[use.link], 0.0), use.utilisation)
    loads = [EdgeLoad(edge=edge, utilisation=share) for edge, share in most.items()]
    return tuple(sorted(loads, key=lambda load: (-load.utilisation, load.edge)))
