"""One way to play a plan: in the exact engine, device by device or folded along its symmetries.

    (1)  steps  = devices x micro-batches x iterations
    (2)  a plan of at most ``MOST_WHOLE`` steps is played whole, a larger one folded (``sim.fold``)

A folded plan costs the same however many replicas it has; its timeline shows bundles of equal
replicas in the place of devices, and no memory. A caller that needs every device asks for the
whole, one that compares plans has all of them played in one way.
"""

from __future__ import annotations

import math

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.plan.check import check_plan
from argosy.plan.plan import Plan
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import TaskGraph
from argosy.sim.fold import fold_plan
from argosy.sim.folded import folded_seconds
from argosy.sim.tasks.compile import compile_plan
from argosy.timeline import Timeline
from argosy.workload.chain import Chain

# A processor of 2020 plays 8192 steps in about a second.
MOST_WHOLE = 8192


def plays_whole(plan: Plan, *, iterations: int = 1) -> bool:
    """Return (2)."""
    return len(plan.devices) * plan.num_micro_batches * iterations <= MOST_WHOLE


def task_graph(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    model: ComputeModel | None = None,
    *,
    whole: bool | None = None,
) -> tuple[TaskGraph, Cluster]:
    """The tasks of an iteration and the cluster that they run on, which is a folded one if the plan
    is (2)."""
    if plays_whole(plan) if whole is None else whole:
        return compile_plan(plan, chain, cluster, model), cluster
    return fold_plan(plan, chain, cluster, model)


def play(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    model: ComputeModel | None = None,
    *,
    whole: bool | None = None,
    iterations: int = 1,
    record: int | None = None,
    until: float = math.inf,
) -> Timeline:
    """Play ``iterations`` of a plan that ``check_plan`` passes, from time 0, ``whole`` or folded,
    or else as (2) says.

    Spans and memory are kept for the first ``record`` iterations (default: all); none begins after
    ``until`` seconds.
    """
    is_whole = plays_whole(plan, iterations=iterations) if whole is None else whole
    graph, where = task_graph(plan, chain, cluster, model, whole=is_whole)
    return simulate_exact(graph, where, iterations=iterations, record=record, until=until)


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
    """Play a plan whole; raise ``InputError`` if it does not make sense on this cluster."""
    check_plan(plan, chain, cluster)
    return play(
        plan, chain, cluster, model, whole=True, iterations=iterations, record=record, until=until
    )


def iteration_seconds(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    model: ComputeModel | None = None,
    *,
    whole: bool | None = None,
) -> float:
    """What the first iteration of a plan takes, as ``play`` plays it; infinite if it never ends."""
    is_whole = plays_whole(plan) if whole is None else whole
    seconds = None if is_whole else folded_seconds(plan, chain, cluster, model)
    return (
        first_end(play(plan, chain, cluster, model, whole=is_whole, record=0))
        if seconds is None
        else seconds
    )


def first_end(timeline: Timeline) -> float:
    """When the first iteration ends; infinite if it never does."""
    return timeline.iteration_ends[0] if timeline.iteration_ends else math.inf
