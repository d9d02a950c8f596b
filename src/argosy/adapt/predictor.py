"""Predict how long a step of a plan takes in a believed world, by the exact engine with a cache.

Caches keep the newest ``_KEPT`` results, because measured worlds of a long run hardly recur.

The first step after a move shares its links with optimizer state that arrives, and each device's
update waits for its own (``sim.tasks.arriving``). What it takes longer than other steps is the part
of the state that it does not hide. In a plan too large to be simulated whole, nothing counts as
hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from argosy.adapt.watch import World, in_world
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.moving import Migration, Transfers, migration
from argosy.plan.plan import CollectiveChoice, Plan, Stage
from argosy.schedule import ScheduleSpec
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import TaskGraph
from argosy.sim.simulate import first_end, iteration_seconds, plays_whole, task_graph
from argosy.sim.tasks.arriving import with_arriving
from argosy.workload.chain import Chain

# Number of results that a cache keeps.
_KEPT = 10_000

# The parts of a plan that the time of a step depends on.
PlanKey = tuple[tuple[Stage, ...], ScheduleSpec, int, tuple[CollectiveChoice, ...]]


_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


def plan_key(plan: Plan) -> PlanKey:
    """Return the parts of a plan that the time of a step depends on."""
    return plan.stages, plan.schedule, plan.micro_batch_size, plan.collectives


class Predictor:
    """A cache of the seconds that a step of a plan takes in a world."""

    def __init__(self, chain: Chain, cluster: Cluster, model: ComputeModel) -> None:
        self.chain, self.cluster, self.model = chain, cluster, model
        self.known: dict[tuple[object, ...], float] = {}
        self.migrations: dict[tuple[PlanKey, PlanKey, World], Migration] = {}
        self.graphs: dict[PlanKey, TaskGraph] = {}

    def seconds(self, plan: Plan, world: World) -> float:
        key = (*plan_key(plan), world)
        return _cached(self.known, key, lambda: self.on(plan, in_world(self.cluster, world)))

    def migration(self, old: Plan, new: Plan, world: World) -> Migration:
        """Return the transfers of a move in a world."""
        key = (plan_key(old), plan_key(new), world)
        return _cached(
            self.migrations,
            key,
            lambda: migration(old, new, self.chain, in_world(self.cluster, world)),
        )

    def on(self, plan: Plan, cluster: Cluster) -> float:
        """Return the seconds by the exact engine, on the cluster under other traces; infinity if
        the plan gets stuck."""
        if not plays_whole(plan):
            return iteration_seconds(plan, self.chain, cluster, self.model)
        key = plan_key(plan)
        if key not in self.graphs:  # tasks do not depend on traces
            self.graphs[key], _ = task_graph(plan, self.chain, self.cluster, self.model)
        return first_end(simulate_exact(self.graphs[key], cluster, record=0))

    def exposed(self, plan: Plan, state: Transfers, world: World) -> float:
        """Return the seconds that the first step of a plan takes longer than others because
        optimizer state arrives meanwhile; infinity if it gets stuck."""
        key = (*plan_key(plan), world, state)
        return _cached(
            self.known, key, lambda: self.exposed_on(plan, state, in_world(self.cluster, world))
        )

    def exposed_on(self, plan: Plan, state: Transfers, cluster: Cluster) -> float:
        """Return the seconds of ``exposed`` on the cluster under other traces."""
        if not state.direct:
            return 0.0
        usual = self.on(plan, cluster)
        if not plays_whole(plan):
            return state.seconds(cluster)
        graph = with_arriving(self.graphs[plan_key(plan)], state)
        first = first_end(simulate_exact(graph, cluster, record=0))
        return max(0.0, first - usual) if math.isfinite(usual) else math.inf


def _cached(cache: dict[_Key, _Result], key: _Key, compute: Callable[[], _Result]) -> _Result:
    """Return a result from a cache; compute and add it if it is missing, in place of the oldest."""
    if key not in cache:
        result = compute()
        if len(cache) >= _KEPT:
            del cache[next(iter(cache))]
        cache[key] = result
    return cache[key]
