"""How busy stages and edges were in an iteration of T seconds, and what held the others up.

(1)  load of a stage = time that its busiest device computes, or else takes part in collectives,
     over T
(2)  bottleneck      = the stage whose computation and collectives make up most of the critical path
(3)  load of an edge = bytes over what could have been carried, on its busiest link
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
    """(1) and (2), as shares of the iteration."""

    stage: int
    computing: float
    exchanging: float
    critical: float
    """Of the critical path."""

    @property
    def busy(self) -> float:
        return self.computing + self.exchanging


@dataclass(frozen=True, kw_only=True)
class EdgeLoad:
    """(3)."""

    edge: str
    utilisation: float


def stage_loads(plan: Plan, timeline: Timeline) -> tuple[StageLoad, ...]:
    """(1) and (2) for every stage, in order."""
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
    """Seconds that at least one of the intervals covers."""
    covered = reach = 0.0
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return covered


def bottleneck(loads: Iterable[StageLoad]) -> StageLoad:
    """(2); the earlier stage on a tie."""
    return max(loads, key=lambda load: load.critical)


def edge_loads(cluster: Cluster, timeline: Timeline) -> tuple[EdgeLoad, ...]:
    """(3) for every edge that carried anything, the busiest first."""
    edge_of = {link.name: link.edge for link in with_host_links(cluster).links}
    most: dict[str, float] = {}
    for use in timeline.links:
        most[edge_of[use.link]] = max(most.get(edge_of[use.link], 0.0), use.utilisation)
    loads = [EdgeLoad(edge=edge, utilisation=share) for edge, share in most.items()]
    return tuple(sorted(loads, key=lambda load: (-load.utilisation, load.edge)))
