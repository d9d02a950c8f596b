"""How should this run? The story of the search in one place.

    (1)  Equal devices form pools (``space.pool``); a stage takes so many of each.
    (2)  For every way to cut the global batch into micro-batches (a ``Shape``) the options of a stage are priced
         (``space.enumerate``), and what cannot win is removed (``space.prune``).
    (3)  Suffix programmes bound every plan of a shape (``solve.bounds``). Shapes are taken in the order of a first,
         cheap bound on throughput; a second one (``solve.reach``) says which need no programme.
    (4)  Level 1 judges the plans that the bounds lead to and improves the best by small moves. Level 2 goes on
         best-first, from coarse to fine units of devices, until the gap between the best plan and the least open
         bound is small enough or time is up. Level 1 takes the first units that have a plan, and where devices are few
         and alike, or alone in their nodes, all of them; of a long chain it looks at some of the cuts (``solve.grid``).
    (5)  The best few are placed on real devices and played by the exact engine, which decides (``solve.verdict``).

Every plan carries a certificate: no plan in the stated scope is faster than its lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from argosy.cluster.lasting import at_time_zero, within_reach
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError, NothingFitsError, bad_input
from argosy.plan.plan import Plan, Search
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.solve.beside import with_uniform
from argosy.solve.budget import Budget
from argosy.solve.candidate import Candidate, diverse, single_stages
from argosy.solve.feasible import batch_shapes, find_fit, is_quick
from argosy.solve.frontier import Branch
from argosy.solve.grid import all_cuts, coarse_cuts
from argosy.solve.incumbents import Incumbents
from argosy.solve.interleave import with_interleaved
from argosy.solve.judge import Judge
from argosy.solve.kinds import ground_of
from argosy.solve.menu import Menu
from argosy.solve.pipeline import PlanSearch
from argosy.solve.reach import Reach
from argosy.solve.settings import SCHEDULES, Progress, Settings, allowed, search_scope, without_deadlock
from argosy.solve.shape import MOST_STAGES, Shape, estimated, hoped
from argosy.solve.unmeasured import why_no_plan
from argosy.solve.verdict import Trial, certify, placed
from argosy.space.enumerate import Scope, Shared, only_runnable, stage_options, stage_parts, with_splits
from argosy.space.granularity import even_unit, granularities
from argosy.space.option import Option, Vector, whole_seconds
from argosy.space.pool import able_pools
from argosy.space.price import Prices
from argosy.space.prune import Counters
from argosy.space.rate import throughput_bound
from argosy.workload.chain import Chain

__all__ = ["SCHEDULES", "Progress", "Settings", "find_plan", "kept_plans", "search_scope"]

_MOST_SAMPLES = 10_000_000
_AIM, _SLACK, _STEPS = 0.9, 0.1, 64
"""Of the gap: what the judge is held to, what is lost to dominance; steps of a search before another is taken."""
_KEPT = 16
"""Good plans of different sorts."""
_NEAR = 1.15
"""Times a bound: where a first plan is looked for."""
_CLOSE = 1.02
"""Times the bound of ``solve.reach`` no plan of a large cluster is."""
_TASKS = 1_500
"""That the exact engine may play on level 1."""
_FEW, _SORTS = 16, 3
"""Devices that level 1 also takes one by one, where they are of one sort, or of so many and no two share a node."""


def find_plan(
    chain: Chain,
    cluster: Cluster,
    *,
    global_batch: int,
    settings: Settings | None = None,
    model: ComputeModel | None = None,
) -> Plan:
    """The best plan found, with its certificate."""
    if not 1 <= global_batch <= _MOST_SAMPLES:
        raise bad_input(f"a global batch of 1 to {_MOST_SAMPLES:,}", global_batch, where="global_batch")
    model = model or ComputeModel()
    settings = without_deadlock(settings or Settings(), model)
    cluster = within_reach(cluster)  # what a link that is down cuts off counts as lost
    if woven := _interleaved(settings):
        return _with_interleaved(chain, cluster, global_batch, settings, model, woven)
    if settings.even_shares and settings.replicas is None:
        return _best_even(chain, cluster, global_batch, settings, model)[0]
    return _PlanSearch(chain, cluster, global_batch, settings, model).run()


def _interleaved(settings: Settings) -> tuple[ScheduleSpec, ...]:
    return tuple(one for one in settings.schedules if one.kind is ScheduleKind.INTERLEAVED)


def _with_interleaved(
    chain: Chain,
    cluster: Cluster,
    global_batch: int,
    settings: Settings,
    model: ComputeModel,
    woven: tuple[ScheduleSpec, ...],
) -> Plan:
    """The best plan under the other schedules that are asked for, or an interleaved variant of a good one."""
    others = tuple(one for one in settings.schedules if one not in woven)
    base = replace(settings, schedules=others or (ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),))
    if base.even_shares and base.replicas is None:
        good = _best_even(chain, cluster, global_batch, base, model)
        plain = good[0]
    else:
        search = _PlanSearch(chain, cluster, global_batch, base, model)
        plain = search.run()
        good = [plain, *(placed(one, search.prices, cluster) for one in diverse(search.incumbents.found, _KEPT))]
    return with_interleaved(plain, good, woven, chain, at_time_zero(cluster), model, must_be=not others)


def _best_even(
    chain: Chain, cluster: Cluster, global_batch: int, settings: Settings, model: ComputeModel
) -> list[Plan]:
    """The best over all numbers of replicas, sharing the time, with the least bound of all; then those of others."""
    plans, bounds = list[Plan](), [math.inf]
    reason: InfeasibleError | None = None
    counts = [pool.count for pool in able_pools(chain, cluster, model)]
    numbers = [number for number in range(1, len(cluster.devices) + 1) if global_batch % number == 0]
    budget = Budget(settings.time_budget, settings.memory_budget)
    for at, replicas in enumerate(numbers):
        share = (settings.time_budget - budget.seconds) / (len(numbers) - at)
        units = settings.units or tuple(even_unit(count, replicas) for count in counts)
        one = replace(settings, replicas=replicas, units=units, time_budget=share)
        search = _PlanSearch(chain, cluster, global_batch, one, model)
        search.interrupted = share <= 0 and bool(plans)
        try:
            if not search.interrupted:
                plans.append(search.run())
        except InfeasibleError as error:
            reason = reason or error
        except KeyboardInterrupt:
            if not plans or not settings.ends_early:
                raise
            search.interrupted = True
        if search.interrupted:
            bounds.append(search.free_bound)
            break
    if not plans:
        assert reason is not None
        raise reason
    best = min(plans, key=lambda plan: plan.predicted.iteration_seconds if plan.predicted else math.inf)
    bound = min(*bounds, *(plan.certificate.lower_bound_seconds for plan in plans if plan.certificate))
    assert best.certificate is not None and best.predicted is not None
    gap = best.predicted.iteration_seconds / bound - 1
    certified = replace(best, certificate=replace(best.certificate, lower_bound_seconds=bound, gap=gap))
    return [certified, *(plan for plan in plans if plan is not best)]


def kept_plans(
    chain: Chain, cluster: Cluster, *, global_batch: int, settings: Settings, model: ComputeModel, most: int = _KEPT
) -> list[Plan]:
    """The best plan and other good ones of as many sorts as there are, on devices, without what is said about them;
    the best alone where it comes from more than one search."""
    settings = without_deadlock(settings, model)
    if _interleaved(settings) or (settings.even_shares and settings.replicas is None):
        return [find_plan(chain, cluster, global_batch=global_batch, settings=settings, model=model).bare]
    cluster = within_reach(cluster)
    search = _PlanSearch(chain, cluster, global_batch, settings, model)
    best = search.run().bare
    others = [placed(candidate, search.prices, cluster) for candidate in diverse(search.incumbents.found, most)]
    return [best, *(other for other in others if other != best)]


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
        self.budget = Budget(settings.time_budget, settings.memory_budget)
        self.pools = able_pools(chain, cluster, model)
        if not self.pools:
            lost = all(device.speed.at(0) == 0 for device in cluster.devices)
            why = "is there at time 0" if lost else f"has {chain.dtype}, the dtype of {chain.name}"
            raise NothingFitsError(f"no device of {cluster!r} {why}")
        self.prices = Prices(chain, self.pools, model)
        self.counters = Counters()
        self.incumbents = Incumbents(Judge(self.prices, cluster, guesses=settings.level == 1))
        self.interrupted = False
        self.coarse: list[Candidate] = []
        """The finalists of the first units that have a plan."""

    def run(self) -> Plan:
        levels = [self.settings.units] if self.settings.units else list(granularities(self.pools))
        bound, units = 0.0, levels[-1]
        for units in levels:
            if units != levels[0] and not self.incumbents.found and not self._may_fit(units):
                continue
            try:
                bound = self._search(units)
            except KeyboardInterrupt:
                if not self.incumbents.found or not self.settings.ends_early:
                    raise
                self.interrupted = True
                bound = self.free_bound
            self.coarse = self.coarse or self._finalists()
            if self.interrupted or (self.incumbents.found and (self.budget.is_spent or not self._refines)):
                break
        if not self.incumbents.found:
            raise NothingFitsError(why_no_plan(self.prices, self.cluster, self.global_batch, self.settings))
        return self._finish(bound, units)

    @property
    def _refines(self) -> bool:
        """Whether finer units are searched though coarser ones have a plan."""
        is_few = sum(pool.count for pool in self.pools) <= _FEW
        are_alone = all(pool.node_size == 1 for pool in self.pools) and len(self.pools) <= _SORTS
        return self.settings.level > 1 or (is_few and (len(self.pools) == 1 or are_alone))

    def _may_fit(self, units: Vector) -> bool:
        """Where a coarser granularity has no plan: whether it is worth looking at a finer one."""
        scope = self._scope(units)
        if not is_quick(scope.counts(self.pools)):
            return True
        shapes = batch_shapes(self.global_batch, self.settings.schedules)
        return find_fit(self.prices, shapes, scope) is not None

    def _shapes(self, scope: Scope) -> list[tuple[float, Shape]]:
        """Every way to cut the global batch with its throughput bound, most promising first: a pipeline of a few stages
        takes so many micro-batches longer to fill and drain."""
        units = scope.units if scope.context == (1,) else None
        shapes = [
            (shape.num_micro_batches * throughput_bound(self.prices, shape.micro_batch_size, units), shape)
            for shape in batch_shapes(self.global_batch, self.settings.schedules)
        ]
        return sorted(shapes, key=lambda item: (estimated(*item), -item[1].num_micro_batches))

    @cached_property
    def free_bound(self) -> float:
        """No plan at all is faster, whatever its granularity and whatever was or was not looked at."""
        shapes = batch_shapes(self.global_batch, self.settings.schedules)
        bounds = (s.num_micro_batches * throughput_bound(self.prices, s.micro_batch_size) for s in shapes)
        return min(bounds, default=math.inf)

    @property
    def _is_quick(self) -> bool:
        """On level 1 of a large cluster, shapes whose plans would have to be far better than usual are left open, with
        a bound that the certificate counts."""
        return self.settings.level == 1 and self.settings.prune and sum(pool.count for pool in self.pools) > 8

    def _hardly_pays(self, bound: float, shape: Shape) -> bool:
        """Whether a pipeline does; without one a shape is looked at in any case."""
        return self._is_quick and estimated(bound, shape) > 1.1 * self.incumbents.best

    def _scope(self, units: Vector) -> Scope:
        return with_splits(search_scope(self.settings, self.pools, units), self.prices)

    def _search(self, units: Vector) -> float:
        """One granularity: the least bound that is left open."""
        scope = self._scope(units)
        counts, ground = scope.counts(self.pools), ground_of(self.cluster, self.pools, units)
        proves = self.settings.level > 1 or not self.settings.prune
        grid = all_cuts(self.prices) if proves else coarse_cuts(self.prices)
        branches: list[Branch] = []
        menus: dict[int, dict[Vector, list[Option]]] = {}
        shapes = self._shapes(scope)
        left_open = math.inf
        for bound, shape in shapes:
            if self.settings.prune and bound >= self._goal:
                self.counters.add("bound")
                left_open = min(left_open, bound)
                continue
            if self.incumbents.found and self.budget.is_spent:
                left_open = min(left_open, bound)
                continue
            is_alone = self._hardly_pays(bound, shape)
            taken = replace(scope, units=tuple(pool.count for pool in self.pools)) if is_alone else scope
            parts = stage_parts(self.prices, shape.micro_batch_size, taken, self.counters)
            if self.settings.prune and not is_alone:
                bound = self._reach(parts, shape, counts, bound)
                if bound >= self._goal or (self._is_quick and bound * _CLOSE >= self.incumbents.best):
                    self.counters.add("bound")
                    left_open = min(left_open, bound)
                    continue
            if is_alone:
                parts = self._quick_enough(parts, shape)
            options = stage_options(self.prices, shape.micro_batch_size, taken, self.counters, parts)
            menus[shape.micro_batch_size] = options
            if is_alone:
                left_open = min(left_open, bound)
                alone = single_stages(self.prices, shape, options, self.incumbents.best)
                self.incumbents.keep(shape, list(alone), taken.units)
            if is_alone or not options:
                continue
            menu = Menu(self.prices, options, shape, ground, grid)
            branches.append(self._first_look(menu, counts, bound, units))
        if self.incumbents.found and self.incumbents.found[0].units == units:
            self.incumbents.improve(self.incumbents.found[0], menus[self.incumbents.found[0].shape.micro_batch_size])
        if proves:
            self._prove(branches, units)
        bounds = (branch.bound - self.slack for branch in branches)
        return min([self.incumbents.best, left_open, *bounds, *self.incumbents.doubtful()])

    @property
    def slack(self) -> float:
        """Seconds by which dominance may be wrong, a fraction of the gap that is looked for."""
        is_used = self.settings.level > 1 and self.settings.prune
        return _SLACK * self.settings.gap * self.free_bound if is_used else 0.0

    @property
    def _goal(self) -> float:
        """Plans that are no faster need not be looked at."""
        return self.incumbents.best / (1 + (_AIM * self.settings.gap if self.settings.level > 1 else 0.0))

    def _quick_enough(self, parts: Mapping[Vector, Sequence[Shared]], shape: Shape) -> dict[Vector, list[Shared]]:
        """What a single stage need not do without: its computing alone takes less than the best plan."""
        most = self.incumbents.best / shape.num_micro_batches
        return {
            vector: [one for one in each if whole_seconds(self.prices, *one) < most] for vector, each in parts.items()
        }

    def _reach(self, parts: Mapping[Vector, Sequence[Shared]], shape: Shape, counts: Vector, bound: float) -> float:
        """A better bound of a shape, as far as it matters."""
        ways = {vector: list(dict.fromkeys(each for each, _ in shared)) for vector, shared in parts.items()}
        most = min(self._goal, hoped(bound, shape))
        return Reach(self.prices, shape, ways, counts).least(bound, most) if most > bound else bound

    def _first_look(self, menu: Menu, counts: Vector, bound: float, units: Vector) -> Branch:
        """The search of a shape, with the plans that its bounds lead to at once. As long as there is no plan to beat,
        only those near the bound, which takes less time; where there are none, all of them."""
        hopes = (_NEAR * bound, hoped(bound, menu.shape)) if not self.incumbents.found else ()
        for hope in (*hopes, math.inf):
            branch = self._open(menu, counts, min(self.incumbents.best, hope), units)
            if self.incumbents.best <= branch.search.upper:
                break  # what the tables left out cannot win
        return branch

    def _open(self, menu: Menu, counts: Vector, upper: float, units: Vector) -> Branch:
        most_stages = min(sum(counts), MOST_STAGES)
        upper = upper if self.settings.prune else math.inf
        search = PlanSearch(menu, counts, most_stages, upper, slack=None, only_kind=False)
        self.incumbents.settle(menu.shape, list(search.descend(self.incumbents.best)), units, menu.grid.bundle)
        return Branch(search=search, counts=counts, most_stages=most_stages)

    def _prove(self, branches: list[Branch], units: Vector) -> None:
        """Best-first over all shapes, until the gap is small enough."""
        while branches and not self.budget.is_spent:
            branch = min(branches, key=lambda one: one.bound)
            upper = self.incumbents.best if self.settings.prune else math.inf
            goal = self._goal + self.slack
            if branch.bound >= goal or math.isinf(branch.bound):
                return
            if self.settings.progress is not None:
                progress = Progress(
                    seconds=self.incumbents.best, bound=branch.bound, candidates=self.incumbents.judge.judged
                )
                self.settings.progress(progress)
            if branch.is_whole:
                branches.remove(branch)
                for part in branch.split(upper, self.slack if self.settings.prune else None):
                    branches.append(part)
                    self.incumbents.keep(part.search.shape, list(part.search.descend(self.incumbents.best)), units)
                continue
            plans = branch.search.advance(upper, goal, _STEPS)
            dived = branch.search.dive(upper)
            self.incumbents.keep(branch.search.shape, [plan for _, plan in plans] + ([dived] if dived else []), units)
            self.incumbents.suspect(branch, plans)

    def _finalists(self) -> list[Candidate]:
        """As many as the exact engine plays in a fraction of the search."""
        found = self.incumbents.found
        tasks = 4 * len(found[0].plan) * found[0].shape.num_micro_batches if found else 1
        most = max(1, _TASKS // tasks) if self.settings.level == 1 else max(4, 20 * _TASKS // tasks)
        return diverse(found, min(most, 8))

    def _finish(self, bound: float, units: Vector) -> Plan:
        """Let the exact engine decide between the best few: of coarse units, with what is played beside them, and then
        of fine ones, so that finer units never make a plan worse."""
        finalists = self._finalists()
        first = self.coarse if self.settings.level == 1 else finalists
        scope = allowed(Scope(units=units), self.settings)
        scope = only_runnable(scope) if self.settings.runnable else scope
        trial = Trial(self.prices, self.cluster, self.calm, scope, self.settings.executor)
        verdict = trial.decide(first)
        if self.settings.units is None or self.settings.replicas is not None:
            shapes = list(batch_shapes(self.global_batch, self.settings.schedules))
            tasks = 12 * _TASKS * self.settings.level**3
            verdict = with_uniform(verdict, trial, self.incumbents.judge, shapes, tasks)
        if finalists != first:
            verdict = trial.decide([verdict.winner, *finalists])
        scope, bounds = self._scope(units), (bound, self.free_bound)
        plan = certify(verdict, self.incumbents.found, bounds, self.prices, scope, self.cluster)
        search = Search(
            cpu_seconds=self.budget.seconds,
            candidates=self.incumbents.judge.judged,
            pruned=tuple(sorted(self.counters.removed.items())),
        )
        return replace(plan, search=search)
