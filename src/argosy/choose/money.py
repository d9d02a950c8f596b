"""Plan for money: compute what a step costs, and the Pareto front between time and cost.

    (1)  price of a plan    = sum over its devices of their price per second
    (2)  cost of a step     = price x iteration time + sum over links of bytes x price per byte
    (3)  a plan on exactly u devices of each pool takes at least T(u) = M / sum u_p r_p, and costs
         T(u) price(u)

Omitting devices reduces cost, so every vector u of a granularity is a problem of its own: the
fastest plan on a part of the cluster. Vectors are taken in the order of (3); one is skipped only if
a known plan is no slower than T(u) and costs no more than T(u) price(u): such a vector cannot add
to the front. Bytes with a price are counted in (2) but do not guide the search: for each vector the
fastest plan is priced.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from argosy.cluster.lasting import with_only
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError, NothingFitsError, impossible
from argosy.plan.plan import LeftOut, Plan, Search
from argosy.planner import Settings, find_plan
from argosy.sim.tasks.compile import compile_plan
from argosy.solve.feasible import batch_shapes
from argosy.space.granularity import granularities
from argosy.space.option import Vector
from argosy.space.pool import Pool, able_pools
from argosy.space.price import Prices
from argosy.space.rate import throughput_bound
from argosy.units import HOUR
from argosy.workload.chain import Chain

# The granularity is the finest with at most this many vectors, which bounds the search time.
_MOST_VECTORS = 400


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A plan that is priced in the currency of the cluster file."""

    plan: Plan
    seconds: float
    """Seconds of an iteration."""
    price_per_hour: float
    """Price by (1), per hour."""
    cost_per_step: float
    """Cost by (2)."""

    @property
    def cost_per_sample(self) -> float:
        return self.cost_per_step / self.plan.global_batch


@dataclass(frozen=True, kw_only=True)
class MoneyLimits:
    """A limit on what a plan may cost."""

    price_per_hour: float = math.inf
    cost_per_step: float = math.inf


