"""Simulate a plan in the exact engine, device by device or folded along its symmetries.

    (1)  steps  = devices x micro-batches x iterations
    (2)  a plan of at most ``MOST_WHOLE`` steps is simulated whole, a larger one is folded
         (``sim.fold``)

The cost of simulating a folded plan does not grow with its number of replicas. Its timeline shows
bundles of equal replicas instead of devices, and no memory. A caller that needs every device
requests the whole plan; a caller that compares plans simulates all of them in the same way.
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
from argosy.sim.tasks.known import Known
from argosy.timeline import Timeline
from argosy.workload.chain import Chain

# A plan with at most this product of devices and micro-batches is played whole at no noticeable
# cost, although folding it along its symmetries would be faster.
SMALL_PLAN = 512
# The largest number of steps (1) of a whole simulation: a CPU of 2020 takes about a second for it.
MOST_WHOLE = 8192


def plays_whole(plan: Plan, *, iterations: int = 1) -> bool:
    """Return whether a plan is small enough to be simulated device by device (2)."""
    return len(plan.devices) * plan.num_micro_batches * iterations <= MOST_WHOLE


def task_graph(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    model: ComputeModel | None = None,
    *,
    whole: bool | None = None,
) -> tuple[TaskGraph, Cluster]:
    """Return the tasks of one iteration and the cluster that they run on.

    The cluster is a folded one if the plan is folded; rule (2) decides if ``whole`` is None.
    """
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
    """Simulate ``iterations`` of a plan that ``check_plan`` accepts, starting at time 0.

    The plan is simulated ``whole`` or folded; rule (2) decides if ``whole`` is None. Spans and
    memory are recorded for the first ``record`` iterations (default: all); no iteration begins
    after ``until`` seconds.
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
    """Simulate a whole plan; raise ``InputError`` if the plan is not valid on this cluster."""
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
    known: Known | None = None,
) -> float:
    """Return the seconds of a plan's first iteration, as ``play`` simulates it.

    The result is infinite if the iteration never ends. ``known`` has what was found for other plans
    of the cluster.
    """
    is_whole = plays_whole(plan) if whole is None else whole
    seconds = None if is_whole else folded_seconds(plan, chain, cluster, model, known)
    return (
        first_end(play(plan, chain, cluster, model, whole=is_whole, record=0))
        if seconds is None
        else seconds
    )


def first_end(timeline: Timeline) -> float:
    """Return the time in seconds at which the first iteration ends; infinite if it never does."""
    return timeline.iteration_ends[0] if timeline.iteration_ends else math.inf
