"""What a plan is predicted to do: the first iteration in the exact engine, its time, bottleneck and
memory.

(1)  A plan is played whole or folded (``sim.simulate``).
(2)  The bottleneck is the stage whose computation and collectives make up most of the critical
     path.
(3)  Memory is the peak of each device if the plan was played whole, else its closed form
     (``cost.planned``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.planned import planned_memory
from argosy.plan.plan import Plan, Predicted
from argosy.sim.simulate import first_end, play
from argosy.timeline import Timeline
from argosy.workload.chain import Chain


@dataclass(frozen=True, kw_only=True)
class Played:
    """The first iteration of a plan."""

    seconds: float
    """Infinite if it never ends."""
    bottleneck: int = 0
    """(2)."""
    memory: tuple[tuple[str, float], ...] = ()
    """Peak bytes by device; empty if the plan was folded."""
    stalled: str = ""
    """Why the iteration never ends."""


def play_once(
    plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel | None = None, *, whole: bool
) -> Played:
    """Play the first iteration of a plan that ``check_plan`` passes (1)."""
    return played_of(plan, play(plan, chain, cluster, model, whole=whole))


def played_of(plan: Plan, timeline: Timeline) -> Played:
    """Return what a timeline says of the first iteration of its plan."""
    seconds = first_end(timeline)
    if math.isinf(seconds):
        return Played(seconds=seconds, stalled=timeline.stalled or "")
    is_whole = set(timeline.devices) <= set(plan.devices)
    memory = tuple(timeline.peak_memory().items()) if is_whole else ()
    return Played(seconds=seconds, bottleneck=critical_stage(timeline), memory=memory)


def critical_stage(timeline: Timeline) -> int:
    """Return (2); the earliest stage on a tie."""
    seconds = timeline.critical_seconds()
    return max(sorted(seconds), key=lambda stage: seconds[stage], default=0)


def prediction(plan: Plan, played: Played, chain: Chain) -> Predicted:
    """Return what ``played``, an iteration that ends, says of a plan."""
    memory = played.memory or tuple(planned_memory(plan, chain).items())
    return Predicted(
        iteration_seconds=played.seconds,
        samples_per_second=plan.global_batch / played.seconds,
        peak_memory_bytes=memory,
        bottleneck=f"stage {played.bottleneck}",
    )