def priced(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> Priced:
    """Return a plan, which has a prediction, with its price (1) and its cost (2)."""
    assert plan.predicted is not None
    seconds = plan.predicted.iteration_seconds
    per_hour = sum(cluster.device(name).price_per_hour for name in plan.devices)
    moved = moved_cost(plan, chain, cluster, model)
    return Priced(
        plan=plan,
        seconds=seconds,
        price_per_hour=per_hour,
        cost_per_step=seconds * per_hour / HOUR + moved,
    )


def moved_cost(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> float:
    """Return the cost of an iteration's bytes on the links that they cross."""
    if not any(link.price_per_byte for link in cluster.links):
        return 0.0
    graph = compile_plan(plan, chain, cluster, model)
    cluster, cost = graph.on(cluster), 0.0
    for task in graph.tasks:
        for flow in task.flows:
            route = cluster.fastest(*graph.ends(flow, cluster), flow.bytes)
            cost += flow.bytes * sum(cluster.links[link].price_per_byte for link in route.links)
    return cost


def pareto_front(points: Sequence[Priced]) -> list[Priced]:
    """Return the points that no other beats in time and cost, fastest first."""
    front: list[Priced] = []
    for point in sorted(points, key=lambda candidate: (candidate.seconds, candidate.cost_per_step)):
        if not front or point.cost_per_step < front[-1].cost_per_step:
            front.append(point)
    return front


def find_front(
    chain: Chain,
    cluster: Cluster,
    *,
    global_batch: int,
    limits: MoneyLimits | None = None,
    settings: Settings | None = None,
    model: ComputeModel | None = None,
) -> list[Priced]:
    """Return the front between time and cost among plans within the price per hour, fastest
    first."""
    if not any(device.price_per_hour for device in cluster.devices):
        reason = f"no device of {cluster.name} has a price_per_hour"
        raise impossible("compute costs", reason, "adding prices to the cluster file")
    limits = limits or MoneyLimits()
    search = _FrontSearch(
        chain, cluster, global_batch, limits, settings or Settings(), model or ComputeModel()
    )
    return search.run()


def choose(front: Sequence[Priced], *, cheapest: bool, limits: MoneyLimits) -> Priced:
    """Return the cheapest step, or the fastest that costs no more than allowed."""
    allowed = [point for point in front if point.cost_per_step <= limits.cost_per_step]
    if not allowed:
        least = min((point.cost_per_step for point in front), default=math.inf)
        raise InfeasibleError(
            f"no plan costs at most {limits.cost_per_step:g} a step: the cheapest costs {least:.4g}"
        )
    return min(
        allowed,
        key=lambda point: (point.cost_per_step, point.seconds) if cheapest else (point.seconds,),
    )


class _FrontSearch:
    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        global_batch: int,
        limits: MoneyLimits,
        settings: Settings,
        model: ComputeModel,
    ) -> None:
        self.chain = chain
        self.cluster = cluster
        self.global_batch = global_batch
        self.limits = limits
        self.settings = settings
        self.model = model
        self.pools = able_pools(chain, cluster, model)
        self.found: list[Priced] = []

    def run(self) -> list[Priced]:
        began = time.process_time()
        bounds = self._bounds()
        searched = 0
        possible = [vector for vector in self._vectors() if math.isfinite(bounds(vector))]
        for vector in sorted(
            possible, key=lambda counts: (bounds(counts) * self._price(counts), counts)
        ):
            least = bounds(vector)
            if self._price(vector) <= self.limits.price_per_hour and not self._is_beaten(
                vector, least
            ):
                searched += 1
                try:
                    self._look(vector)
                except KeyboardInterrupt:
                    if not self.found:
                        raise
                    break
        if not self.found:
            if math.isinf(self.limits.price_per_hour):
                raise NothingFitsError(f"no plan of {self.chain.name} fits on {self.cluster!r}")
            raise InfeasibleError(
                f"no plan fits on devices for at most {self.limits.price_per_hour:g} an hour"
            )
        front = pareto_front(self.found)
        effort = Search(cpu_seconds=time.process_time() - began, candidates=searched, pruned=())
        return [replace(point, plan=replace(point.plan, search=effort)) for point in front]

    def _vectors(self) -> Iterator[Vector]:
        """Yield devices of each pool, in the finest units that give at most ``_MOST_VECTORS``
        vectors."""
        levels = [self.settings.units] if self.settings.units else list(granularities(self.pools))
        few = [units for units in levels if self._number(units) <= _MOST_VECTORS]
        units = few[-1] if few else levels[0]
        ranges = [
            range(0, pool.count + 1, unit) for pool, unit in zip(self.pools, units, strict=True)
        ]
        return (vector for vector in product(*ranges) if any(vector))

    def _number(self, units: Vector) -> int:
        return math.prod(
            pool.count // unit + 1 for pool, unit in zip(self.pools, units, strict=True)
        )

    def _price(self, vector: Vector) -> float:
        """Return the price of a vector per hour."""
        return sum(
            count * pool.device.price_per_hour
            for count, pool in zip(vector, self.pools, strict=True)
        )

    def _bounds(self) -> Callable[[Vector], float]:
        """Return the function T(u) of (3); it is infinite if no time was measured with so few
        samples."""
        shapes = list(batch_shapes(self.global_batch, self.settings.schedules))
        alone = [Prices(self.chain, (replace(pool, index=0),), self.model) for pool in self.pools]
        rates = [
            [
                1 / (pool.count * throughput_bound(prices, shape.micro_batch_size))
                for shape in shapes
            ]
            for pool, prices in zip(self.pools, alone, strict=True)
        ]

        def least(vector: Vector) -> float:
            taken = [(count, rate) for count, rate in zip(vector, rates, strict=True) if count]
            pairs = (
                (shape, sum(count * rate[at] for count, rate in taken))
                for at, shape in enumerate(shapes)
            )
            return min(
                (shape.num_micro_batches / rate for shape, rate in pairs if rate), default=math.inf
            )

        return least

    def _is_beaten(self, vector: Vector, least: float) -> bool:
        cost = least * self._price(vector) / HOUR
        return any(point.seconds <= least and point.cost_per_step <= cost for point in self.found)

    def _look(self, vector: Vector) -> None:
        part = part_of(self.cluster, self.pools, vector)
        units = (
            tuple(1 for _ in able_pools(self.chain, part, self.model))
            if self.settings.units
            else None
        )
        settings = replace(self.settings, units=units, ends_early=False)
        try:
            plan = find_plan(
                self.chain,
                part,
                global_batch=self.global_batch,
                settings=settings,
                model=self.model,
            )
        except InfeasibleError:
            return
        plan = _on_whole(plan, self.cluster)
        self.found.append(priced(plan, self.chain, self.cluster, self.model))


def part_of(cluster: Cluster, pools: Sequence[Pool], vector: Vector) -> Cluster:
    """Return the cluster with only a number of devices of each pool, whole nodes first; the others
    are lost."""
    kept = {
        name
        for count, pool in zip(vector, pools, strict=True)
        for name in [name for node in pool.nodes for name in node][:count]
    }
    return with_only(cluster, kept)


def _on_whole(plan: Plan, cluster: Cluster) -> Plan:
    used = set(plan.devices)
    left = cluster.names_without(used)
    return replace(
        plan,
        certificate=None,  # a certificate is about time, and about this part of the cluster only
        runner_ups=(),
        left_out=tuple(
            LeftOut(device=name, reason="left out for the price of the plan") for name in left
        ),
    )
