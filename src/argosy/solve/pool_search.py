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
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from argosy.cluster.lasting import at_time_zero
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import NothingFitsError
from argosy.plan.plan import Plan, Search
from argosy.solve import effort, spanning
from argosy.solve.budget import Budget, TimeIsUpError
from argosy.solve.feasible import batch_shapes, find_fit, is_quick
from argosy.solve.finalists.beside import with_uniform
from argosy.solve.finalists.candidate import Candidate, single_stages
from argosy.solve.finalists.incumbents import Incumbents
from argosy.solve.finalists.judge import Judge
from argosy.solve.finalists.verdict import ExactTrial, Verdict, certify
from argosy.solve.narrower import NarrowerSearches
from argosy.solve.proof import Proof, widest_proof
from argosy.solve.search.frontier import Branch
from argosy.solve.search.grid import all_cuts, coarse_cuts
from argosy.solve.search.kinds import ground_of
from argosy.solve.search.menu import Menu
from argosy.solve.search.pipeline import PlanSearch
from argosy.solve.search.reach import promising_shapes, reach_bound, shape_bounds
from argosy.solve.search.shape import MOST_STAGES, Shape, estimated, hoped
from argosy.solve.settings import FEW_DEVICES, SearchProgress, Settings, played_scope, search_scope
from argosy.solve.unmeasured import why_no_device, why_no_plan
from argosy.space.enumerate import Scope, quick_parts, stage_options, stage_parts, with_splits
from argosy.space.granularity import granularities
from argosy.space.option import Option, Vector
from argosy.space.pool import Pool, able_pools
from argosy.space.price import Prices
from argosy.space.prune import Counters
from argosy.workload.chain import Chain

