"""What would happen: a plan, played on a cluster with everything that is known of its future, or its time alone."""

from __future__ import annotations

import math

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.plan.check import check_plan
from argosy.plan.plan import Plan
from argosy.sim.compile import compile_plan
from argosy.sim.exact import simulate_exact
from argosy.sim.fold import fold_plan
from argosy.sim.folded import folded_seconds
from argosy.timeline import Timeline
from argosy.workload.chain import Chain


def simulate(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    *,
    model: ComputeModel | None = None,
    iterations: int = 1,
    record: int | None = None,
    until: float = math.inf,
) -> Timeline:
    """Play ``iterations`` of a plan from time 0 in the exact engine.

    Spans and memory are kept for the first ``record`` iterations (default: all); none begins after ``until``
    seconds. Raises ``InputError`` where the plan does not make sense on this cluster.
    """
    check_plan(plan, chain, cluster)
    graph = compile_plan(plan, chain, cluster, model)
    return simulate_exact(graph, cluster, iterations=iterations, record=record, until=until)


def iteration_seconds(
    plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel | None = None, *, whole: bool
) -> float:
    """What the first iteration of a plan that makes sense takes, played whole or folded along its symmetries; infinite
    if it never ends."""
    if whole:
        graph = compile_plan(plan, chain, cluster, model)
    else:
        seconds = folded_seconds(plan, chain, cluster, model)
        if seconds is not None:
            return seconds
        graph, cluster = fold_plan(plan, chain, cluster, model)
    ends = simulate_exact(graph, cluster, record=0).iteration_ends
    return ends[0] if ends else math.inf
