"""How should this run? The story of the search in one place.

    1. Equal devices form pools (``space.pool``); a stage takes so many of each. 2. For every way to cut the global
    batch into micro-batches and every schedule (a ``Shape``), the options of a stage are priced
       (``space.enumerate``), and what cannot win is removed (``space.prune``).
    3. Suffix programmes bound every plan of a shape (``solve.pipeline``). Shapes are taken in the order of a first,
    cheap bound on throughput. 4. Level 1 judges the plans that the bounds lead to and improves the best by small
    moves. Level 2 goes on best-first, from coarse to fine
       units of devices, until the gap between the best plan and the least open bound is small enough or time is up.
    5. The best few are placed on real devices and played by the exact engine, which decides.

Every plan carries a certificate: no plan in the stated scope is faster than its lower bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import numpy as np

from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError, bad_input
from argosy.plan.plan import (
    Certificate,
    ClusterRef,
    LeftOut,
    ModelRef,
    Plan,
    Predicted,
    Recompute,
    RunnerUp,
    Search,
    Stage,
)
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.exact import simulate_exact
from argosy.sim.fold import fold_plan
from argosy.solve.judge import Complete, Judge
from argosy.solve.pipeline import Choice, Menu, PlanSearch, Shape
from argosy.space.enumerate import Scope, stage_options
from argosy.space.option import Option, Vector
from argosy.space.place import place_stages
from argosy.space.pool import Pool, find_pools
from argosy.space.price import Prices
from argosy.space.prune import Counters
from argosy.space.rate import throughput_bound
from argosy.workload.chain import Chain

SCHEDULES = (
    ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
    ScheduleSpec(kind=ScheduleKind.EAGER),
    ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
    ScheduleSpec(kind=ScheduleKind.KFKB, k=4),
)


_FILL = 4
"""Stages that a pipeline has, roughly; only decides which shapes are looked at first."""
_EFFORT = {Recompute.NONE: 0, Recompute.SELECTIVE: 1, Recompute.FULL: 2}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a search stands."""

    seconds: float
    """Of the best plan so far."""
    bound: float
    candidates: int

    @property
    def gap(self) -> float:
        return self.seconds / self.bound - 1 if self.bound > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a search may do."""

    level: int = 1
    gap: float = 0.01
    """Level 2 stops at this gap."""
    time_budget: float = math.inf
    """CPU seconds."""
    prune: bool = True
    schedules: tuple[ScheduleSpec, ...] = SCHEDULES
    mixed: bool | None = None
    """Whether stages may mix pools; by default on level 2, and where there are few devices."""
    units: Vector | None = None
    """Devices of each pool that are taken together; by default coarse to fine."""
    progress: Callable[[Progress], None] | None = None
    executor: Executor | None = None


@dataclass(order=True)
class _Found:
    """A complete plan with its judged time; of equal ones the one with least ZeRO and recomputation comes first."""

    seconds: float
    effort: int
    number: int
    shape: Shape = field(compare=False)
    schedule: ScheduleSpec = field(compare=False)
    plan: Complete = field(compare=False)
    units: Vector = field(compare=False)


def find_plan(
    chain: Chain,
    cluster: Cluster,
    *,
    global_batch: int,
    settings: Settings | None = None,
    model: ComputeModel | None = None,
) -> Plan:
    """The best plan found, with its certificate."""
    if global_batch < 1:
        raise bad_input("a global batch of at least 1", global_batch, where="global_batch")
    search = _PlanSearch(chain, cluster, global_batch, settings or Settings(), model or ComputeModel())
    return search.run()


class _PlanSearch:
    def __init__(
        self, chain: Chain, cluster: Cluster, global_batch: int, settings: Settings, model: ComputeModel
    ) -> None:
        self.chain = chain
        self.cluster = cluster
        self.calm = at_time_zero(cluster)
        self.global_batch = global_batch
        self.settings = settings
        self.model = model
        self.began = time.process_time()
        self.pools = find_pools(cluster)
        self.prices = Prices(chain, self.pools, model)
        self.judge = Judge(self.prices, cluster)
        self.counters = Counters()
        self.found: list[_Found] = []
        self.known: set[tuple[object, ...]] = set()
        self.free_bound = math.inf

    def run(self) -> Plan:
        levels = [self.settings.units] if self.settings.units else list(_granularities(self.pools, self.settings.level))
        bound, units = 0.0, levels[-1]
        for units in levels:
            bound = self._search(units)
            if self._out_of_time() or (self.settings.level == 1 and self.found):
                break
        if not self.found:
            raise InfeasibleError(self._why_infeasible())
        return self._finish(bound, units)

    @property
    def best(self) -> float:
        return self.found[0].seconds if self.found else math.inf

    def _out_of_time(self) -> bool:
        return time.process_time() - self.began > self.settings.time_budget

    def _shapes(self) -> list[tuple[float, Shape]]:
        """Every way to cut the global batch with its throughput bound, most promising first: a pipeline of a few stages
        takes so many micro-batches longer to fill and drain."""
        shapes = []
        for count in range(1, self.global_batch + 1):
            if self.global_batch % count:
                continue
            size = self.global_batch // count
            schedules = tuple(schedule for schedule in self.settings.schedules if schedule.k <= count)
            if not schedules:
                continue
            shape = Shape(num_micro_batches=count, micro_batch_size=size, schedules=schedules)
            shapes.append((count * throughput_bound(self.prices, size), shape))

        return sorted(shapes, key=lambda item: (_estimate(*item), -item[1].num_micro_batches))

    def _hardly_pays(self, bound: float, shape: Shape) -> bool:
        """Level 1 does not look at shapes that would have to be far better than pipelines usually are."""
        return self.settings.level == 1 and self.settings.prune and _estimate(bound, shape) > 1.1 * self.best

    def _search(self, units: Vector) -> float:
        """One granularity: the least bound that is left open."""
        mixed = self.settings.mixed
        if mixed is None:
            mixed = self.settings.level > 1 or sum(pool.count for pool in self.pools) <= 8
        zero = (1, 3) if self.settings.level == 1 else (1, 2, 3)
        scope = Scope(units=units, mixed=mixed, zero=zero, prune=self.settings.prune)
        counts = scope.counts(self.pools)
        searches: list[PlanSearch] = []
        menus: dict[int, dict[Vector, list[Option]]] = {}
        shapes = self._shapes()
        self.free_bound = min((bound for bound, _ in shapes), default=math.inf)
        left_open = math.inf
        for bound, shape in shapes:
            upper = self.best if self.settings.prune else math.inf
            if bound >= upper:
                self.counters.add("bound")
                continue
            if self.found and (self._out_of_time() or self._hardly_pays(bound, shape)):
                left_open = min(left_open, bound)
                continue
            size = shape.micro_batch_size
            if size not in menus:
                menus[size] = stage_options(self.prices, size, scope, self.counters)
            if not menus[size]:
                continue
            menu = Menu(self.prices, menus[size])
            search = PlanSearch(menu, shape, counts, min(sum(counts), 32), min(upper, _hope(bound, shape)))
            if not search.heap and self.settings.prune and upper > _hope(bound, shape):
                search = PlanSearch(menu, shape, counts, min(sum(counts), 32), upper)
            searches.append(search)
            self._keep(shape, list(search.descend(self.best)), units)
        if self.found and self.found[0].units == units:
            self._improve(self.found[0], menus[self.found[0].shape.micro_batch_size])
        if self.settings.level > 1 or not self.settings.prune:
            self._prove(searches, units)
        return min([self.best, left_open, *(search.bound for search in searches)])

    def _prove(self, searches: list[PlanSearch], units: Vector) -> None:
        """Best-first over all shapes, until the gap is small enough."""
        while searches and not self._out_of_time():
            search = min(searches, key=lambda one: one.bound)
            bound = search.bound
            if bound >= self.best * (1 if self.settings.gap == 0 else 1 / (1 + self.settings.gap)):
                return
            plans = []
            for _ in range(16):
                following = search.next_plan(self.best)
                if following is None:
                    break
                plans.append(following[1])
            self._keep(search.shape, plans, units)
            if self.settings.progress is not None:
                self.settings.progress(Progress(seconds=self.best, bound=bound, candidates=self.judge.judged))

    def _keep(self, shape: Shape, plans: Sequence[Complete], units: Vector) -> None:
        """Judge plans and remember the best of them."""
        fresh = [plan for plan in plans if self._key(shape, plan) not in self.known]
        if not fresh:
            return
        self.known.update(self._key(shape, plan) for plan in fresh)
        for plan, seconds, schedule in zip(fresh, *self.judge.seconds(shape, fresh), strict=True):
            if seconds < math.inf:
                rounded = float(f"{seconds:.9g}")
                effort = sum(choice.option.zero + _EFFORT[choice.option.recompute] for choice in plan)
                self.found.append(_Found(rounded, effort, len(self.found), shape, schedule, plan, units))
        self.found.sort()
        del self.found[32:]

    def _key(self, shape: Shape, plan: Complete) -> tuple[object, ...]:
        chosen = ((c.option.parts, c.option.recompute, c.option.zero, c.first, c.end) for c in plan)
        return (shape, *chosen)

    def _improve(self, best: _Found, options: dict[Vector, list[Option]]) -> None:
        """Small moves from the best plan while they help: a layer to a neighbour, another option for a stage, two
        stages swapped."""
        while True:
            self._keep(best.shape, list(_moves(best.plan, options)), best.units)
            if self.found[0].seconds >= best.seconds * (1 - 1e-9) or self.found[0].shape is not best.shape:
                return
            best = self.found[0]

    def _finish(self, bound: float, units: Vector) -> Plan:
        """Place the best few, let the exact engine decide, and write the certificate."""
        finalists = [self._plan(found) for found in self._finalists()]
        judged = [(self._replay(plan), index) for index, plan in enumerate(finalists)]
        seconds, winner = min(judged)
        plan = finalists[winner]
        used = set(plan.devices)
        bound = min(bound, seconds)
        return replace(
            plan,
            predicted=Predicted(
                iteration_seconds=seconds,
                samples_per_second=self.global_batch / seconds,
                peak_memory_bytes=(),
                bottleneck="",
            ),
            certificate=Certificate(
                lower_bound_seconds=bound,
                gap=seconds / bound - 1,
                granularity=max(units),
                scope=f"stages of multiples of {'/'.join(map(str, units))} devices of each pool",
            ),
            search=Search(
                cpu_seconds=time.process_time() - self.began,
                candidates=self.judge.judged,
                pruned=tuple(sorted(self.counters.removed.items())),
            ),
            runner_ups=tuple(
                RunnerUp(description=repr(other.plan), iteration_seconds=other.seconds, reason="slower")
                for other in [*self.found[:winner], *self.found[winner + 1 :]][:3]
            ),
            left_out=tuple(
                LeftOut(device=device.name, reason="no faster plan uses it")
                for device in self.cluster.devices
                if device.name not in used
            ),
        )

    def _plan(self, found: _Found) -> Plan:
        shape, ref = found.shape, self.chain
        replicas = place_stages(self.pools, [choice.option for choice in found.plan])
        return Plan(
            model=ModelRef(
                name=ref.name, sequence_length=ref.sequence_length, dtype=ref.dtype, optimizer=ref.optimizer
            ),
            cluster=ClusterRef(name=self.cluster.name, hash=self.cluster.hash, content=self.cluster.content),
            global_batch=self.global_batch,
            micro_batch_size=shape.micro_batch_size,
            num_micro_batches=shape.num_micro_batches,
            schedule=found.schedule,
            stages=tuple(
                Stage(
                    first=choice.first,
                    end=choice.end,
                    replicas=group,
                    recompute=choice.option.recompute,
                    zero=choice.option.zero,
                )
                for choice, group in zip(found.plan, replicas, strict=True)
            ),
        )

    def _finalists(self) -> list[_Found]:
        """The best few, as many as the exact engine plays in a fraction of the search."""
        tasks = 4 * len(self.found[0].plan) * self.found[0].shape.num_micro_batches
        most = max(1, (3_000 if self.settings.level == 1 else 60_000) // tasks)
        return self.found[: min(most, 8)]

    def _replay(self, plan: Plan) -> float:
        graph, cluster = fold_plan(plan, self.chain, self.calm, self.model)
        timeline = simulate_exact(graph, cluster, record=0)
        return timeline.iteration_ends[0] if timeline.iteration_ends else math.inf

    def _why_infeasible(self) -> str:
        return f"no plan of {self.chain.name} fits on {self.cluster!r}"


def _estimate(bound: float, shape: Shape) -> float:
    """What a pipeline at the throughput bound takes with filling and draining."""
    return bound * (1 + _FILL / shape.num_micro_batches)


def _hope(bound: float, shape: Shape) -> float:
    """So slow a plan is not worth its place in the tables, unless there is no other."""
    return 2 * _estimate(bound, shape)


def at_time_zero(cluster: Cluster) -> Cluster:
    """The cluster as it is at time 0, for ever: what a plan without a scenario is made for."""
    links = tuple(
        replace(link, bandwidth=Trace.constant(link.bandwidth.at(0)), latency=Trace.constant(link.latency.at(0)))
        for link in cluster.links
    )
    devices = tuple(replace(device, speed=Trace.constant(device.speed.at(0))) for device in cluster.devices)
    return replace(cluster, links=links, devices=devices)


def _moves(plan: Complete, options: dict[Vector, list[Option]]) -> Iterator[Complete]:
    """Plans one small step away."""
    units = {id(option): group for group in options.values() for option in group}
    for index, choice in enumerate(plan):
        for option in units[id(choice.option)]:
            if option is not choice.option:
                yield (*plan[:index], replace(choice, option=option), *plan[index + 1 :])
    lengths = [choice.end - choice.first for choice in plan]
    chosen = [choice.option for choice in plan]
    for one in range(len(plan)):
        for other in range(len(plan)):
            if one != other and lengths[one] > 1:
                moved = [*lengths]
                moved[one], moved[other] = moved[one] - 1, moved[other] + 1
                yield _of(chosen, moved)
        for other in range(one + 1, len(plan)):
            swapped, both = [*chosen], [*lengths]
            swapped[one], swapped[other] = swapped[other], swapped[one]
            both[one], both[other] = both[other], both[one]
            yield _of(swapped, both)


def _of(options: Sequence[Option], lengths: Sequence[int]) -> Complete:
    ends = np.cumsum(lengths).tolist()
    return tuple(Choice(o, end - length, end) for o, length, end in zip(options, lengths, ends, strict=True))


def _granularities(pools: Sequence[Pool], level: int) -> Iterator[Vector]:
    """Units of devices per pool, coarse to fine: so few states at first that a search takes an instant."""
    seen = set()
    for most in (3, 6, 12, 24, 10**6):
        units = tuple(_unit(pool, most) for pool in pools)
        if units not in seen:
            seen.add(units)
            yield units


def _unit(pool: Pool, most: int) -> int:
    """The smallest unit that gives at most ``most`` of them, aligned with the pool's nodes."""
    sizes = [size for size in range(1, pool.per_node + 1) if pool.per_node % size == 0]
    sizes += [pool.per_node * number for number in range(2, len(pool.nodes) + 1) if len(pool.nodes) % number == 0]
    return next((size for size in sizes if pool.count // size <= most), pool.count)
