"""Why a plan takes as long as it does, and what would make it faster: questions put to the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel, Portion, stage_seconds
from argosy.explain.leftout import LeftOutQuestions, LeftOutTest
from argosy.explain.load import EdgeLoad, StageLoad, bottleneck, edge_loads, stage_loads
from argosy.explain.memory import DeviceMemory, memory_stack, planned_memory
from argosy.explain.whatif import Question, WhatIf, first_iteration
from argosy.plan.plan import Plan, Predicted, Stage
from argosy.timeline import Timeline
from argosy.workload.chain import Chain

_MOST_REPLAYED = 4096
"""Devices times micro-batches that are simulated in less than a second."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What the simulator says about a plan."""

    plan: Plan
    timeline: Timeline
    """Its first iteration."""
    memory: tuple[DeviceMemory, ...]
    loads: tuple[StageLoad, ...]
    edges: tuple[EdgeLoad, ...]
    """Those that carried anything, the busiest first."""
    improvements: tuple[WhatIf, ...]
    """Faster edges and devices."""
    settings: tuple[WhatIf, ...]
    """Cheaper settings that need more memory, the one that lacks least first."""
    additions: tuple[WhatIf, ...]
    """Left-out devices put to use."""
    left_out: tuple[LeftOutTest, ...] = ()
    """Why devices were left out, one of each kind put to the test."""

    @property
    def seconds(self) -> float:
        return self.timeline.iteration_ends[0]

    @property
    def bottleneck(self) -> StageLoad:
        return bottleneck(self.loads)


def explain_plan(plan: Plan, chain: Chain, cluster: Cluster, *, model: ComputeModel | None = None) -> Explanation:
    """Simulate a plan that ``check_plan`` passes as it is, and again with each change."""
    question = Question(plan, chain, cluster, model or ComputeModel())
    loads, edges = stage_loads(plan, question.timeline), edge_loads(cluster, question.timeline)
    slowest = bottleneck(loads).stage
    busiest = max(loads, key=lambda load: load.busy).stage
    return Explanation(
        plan=plan,
        timeline=question.timeline,
        memory=memory_stack(plan, chain, cluster, question.timeline),
        loads=loads,
        edges=edges,
        improvements=(*question.faster_stages({slowest, busiest}), *question.wider_edges(edges)),
        settings=tuple(sorted(question.settings(slowest), key=lambda one: (one.missing, -one.gain))),
        additions=tuple(question.additions(slowest)),
        left_out=tuple(LeftOutQuestions(plan, chain, cluster, question.model).answers()) if plan.left_out else (),
    )


def with_prediction(plan: Plan, chain: Chain, cluster: Cluster, *, model: ComputeModel | None = None) -> Plan:
    """The plan with time, memory and bottleneck filled in, and the gap that follows from the time.

    By the simulator, where that takes a moment; a larger plan keeps the time that its planner predicts, and the rest is
    in closed form.
    """
    costs = model or ComputeModel()
    if plan.predicted is not None and len(plan.devices) * plan.num_micro_batches > _MOST_REPLAYED:
        memory = planned_memory(plan, chain)
        seconds, slowest = plan.predicted.iteration_seconds, _slowest_stage(plan, chain, cluster, costs)
    else:
        timeline = first_iteration(plan, chain, cluster, costs)
        memory, seconds = timeline.peak_memory(), timeline.iteration_ends[0]
        slowest = bottleneck(stage_loads(plan, timeline)).stage
    predicted = Predicted(
        iteration_seconds=seconds,
        samples_per_second=plan.global_batch / seconds,
        peak_memory_bytes=tuple(memory.items()),
        bottleneck=f"stage {slowest}",
    )
    certificate = plan.certificate
    if certificate is not None:
        bound = min(certificate.lower_bound_seconds, seconds)
        certificate = replace(certificate, lower_bound_seconds=bound, gap=seconds / bound - 1)
    return replace(plan, predicted=predicted, certificate=certificate)


def _slowest_stage(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> int:
    """The stage that computes longest for a micro-batch, by one device of each kind."""

    def seconds(stage: Stage) -> float:
        portions = {
            Portion(device=replace(cluster.device(name), name=""), samples=r.samples, share=share, width=r.width)
            for r in stage.replicas
            for name, share in zip(r.devices, r.shares, strict=True)
        }
        return max(sum(stage_seconds(model, chain, stage, portion)) for portion in portions)

    times = [seconds(stage) for stage in plan.stages]
    return times.index(max(times))
