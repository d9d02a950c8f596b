"""Predict how long a step of a plan takes in a believed world, by the exact engine with a cache."""

from __future__ import annotations

from argosy.adapt.watch import World, in_world
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.plan.plan import CollectiveChoice, Plan, Stage
from argosy.schedule import ScheduleSpec
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import TaskGraph
from argosy.sim.simulate import first_end, iteration_seconds, plays_whole, task_graph
from argosy.workload.chain import Chain

# The parts of a plan that the time of a step depends on.
PlanKey = tuple[tuple[Stage, ...], ScheduleSpec, int, tuple[CollectiveChoice, ...]]


def plan_key(plan: Plan) -> PlanKey:
    """Return the parts of a plan that the time of a step depends on."""
    return plan.stages, plan.schedule, plan.micro_batch_size, plan.collectives


class Predictor:
    """A cache of the seconds that a step of a plan takes in a world."""

    def __init__(self, chain: Chain, cluster: Cluster, model: ComputeModel) -> None:
        self.chain, self.cluster, self.model = chain, cluster, model
        self.known: dict[tuple[object, ...], float] = {}
        self.graphs: dict[PlanKey, TaskGraph] = {}

    def seconds(self, plan: Plan, world: World) -> float:
        key = (*plan_key(plan), world)
        if key not in self.known:
            self.known[key] = self.on(plan, in_world(self.cluster, world))
        return self.known[key]

    def on(self, plan: Plan, cluster: Cluster) -> float:
        """Return the seconds by the exact engine, on the cluster under other traces; infinity if
        the plan gets stuck."""
        if not plays_whole(plan):
            return iteration_seconds(plan, self.chain, cluster, self.model)
        key = plan_key(plan)
        if key not in self.graphs:  # tasks do not depend on traces
            self.graphs[key], _ = task_graph(plan, self.chain, self.cluster, self.model)
        return first_end(simulate_exact(self.graphs[key], cluster, record=0))