# A search aims at this share of the gap that it may leave; dominance may be wrong by the rest.
_AIM = 0.9
# A first plan is searched below this factor times the bound of its shape.
_NEAR = 1.15


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
            raise NothingFitsError(why_no_device(chain, cluster))
        self.num_devices = sum(pool.count for pool in self.pools)
        self.prices = Prices(chain, self.pools, model)
        self.counters = Counters()
        scope = played_scope(settings, self.pools)
        judge = Judge(self.prices, cluster, guesses=True, is_late=self.is_late)
        trial = ExactTrial(
            self.prices, cluster, at_time_zero(cluster), scope, settings.executor, judge.played
        )
        self.incumbents = Incumbents(judge, trial, settings.ceiling)
        self.winners: list[Candidate] = []
        """Winners of level 1 and of narrower searches, which play against other results."""
        self.narrower = NarrowerSearches(self)
        self.spanning = spanning.SpanningSearch(self)
        self.interrupted = False
        self.left_open = self.left_across = math.inf
        """The least bounds of the plans that the search of these units has skipped, without and
        with groups across nodes."""
        self.branches: list[Branch] = []
        self.pending: list[float] = []  # bounds of shapes that were not searched yet
        self.shapes = list(batch_shapes(global_batch, settings.schedules))
        self.finished: Proof = (0.0, (), 1, True)
        """The last proof that was completed, at first that of level 1."""
        self.proofs: list[Proof] = []  # of level 1, one for each of the units that it searched
        self.proven: dict[Scope, float] = {}  # their bounds, which level 2 may not reach
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
            for search in (self, *self.narrower.widths.values()):
                search.interrupted, search.left_open = True, search.free_bound
        return self.finish()

    def quick(self) -> None:
        """Run level 1: add the best plan, simulated exactly, to the incumbents."""
        self.level = 1
        self._search_levels()
        if not self.incumbents.found and self.settings.may_span:
            self.settings = replace(self.settings, spanning=True)
            self._search_levels()
        if not self.incumbents.found:
            raise NothingFitsError(
                why_no_plan(self.prices, self.cluster, self.global_batch, self.settings)
            )
        self._play_beside()
        self._add_winners(self.narrower.quick())
        if self.num_devices <= effort.REFINED:
            self.spanning.mix()
        self.winners.append(self.winner)
        self._add_proofs()
        spans = spanning.has_spanning_group(self.incumbents.found[0].plan)
        self.finished = widest_proof(self.proofs, self.incumbents.best, spans=spans)

    def _add_winners(self, winners: Iterable[Candidate]) -> None:
        """Add plans of narrower searches, which may lead elsewhere."""
        for winner in winners:
            self.winners.append(winner)
            self.incumbents.add(winner)

    def prove(self) -> None:
        """Run level 2: improve on level 1 and raise the bound."""
        self.level = 2
        self.incumbents.judge.stop_guessing()
        self.incumbents.stop_folding()
        self._search_levels()
        self._add_winners(self.narrower.prove())
        self.spanning.mix()

    def _search_levels(self) -> None:
        """Search all granularities, or as many as the level covers."""
        levels = [self.settings.units] if self.settings.units else list(granularities(self.pools))
        has_plan = self.level > 1
        for units in levels:
            if units != levels[0] and not has_plan and not self._may_fit(units):
                continue
            counts = self.scope(units).counts(self.pools)
            is_refined = self.level > 1 or effort.is_refined(self.num_devices, counts)
            if units != levels[0] and has_plan and not is_refined:
                break
            self._search(units)
            if not self.is_late():
                self.spanning.search(self._prove_quickly() if self.level == 1 else math.inf)
            has_plan = bool(self.incumbents.found)
            if self.is_late():
                return
            if has_plan and self.level == 1:
                self._add_proofs()

    def _prove_quickly(self) -> float:
        """Tighten the bounds of these units, if there are few devices and all cuts are searched;
        return the rounds that are left for groups across nodes."""
        if not self.settings.prune:
            return math.inf
        is_fine = all(branch.search.menu.grid.loose is None for branch in self.branches)
        if self.num_devices > FEW_DEVICES or not is_fine or self.is_part:
            return 0
        if self.incumbents.found:
            self.raise_bound(effort.QUICK_ROUNDS, effort.QUICK_GAP, spans=False)
        return effort.SPANNING_ROUNDS

    def _add_proofs(self) -> None:
        """Add what level 1 has proven of these units, without and with groups across nodes."""
        scope = self.scope(self.units)
        if scope.spanning:
            self.proofs.append((self._bound(spans=False), self.units, 1, False))
            self.proven[spanning.inside_nodes(scope)] = self._bound(spans=False)
        self.proofs.append((self.bound, self.units, 1, True))
        self.proven[scope] = self.bound

    def _may_fit(self, units: Vector) -> bool:
        """Return whether a finer granularity is worth searching, if a coarser one has no plan."""
        scope = self.scope(units)
        if not is_quick(scope.counts(self.pools)):
            return True
        return find_fit(self.prices, self.shapes, scope) is not None

    @property
    def free_bound(self) -> float:
        """Return a lower bound on every plan, of any granularity, searched or not."""
        spans = self.scope(self.units).spanning
        return min(shape_bounds(self.prices, self.shapes, spanning=spans), default=math.inf)

    @property
    def bound(self) -> float:
        """Return a lower bound on every plan in the scope of the units that were searched last."""
        return self._bound(spans=True)

    def _bound(self, *, spans: bool) -> float:
        """Return the bound without or with plans that have a tensor-parallel group across nodes."""
        bounds = [b.bound - self.slack for b in self.branches if spans or not b.spans]
        bounds += [self.left_open, self.incumbents.least_suspect, *self.pending]
        return min(self.incumbents.best, *bounds, *([self.left_across] if spans else []))

    @property
    def is_quick(self) -> bool:
        """Return whether unpromising shapes are left open with their bounds, as on level 1 of a
        large cluster."""
        return self.level == 1 and self.settings.prune and self.num_devices > FEW_DEVICES

    def scope(self, units: Vector, level: int | None = None) -> Scope:
        settings, level = self.settings, level or self.level
        if level < settings.level:
            # Level 2 starts from a plan without mixed stages, whose search takes long.
            settings = replace(settings, level=level, mixed=settings.mixed and None)
        return with_splits(search_scope(settings, self.pools, units), self.prices)

    def _search(self, units: Vector) -> None:
        for _ in range(3):
            judged = self._look(units)
            self.incumbents.confirm(effort.PLAYS if self.is_quick else math.inf)
            if self.level > 1:
                break
            # Plans that are slower than judged were closed without a search.
            self.left_open = min(self.left_open, judged)
            if self.incumbents.best <= judged * effort.MISLED:
                break
        if self.level > 1 or not self.settings.prune:
            self.raise_bound(math.inf, spans=False)

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
        inside = spanning.inside_nodes(scope)
        shapes = promising_shapes(self.prices, self.shapes, inside)
        self.pending = [bound for bound, _ in shapes]
        across = spanning.spanning_shapes(self.prices, self.shapes, scope)
        self.left_across = min((bound for bound, _ in across), default=math.inf)
        for bound, shape in shapes:
            self.pending.pop(0)
            if self.is_late() or (self.settings.prune and bound >= self.goal):
                self._leave(bound)
                continue
            size, best = shape.micro_batch_size, self.incumbents.best
            is_alone = self.is_quick and estimated(bound, shape) > effort.HARDLY * best
            parts = stage_parts(self.prices, size, inside, self.counters)
            if self.settings.prune:
                most = self._highest_useful_bound(bound, shape, is_alone=is_alone)
                bound = reach_bound(self.prices, shape, parts, counts, bound, most)
                if self._is_closed(bound) and not is_alone:
                    self._leave(bound)
                    continue
            if is_alone:
                parts = quick_parts(self.prices, parts, best / shape.num_micro_batches)
            options = stage_options(self.prices, size, inside, self.counters, parts)
            self.menus[size] = options
            if is_alone:
                self._leave(bound)
                alone = single_stages(self.prices, shape, options, best)
                self.incumbents.keep(shape, list(alone), units)
            if is_alone or not options:
                continue
            menu = Menu(self.prices, options, shape, ground, grid)
            self.first_look(menu, counts, bound, units)
            if self.level > 1:
                self.incumbents.confirm()
                self._report()
        self.vary(scope)
        return self.incumbents.best

    def vary(self, scope: Scope) -> None:
        """Judge variants of the best plans."""
        if self.num_devices <= FEW_DEVICES:
            self.incumbents.reshape(self.shapes, scope)
        for best in self.incumbents.found[:1] if not self.is_late() else ():
            self.incumbents.improve(best, self.menus.get(best.shape.micro_batch_size, {}))

    def is_late(self) -> bool:
        """Return whether the search ends as soon as it can: it has a plan, and the budget is
        spent."""
        return bool(self.incumbents.found) and self.budget.is_spent

    def _highest_useful_bound(self, bound: float, shape: Shape, *, is_alone: bool) -> float:
        """Return the bound of a shape above which a still higher one changes nothing."""
        most = min(self.goal, hoped(bound, shape))
        if not is_alone:
            return most
        # A bound above one that stays open does not raise the certificate.
        return min([most, self.left_open, *(branch.bound for branch in self.branches)])

    def _is_closed(self, bound: float) -> bool:
        """Return whether a shape with this bound is not searched any further."""
        is_close = self.is_quick and bound * effort.CLOSE >= self.incumbents.best
        return bound >= self.goal or is_close

    def _leave(self, bound: float) -> None:
        self.counters.add("bound")
        self.left_open = min(self.left_open, bound)

    @property
    def slack(self) -> float:
        """Return the seconds by which dominance may be wrong, a fraction of the gap that is aimed
        at."""
        return self._slack if self.level > 1 and self.settings.prune else 0.0

    @cached_property
    def _slack(self) -> float:
        """Keep the slack when the scope grows: open branches were pruned with it."""
        return (1 - _AIM) * self.settings.gap * self.free_bound

    @property
    def goal(self) -> float:
        """Return the seconds below which a plan must be to be worth searching."""
        return self.incumbents.best / (1 + (_AIM * self.settings.gap if self.level > 1 else 0.0))

    def first_look(self, menu: Menu, counts: Vector, bound: float, units: Vector) -> None:
        """Add the search of a shape, after judging the plans that its bounds lead to at once.

        As long as there is no plan to beat, these are the plans near the bound, which takes less
        time; otherwise all of them.
        """
        hopes = (_NEAR * bound, hoped(bound, menu.shape)) if not self.incumbents.found else ()
        menu.is_late = self.is_late
        for hope in (*hopes, math.inf):
            try:
                branch = self._open(menu, counts, min(self.incumbents.best, hope), units)
            except TimeIsUpError:
                self._leave(bound)
                return
            if self.incumbents.best <= branch.search.upper:
                break  # what the tables left out cannot win
            if self.is_quick and self.incumbents.found:
                self._leave(branch.search.upper)
                break
        self.branches.append(branch)

    def _open(self, menu: Menu, counts: Vector, upper: float, units: Vector) -> Branch:
        most_stages = min(sum(counts), MOST_STAGES)
        most = upper if self.settings.prune else math.inf
        search = PlanSearch(menu, counts, most_stages, most, slack=None, only_kind=menu.spanning)
        self.incumbents.settle(
            menu.shape, list(search.descend(self.incumbents.best)), units, menu.grid.bundle
        )
        return Branch(search=search, counts=counts, most_stages=most_stages, spans=menu.spanning)

    def raise_bound(
        self, most_rounds: float, gap: float = 0.0, *, spans: bool | None = None
    ) -> None:
        """Search best-first over all shapes, or only with or without groups across nodes, until the
        gap is small enough; ``gap`` is what level 1 leaves."""
        rounds = 0
        while (rounds := rounds + 1) <= most_rounds and not self.budget.is_spent:
            self.incumbents.confirm()
            branches = (branch for branch in self.branches if spans in (None, branch.spans))
            branch = min(branches, key=lambda branch: branch.bound, default=None)
            least = branch.bound if branch is not None else math.inf
            goal = self.goal / (1 + gap) + self.slack
            self._report()
            doubtful = self.incumbents.least_open_suspect + self.slack
            if min(least, doubtful) >= goal:
                if not spans:
                    is_all = spans is None
                    self.finished = self._bound(spans=is_all), self.units, self.level, is_all
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
            if self.is_late():
                break
            plans = list(part.search.descend(self.incumbents.best))
            self.incumbents.keep(part.search.shape, plans, self.units)
        return len(parts)

    def _advance(self, branch: Branch, goal: float) -> None:
        upper = self.incumbents.best if self.settings.prune else math.inf
        plans, all_plans = branch.advance(upper, goal)
        self.incumbents.keep(branch.search.shape, all_plans, self.units)
        self.incumbents.suspect(branch.search.shape, plans, self.units)

    def _report(self) -> None:
        if self.settings.progress is not None and self.level == self.settings.level:
            judged = self.incumbents.judge.judged
            self.settings.progress(
                SearchProgress(seconds=self.incumbents.best, bound=self.bound, candidates=judged)
            )

    @property
    def winner(self) -> Candidate:
        """Return the best plan that was simulated."""
        return self._decide(*self.winners).winner

    def _decide(self, *others: Candidate) -> Verdict:
        finalists = effort.finalists(self.incumbents, self.level, is_quick=self.is_quick)
        return self.incumbents.trial.decide([*finalists, *others])

    def _play_beside(self) -> None:
        """Simulate the finalists, and the plans that an expert would write by hand
        (``solve.finalists.beside``)."""
        verdict, trial = self._decide(), self.incumbents.trial
        if self.settings.units is None or self.settings.replicas is not None:
            menus = self.menus if self.num_devices <= effort.REFINED else {}
            verdict = with_uniform(
                verdict, trial, self.incumbents.judge, self.shapes, 12 * effort.TASKS, menus
            )
        self.incumbents.add(verdict.winner)

    def _stated(self, proof: Proof) -> tuple[float, Scope]:
        """Return the bound and the scope of a proof; level 1 may have proven more of the scope."""
        bound, units, level, spans = proof
        scope = self.scope(units, level)
        scope = scope if spans else spanning.inside_nodes(scope)
        return max(bound, min(self.proven.get(scope, 0.0), self.incumbents.best)), scope

    def finish(self) -> Plan:
        """Return the best plan that was simulated, with its certificate.

        If time is up before a proof is completed, the certificate holds for the scope of the last
        completed one.
        """
        best, verdict = self.incumbents.found[0].plan, self._decide(*self.winners)
        spans = not self.narrower.covers(best)  # otherwise the narrower search has its own proof
        proofs: list[Proof] = [(self._bound(spans=spans), self.units, self.level, spans)]
        is_about_it = self.finished[-1] or not spans or not spanning.has_spanning_group(best)
        if not self.interrupted and is_about_it:
            proofs.append(self.finished)
        bound, scope = max(map(self._stated, proofs), key=lambda stated: stated[0])
        bounds, trial = (bound, self.free_bound), self.incumbents.trial
        plan = certify(verdict, self.incumbents.found, bounds, trial, scope)
        plan = self.narrower.covered(plan, verdict.winner.plan)
        judged, pruned = self.incumbents.judge.judged, tuple(sorted(self.counters.removed.items()))
        search = Search(cpu_seconds=self.budget.seconds, candidates=judged, pruned=pruned)
        assert plan.predicted is not None and plan.certificate is not None
        if self.settings.progress is not None and not self.interrupted:
            seconds, least = plan.predicted.iteration_seconds, plan.certificate.lower_bound_seconds
            self.settings.progress(SearchProgress(seconds=seconds, bound=least, candidates=judged))
        return replace(plan, search=search)
