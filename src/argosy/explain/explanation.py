"""Why a plan takes as long as it does, and what would make it faster: questions put to the
simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.offload import HostUse, host_uses
from argosy.cost.remembered import cost_model_ref, with_what_holds
from argosy.errors import InfeasibleError
from argosy.explain.leftout import LeftOutQuestions, LeftOutTest
from argosy.explain.load import EdgeLoad, StageLoad, bottleneck, edge_loads, stage_loads
from argosy.explain.memory import DeviceMemory, memory_stack
from argosy.explain.whatif import Question, WhatIf
from argosy.plan.check import check_plan
from argosy.plan.plan import Plan
from argosy.sim.prediction import played_of, prediction
from argosy.sim.simulate import play
from argosy.timeline import Timeline
from argosy.workload.chain import Chain


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
    hosts: tuple[HostUse, ...] = ()
    """What nodes hold that devices do not."""
    left_out: tuple[LeftOutTest, ...] = ()
    """Why devices were left out, one of each kind put to the test."""

    @property
    def seconds(self) -> float:
        return self.timeline.iteration_ends[0]

    @property
    def bottleneck(self) -> StageLoad:
        return bottleneck(self.loads)


def explain_plan(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    *,
    model: ComputeModel | None = None,
    timeline: Timeline | None = None,
) -> Explanation:
    """Play a plan that ``check_plan`` passes with each change, beside ``timeline``, in which it is
    played as it is."""
    question = Question(plan, chain, cluster, model or ComputeModel(), timeline)
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
        settings=tuple(
            sorted(question.settings(slowest), key=lambda one: (one.missing, -one.gain))
        ),
        additions=tuple(question.additions(slowest)),
        hosts=tuple(host_uses(plan, chain, cluster)),
        left_out=tuple(LeftOutQuestions(plan, chain, cluster, question.model).answers())
        if plan.left_out
        else (),
    )


def with_prediction(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    *,
    model: ComputeModel | None = None,
    timeline: Timeline | None = None,
) -> Plan:
    """Return the plan with time, memory and bottleneck predicted, and with the cost model that
    predicts them.

    The prediction is read from ``timeline``, or the plan is played. What was predicted and proven
    before stays only if cluster and cost model are the same.
    """
    costs = model or ComputeModel()
    check_plan(plan, chain, cluster)
    played = played_of(plan, timeline or play(plan, chain, cluster, costs))
    if math.isinf(played.seconds):
        raise InfeasibleError(
            f"{plan.model.name} on {cluster.name}: no iteration ends, because {played.stalled}"
        )
    plan = with_what_holds(plan, chain, cluster, costs)
    predicted = prediction(plan, played, chain)
    return replace(plan, predicted=predicted, cost_model=cost_model_ref(chain, cluster, costs))
