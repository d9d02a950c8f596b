"""Search all plans on some pools: shapes, units of devices, levels.

(1)  For every way to cut the global batch into micro-batches (a ``Shape``) the options of a
     stage are priced (``space.enumerate``), and options that cannot win are removed
     (``space.prune``).
(2)  Suffix programmes bound every plan of a shape (``solve.search.bounds``). Shapes are taken
     in the order of a first, cheap bound on throughput; a second bound (``solve.search.reach``)
     shows which shapes need no programme.
(3)  Level 1 (``quick``) judges the plans that the bounds lead to and improves the best by small
     moves. It takes the first units that have a plan, and finer ones while there are few of
     them; in a long chain it considers some of the cuts (``solve.search.grid``).
(4)  Level 2 (``prove``) starts from the plan of level 1 and continues best-first, from coarse
     to fine units, until the gap between the best plan and the least open bound is small enough
     or time is up.
(5)  The exact engine simulates the best plans (``solve.finalists.verdict``): a plan that was
     only judged is never the answer, and never closes anything in the certificate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from argosy.cluster.lasting import at_time_zero
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import NothingFitsError
from argosy.plan.plan import Plan, Search
from argosy.solve.budget import Budget, TimeIsUpError
from argosy.solve.feasible import batch_shapes, find_fit, is_quick
from argosy.solve.finalists.beside import with_uniform
from argosy.solve.finalists.candidate import Candidate, diverse, on_pools, single_stages
from argosy.solve.finalists.incumbents import Incumbents
from argosy.solve.finalists.judge import Judge
from argosy.solve.finalists.verdict import ExactTrial, Verdict, certify
from argosy.solve.parts import parts_of
from argosy.solve.proof import Proof, widest_proof
from argosy.solve.search.frontier import Branch
from argosy.solve.search.grid import all_cuts, coarse_cuts
from argosy.solve.search.kinds import ground_of
from argosy.solve.search.menu import Menu
from argosy.solve.search.pipeline import PlanSearch
from argosy.solve.search.reach import promising_shapes, reach_bound, shape_bounds
from argosy.solve.search.shape import MOST_STAGES, Shape, estimated, hoped
from argosy.solve.settings import FEW_DEVICES, SearchProgress, Settings, played_scope, search_scope
from argosy.solve.unmeasured import why_no_plan
from argosy.space.enumerate import Scope, quick_parts, stage_options, stage_parts, with_splits
from argosy.space.granularity import granularities
from argosy.space.option import Option, Vector
from argosy.space.pool import Pool, able_pools
from argosy.space.price import Prices
from argosy.space.prune import Counters
from argosy.workload.chain import Chain

# A search aims at this share of the gap that it may leave; dominance may be wrong by the rest.
_AIM = 0.9
# One branch is searched for this many steps before the branch with the least bound is looked up
# again.
_STEPS = 64
# A first plan is searched below this factor times the bound of its shape.
_NEAR = 1.15
# On a large cluster level 1 closes a shape whose lower bound is within 2 % of the best plan.
_CLOSE = 1.02
# On a large cluster level 1 tries no pipelines of a shape if they are estimated slower than this
# factor times the best plan.
_HARDLY = 1.1
# Level 1 searches again if the exact engine finds its best plan slower than judged by more than
# this factor.
_MISLED = 1.02
# The finalists that the exact engine simulates on level 1 have about this many tasks in all.
_TASKS = 1_500
# On a large cluster level 1 simulates at most _PLAYS plans until one is as fast as judged, and only
# finalists within the factor _LIKELY of the best.
_PLAYS, _LIKELY = 2, 1.005
# Level 1 searches at most this many parts of a cluster by themselves.
_PARTS = 2
# Level 1 searches finer units on at most this many devices, if at most this many vectors of units
# can be left.
_REFINED, _FEW_STATES = 32, 160
# Rounds of _STEPS steps that level 1 spends on a proof for few devices, and the gap at which it
# stops.
_QUICK_ROUNDS, _QUICK_GAP = 36, 0.003


class PoolSearch:
    """A search that covers all plans on some pools of a cluster; ``run`` returns the best."""

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        global_batch: int,
        settings: Settings,
        model: ComputeModel,
        pools: tuple[Pool, ...] | None = None,
        *,
        is_part: bool = False,
    ) -> None:
        """Prepare a search on ``pools``, by default all that can run the chain; ``is_part`` tells
        whether they are part of a larger search."""
        self.chain = chain
        self.cluster = cluster
        self.global_batch = global_batch
        self.settings = settings
        self.model = model
        self.is_part = is_part
        self.level = 1
        """The level that is currently searched."""
        self.budget = Budget(settings.time_budget, settings.memory_budget)
        self.pools = pools or able_pools(chain, cluster, model)
        if not self.pools:
            lost = all(device.speed.at(0) == 0 for device in cluster.devices)
            why = "is there at time 0" if lost else f"has {chain.dtype}, the dtype of {chain.name}"
            raise NothingFitsError(f"no device of {cluster!r} {why}")
        self.num_devices = sum(pool.count for pool in self.pools)
        self.prices = Prices(chain, self.pools, model)
        self.counters = Counters()
        scope = played_scope(settings, self.pools)
        judge = Judge(self.prices, cluster, guesses=True, is_late=self._is_late)
        trial = ExactTrial(
            self.prices, cluster, at_time_zero(cluster), scope, settings.executor, judge.played
        )
        self.incumbents = Incumbents(judge, trial, settings.ceiling)
        self.winners: list[Candidate] = []
        """Winners of level 1 and of parts of the cluster; other results are simulated against
        them."""
        self.interrupted = False
        self.left_open = math.inf
        """The least bound of the plans that the search of these units has skipped."""
        self.branches: list[Branch] = []
        self.pending: list[float] = []
        """Bounds of shapes that were not searched yet."""
        self._batch_shapes = list(batch_shapes(global_batch, settings.schedules))
        self.finished: Proof = (0.0, (), 1)
        """The last proof that was completed, at first that of level 1."""
        self.proofs: list[Proof] = []  # of level 1, one for each of the units that it searched
        self.units = self.settings.units or next(iter(granularities(self.pools)))

    def run(self) -> Plan:
        """Return the best plan with its certificate; an interrupt ends the search with the best
        plan so far."""
        try:
            self.quick()
            if self.settings.level > 1:
                self.prove()
        except KeyboardInterrupt:
            if not self.incumbents.found or not self.settings.ends_early:
                raise
            self.interrupted = True
            self.left_open = self.free_bound
        return self.finish()

    def quick(self) -> None:
        """Run level 1: add the best plan, simulated exactly, to the incumbents."""
        self.level = 1
        self._search_levels()
        if not self.incumbents.found:
            raise NothingFitsError(
                why_no_plan(self.prices, self.cluster, self.global_batch, self.settings)
            )
        self._play_beside()
        if (
            not self.is_part
            and self.settings.units is None
            and self.incumbents.best > self.bound * 1.005
        ):
            self._search_parts()  # otherwise no part has a plan that is worth it
        self.winners.append(self._decide().winner)
        last = (self.bound, self.units, 1)
        self.finished = widest_proof([*self.proofs, last], self.incumbents.best)

    def _search_parts(self) -> None:
        """Search parts of a small cluster alone, if their throughput allows a better plan, and
        pipelines without replicas on few devices."""
        searched = 0
        if self.num_devices <= FEW_DEVICES and self.settings.replicas is None:
            everything = range(len(self.pools))
            self._search_part(replace(self.settings, replicas=1), self.pools, everything)
        for bound, part, indices in parts_of(self.prices, self._batch_shapes):
            if searched == _PARTS or self.budget.is_spent:
                return
            if bound >= self.incumbents.best:
                continue
            searched += 1
            self._search_part(self.settings, part, indices)

    def _search_part(
        self, settings: Settings, pools: tuple[Pool, ...], indices: Sequence[int]
    ) -> None:
        """Add the plan that level 1 finds on some pools with their numbers, or under narrower
        settings."""
        settings = replace(settings, level=1, progress=None)
        job = (self.chain, self.cluster, self.global_batch, settings, self.model)
        search = PoolSearch(*job, pools=pools, is_part=True)
        try:
            search.quick()
        except NothingFitsError:
            return
        self.winners.append(on_pools(search.winners[-1], self.prices, indices))
        self.incumbents.add(self.winners[-1])

    def prove(self) -> None:
        """Run level 2: improve on level 1 and raise the bound."""
        self.level = 2
        self.incumbents.judge.stop_guessing()
        self.incumbents.stop_folding()
        self._search_levels()

    def _search_levels(self) -> None:
        """Search all granularities, or as many as the level covers."""
        levels = [self.settings.units] if self.settings.units else list(granularities(self.pools))
        has_plan = self.level > 1
        for units in levels:
            if units != levels[0] and not has_plan and not self._may_fit(units):
                continue
            if units != levels[0] and has_plan and not self._refines(units):
                break
            self._search(units)
            has_plan = bool(self.incumbents.found)
            if self._is_late():
                return
            if has_plan and self.level == 1:
                self._prove_quickly()

    def _prove_quickly(self) -> None:
        """Tighten the bounds of these units, if there are few devices and all cuts are searched."""
        is_fine = all(branch.search.menu.grid.loose is None for branch in self.branches)
        if self.num_devices <= FEW_DEVICES and is_fine and not self.is_part:
            self._prove(_QUICK_ROUNDS, _QUICK_GAP)
        self.proofs.append((self.bound, self.units, 1))

    def _refines(self, units: Vector) -> bool:
        """Return whether these units are searched although coarser ones have a plan."""
        if self.level > 1:
            return True
        counts = self.scope(units).counts(self.pools)
        return (
            self.num_devices <= _REFINED and math.prod(count + 1 for count in counts) <= _FEW_STATES
        )

    def _may_fit(self, units: Vector) -> bool:
        """Return whether a finer granularity is worth searching, if a coarser one has no plan."""
        scope = self.scope(units)
        if not is_quick(scope.counts(self.pools)):
            return True
        return find_fit(self.prices, self._batch_shapes, scope) is not None

    @cached_property
    def free_bound(self) -> float:
        """Return a lower bound on every plan, of any granularity, searched or not."""
        bounds = shape_bounds(self.prices, self._batch_shapes)
        return min(bounds, default=math.inf)

    @property
    def bound(self) -> float:
        """Return a lower bound on every plan in the scope of the units that were searched last."""
        bounds = [branch.bound - self.slack for branch in self.branches]
        bounds += [self.left_open, self.incumbents.least_suspect]
        return min(self.incumbents.best, *bounds, *self.pending)

    @property
    def _is_quick(self) -> bool:
        """Return whether unpromising shapes are left open with their bounds, as on level 1 of a
        large cluster."""
        return self.level == 1 and self.settings.prune and self.num_devices > FEW_DEVICES

    def scope(self, units: Vector) -> Scope:
        settings = self.settings
        if self.level < settings.level:
            # Level 2 starts from a plan without mixed stages, whose search takes long.
            settings = replace(settings, level=self.level, mixed=settings.mixed and None)
        return with_splits(search_scope(settings, self.pools, units), self.prices)

    def _search(self, units: Vector) -> None:
        for _ in range(3):
            judged = self._look(units)
            self.incumbents.confirm(_PLAYS if self._is_quick else math.inf)
            if self.level > 1:
                break
            # Plans that are slower than judged were closed without a search.
            self.left_open = min(self.left_open, judged)
            if self.incumbents.best <= judged * _MISLED:
                break
        if self.level > 1 or not self.settings.prune:
            self._prove(math.inf)

    def _look(self, units: Vector) -> float:
        """Open every shape that may have a better plan; return the time of the best plan as judged
        meanwhile."""
        scope = self.scope(units)
        self.units, self.branches, self.left_open = units, [], math.inf
        proves = self.level > 1 or not self.settings.prune
        counts = scope.counts(self.pools)
        ground = ground_of(self.cluster, self.pools, units, is_quick=not proves)
        grid = all_cuts(self.prices) if proves else coarse_cuts(self.prices)
        self.menus: dict[int, dict[Vector, list[Option]]] = {}
        shapes = promising_shapes(self.prices, self._batch_shapes, scope)
        self.pending = [bound for bound, _ in shapes]
        for bound, shape in shapes:
            self.pending.pop(0)
            if self._is_late() or (self.settings.prune and bound >= self._goal):
                self._leave(bound)
                continue
            is_alone = self._is_quick and estimated(bound, shape) > _HARDLY * self.incumbents.best
            parts = stage_parts(self.prices, shape.micro_batch_size, scope, self.counters)
            if self.settings.prune:
                most = self._highest_useful_bound(bound, shape, is_alone=is_alone)
                bound = reach_bound(self.prices, shape, parts, counts, bound, most)
                if self._is_closed(bound) and not is_alone:
                    self._leave(bound)
                    continue
            if is_alone:
                parts = quick_parts(
                    self.prices, parts, self.incumbents.best / shape.num_micro_batches
                )
            options = stage_options(
                self.prices, shape.micro_batch_size, scope, self.counters, parts
            )
            self.menus[shape.micro_batch_size] = options
            if is_alone:
                self._leave(bound)
                alone = single_stages(self.prices, shape, options, self.incumbents.best)
                self.incumbents.keep(shape, list(alone), units)
            if is_alone or not options:
                continue
            menu = Menu(self.prices, options, shape, ground, grid)
            self._first_look(menu, counts, bound, units)
            if self.level > 1:
                self.incumbents.confirm()
                self._report()
        if self.num_devices <= FEW_DEVICES:
            self.incumbents.reshape(self._batch_shapes, scope)
        for best in self.incumbents.found[:1] if not self._is_late() else ():
            self.incumbents.improve(best, self.menus.get(best.shape.micro_batch_size, {}))
        return self.incumbents.best

    def _is_late(self) -> bool:
        """Return whether the search ends as soon as it can: it has a plan, and the budget is
        spent."""
        return bool(self.incumbents.found) and self.budget.is_spent

    def _highest_useful_bound(self, bound: float, shape: Shape, *, is_alone: bool) -> float:
        """Return the bound of a shape above which a still higher one changes nothing."""
        most = min(self._goal, hoped(bound, shape))
        if not is_alone:
            return most
        # A bound above one that stays open does not raise the certificate.
        return min([most, self.left_open, *(branch.bound for branch in self.branches)])

    def _is_closed(self, bound: float) -> bool:
        """Return whether a shape with this bound is not searched any further."""
        is_close = self._is_quick and bound * _CLOSE >= self.incumbents.best
        return bound >= self._goal or is_close

    def _leave(self, bound: float) -> None:
        self.counters.add("bound")
        self.left_open = min(self.left_open, bound)

    @property
    def slack(self) -> float:
        """Return the seconds by which dominance may be wrong, a fraction of the gap that is aimed
        at."""
        is_used = self.level > 1 and self.settings.prune
        return (1 - _AIM) * self.settings.gap * self.free_bound if is_used else 0.0

    @property
    def _goal(self) -> float:
        """Return the seconds below which a plan must be to be worth searching."""
        return self.incumbents.best / (1 + (_AIM * self.settings.gap if self.level > 1 else 0.0))

    def _first_look(self, menu: Menu, counts: Vector, bound: float, units: Vector) -> None:
        """Add the search of a shape, after judging the plans that its bounds lead to at once.

        As long as there is no plan to beat, these are the plans near the bound, which takes less
        time; otherwise all of them.
        """
        hopes = (_NEAR * bound, hoped(bound, menu.shape)) if not self.incumbents.found else ()
        menu.is_late = self._is_late
        for hope in (*hopes, math.inf):
            try:
                branch = self._open(menu, counts, min(self.incumbents.best, hope), units)
            except TimeIsUpError:
                self._leave(bound)
                return
            if self.incumbents.best <= branch.search.upper:
                break  # what the tables left out cannot win
            if self._is_quick and self.incumbents.found:
                self._leave(branch.search.upper)
                break
        self.branches.append(branch)

    def _open(self, menu: Menu, counts: Vector, upper: float, units: Vector) -> Branch:
        most_stages = min(sum(counts), MOST_STAGES)
        most = upper if self.settings.prune else math.inf
        search = PlanSearch(menu, counts, most_stages, most, slack=None, only_kind=False)
        self.incumbents.settle(
            menu.shape, list(search.descend(self.incumbents.best)), units, menu.grid.bundle
        )
        return Branch(search=search, counts=counts, most_stages=most_stages)

    def _prove(self, most_rounds: float, gap: float = 0.0) -> None:
        """Search best-first over all shapes, until the gap is small enough; ``gap`` is what level 1
        leaves."""
        rounds = 0
        while (rounds := rounds + 1) <= most_rounds and not self.budget.is_spent:
            self.incumbents.confirm()
            branch = min(self.branches, key=lambda branch: branch.bound, default=None)
            least = branch.bound if branch is not None else math.inf
            goal = self._goal / (1 + gap) + self.slack
            self._report()
            doubtful = self.incumbents.least_open_suspect + self.slack
            if min(least, doubtful) >= goal:
                self.finished = self.bound, self.units, self.level
                return
            if doubtful <= least:
                self.incumbents.clear_suspect()
            elif branch is not None:
                try:
                    parts = self._split(branch)
                except TimeIsUpError:
                    return  # the branch keeps its bound
                rounds += parts
                if not parts:
                    self._advance(branch, goal)

    def _split(self, branch: Branch) -> int:
        """Split a branch; return the number of its parts."""
        prunes = self.settings.prune
        parts = branch.split(
            self.incumbents.best if prunes else math.inf, self.slack if prunes else None
        )
        if parts or branch.is_whole:
            self.branches.remove(branch)
        self.branches += parts
        for part in parts:
            if self._is_late():
                break
            plans = list(part.search.descend(self.incumbents.best))
            self.incumbents.keep(part.search.shape, plans, self.units)
        return len(parts)

    def _advance(self, branch: Branch, goal: float) -> None:
        upper = self.incumbents.best if self.settings.prune else math.inf
        shape = branch.search.shape
        plans = branch.search.advance(upper, goal, _STEPS)
        dived = branch.search.dive(upper)
        self.incumbents.keep(
            shape, [plan for _, plan in plans] + ([dived] if dived else []), self.units
        )
        self.incumbents.suspect(shape, plans, self.units)

    def _report(self) -> None:
        if self.settings.progress is not None and self.level == self.settings.level:
            judged = self.incumbents.judge.judged
            self.settings.progress(
                SearchProgress(seconds=self.incumbents.best, bound=self.bound, candidates=judged)
            )

    def _finalists(self) -> list[Candidate]:
        """Return as many finalists as the exact engine simulates in a fraction of the search
        time."""
        found = self.incumbents.found
        tasks = 4 * len(found[0].plan) * found[0].shape.num_micro_batches
        most = max(1, _TASKS // tasks) if self.level == 1 else max(4, 20 * _TASKS // tasks)
        return diverse(self.incumbents.likely(_LIKELY) if self._is_quick else found, min(most, 8))

    def _decide(self) -> Verdict:
        return self.incumbents.trial.decide([*self._finalists(), *self.winners])

    def _play_beside(self) -> None:
        """Simulate the finalists, and the plans that an expert would write by hand
        (``solve.finalists.beside``)."""
        verdict = (trial := self.incumbents.trial).decide(self._finalists())
        if self.settings.units is None or self.settings.replicas is not None:
            menus = self.menus if self.num_devices <= _REFINED else {}
            verdict = with_uniform(
                verdict, trial, self.incumbents.judge, self._batch_shapes, 12 * _TASKS, menus
            )
        self.incumbents.add(verdict.winner)

    def finish(self) -> Plan:
        """Return the best plan that was simulated, with its certificate.

        If time is up before a proof is completed, the certificate holds for the scope of the last
        completed one.
        """
        bound, verdict = self.bound, self._decide()
        if not self.interrupted and bound < self.finished[0]:
            bound, self.units, self.level = self.finished
        bounds, trial = (bound, self.free_bound), self.incumbents.trial
        plan = certify(verdict, self.incumbents.found, bounds, trial, self.scope(self.units))
        judged, pruned = self.incumbents.judge.judged, tuple(sorted(self.counters.removed.items()))
        search = Search(cpu_seconds=self.budget.seconds, candidates=judged, pruned=pruned)
        assert plan.predicted is not None and plan.certificate is not None
        if self.settings.progress is not None and not self.interrupted:
            seconds, least = plan.predicted.iteration_seconds, plan.certificate.lower_bound_seconds
            self.settings.progress(SearchProgress(seconds=seconds, bound=least, candidates=judged))
        return replace(plan, search=search)
