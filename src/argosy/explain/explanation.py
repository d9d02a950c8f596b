"""Explain by simulation why a plan takes as long as it does, and what would make it faster."""

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
    """The results of simulating a plan with and without changes."""

    plan: Plan
    timeline: Timeline
    """The timeline of its first iteration."""
    memory: tuple[DeviceMemory, ...]
    loads: tuple[StageLoad, ...]
    edges: tuple[EdgeLoad, ...]
    """The edges that carried bytes, the busiest first."""
    improvements: tuple[WhatIf, ...]
    """Faster edges and devices."""
    settings: tuple[WhatIf, ...]
    """Faster settings that need more memory, the one that lacks least first."""
    additions: tuple[WhatIf, ...]
    """Unused devices that are added to the plan."""
    hosts: tuple[HostUse, ...] = ()
    """The memory of nodes that offloaded state and activations use."""
    left_out: tuple[LeftOutTest, ...] = ()
    """Why devices are not used, tested with one device of each kind."""

    @property
    def seconds(self) -> float:
        """Return the seconds of the first iteration."""
        return self.timeline.iteration_ends[0]

    @property
    def bottleneck(self) -> StageLoad:
        """Return the load of the bottleneck stage."""
        return bottleneck(self.loads)


def explain_plan(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    *,
    model: ComputeModel | None = None,
    timeline: Timeline | None = None,
) -> Explanation:
    """Simulate a plan that ``check_plan`` accepts with each change.

    The results are compared with ``timeline``, a simulation of the unchanged plan.
    """
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
            sorted(question.settings(slowest), key=lambda what_if: (what_if.missing, -what_if.gain))
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
    """Return the plan with predicted time, memory and bottleneck, and the cost model that predicts
    them.

    The prediction is read from ``timeline``, or the plan is simulated. Earlier predictions and
    proofs are kept only if cluster and cost model are the same. Raises ``InfeasibleError`` if the
    iteration never ends.
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
