"""Predict the time, the bottleneck and the memory of a plan from its first simulated iteration.

(1)  A plan is simulated whole or folded (``sim.simulate``).
(2)  The bottleneck is the stage whose computation and collectives make up most of the critical
     path.
(3)  Memory is the simulated peak of each device if the plan was simulated whole, else its closed
     form (``cost.planned``).
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
    """The time, the bottleneck and the memory that a simulation of the first iteration gave."""

    seconds: float
    """The duration of the iteration in seconds; infinite if it never ends."""
    bottleneck: int = 0
    """The index of the stage that is the bottleneck (2)."""
    memory: tuple[tuple[str, float], ...] = ()
    """Peak bytes by device; empty if the plan was folded."""
    stalled: str = ""
    """The reason why the iteration never ends; empty if it ends."""


def play_once(
    plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel | None = None, *, whole: bool
) -> Played:
    """Simulate the first iteration of a plan that ``check_plan`` accepts (1)."""
    return played_of(plan, play(plan, chain, cluster, model, whole=whole))


def played_of(plan: Plan, timeline: Timeline) -> Played:
    """Summarise the first iteration of a plan from its timeline."""
    seconds = first_end(timeline)
    if math.isinf(seconds):
        return Played(seconds=seconds, stalled=timeline.stalled or "")
    is_whole = set(timeline.devices) <= set(plan.devices)
    memory = tuple(timeline.peak_memory().items()) if is_whole else ()
    return Played(seconds=seconds, bottleneck=critical_stage(timeline), memory=memory)


def critical_stage(timeline: Timeline) -> int:
    """Return the index of the bottleneck stage (2); the earliest stage on a tie."""
    seconds = timeline.critical_seconds()
    return max(sorted(seconds), key=lambda stage: seconds[stage], default=0)


def prediction(plan: Plan, played: Played, chain: Chain) -> Predicted:
    """Build the prediction of a plan from ``played``, a simulated iteration that ends."""
    memory = played.memory or tuple(planned_memory(plan, chain).items())
    return Predicted(
        iteration_seconds=played.seconds,
        samples_per_second=plan.global_batch / played.seconds,
        peak_memory_bytes=memory,
        bottleneck=f"stage {played.bottleneck}",
    )
