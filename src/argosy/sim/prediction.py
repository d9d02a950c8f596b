"""What a plan is predicted to do: the first iteration in the exact engine, its time, bottleneck and memory.

(1)  A plan is played whole, or folded along its symmetries, which is much cheaper for many devices (``sim.fold``).
(2)  The bottleneck is the stage whose computation and collectives make up most of the critical path.
(3)  Memory is the peak of each device if the plan is played whole, else its closed form (``cost.planned``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.planned import planned_memory
from argosy.plan.plan import Plan, Predicted
from argosy.sim.compile import compile_plan
from argosy.sim.exact import simulate_exact
from argosy.sim.fold import fold_plan
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


def play_once(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel | None = None, *, whole: bool) -> Played:
    """Play the first iteration of a plan that ``check_plan`` passes (1)."""
    if whole:
        graph = compile_plan(plan, chain, cluster, model)
    else:
        graph, cluster = fold_plan(plan, chain, cluster, model)
    timeline = simulate_exact(graph, cluster)
    if not timeline.iteration_ends:
        return Played(seconds=math.inf, stalled=timeline.stalled or "")
    memory = tuple(timeline.peak_memory().items()) if whole else ()
    return Played(seconds=timeline.iteration_ends[0], bottleneck=critical_stage(timeline), memory=memory)


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
