"""Find the best plan of many restricted searches: equal numbers of replicas in all stages, or only
plans that a target system runs.

A search lets every stage choose by itself, so properties that all stages share are fixed from
outside:

    (1)  Plans with equal shares are searched once per number of replicas R.
    (2)  Plans for a system with one grid (``plan.targets``) are searched once per R and
         tensor-parallel width T.
    (3)  If the best plan of a search differs between stages in another property that must be equal
         for the target (recomputation, ZeRO level, context or expert parallelism), the search is
         repeated with every single value of it, unless its lower bound is no better than the best
         plan so far.

The searches share one time budget. The least of their bounds is the bound of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan, Recompute
from argosy.plan.targets import Target, position_parts
from argosy.solve.budget import Budget
from argosy.solve.effort import ROOM
from argosy.solve.pool_search import PoolSearch
from argosy.solve.search.shape import MOST_STAGES
from argosy.solve.settings import FEW_DEVICES, Settings, search_scope
from argosy.space.enumerate import with_splits
from argosy.space.granularity import even_unit, node_unit
from argosy.space.pool import able_pools
from argosy.space.price import widest
from argosy.space.widths import node_widths
from argosy.workload.chain import Chain


class EvenSearch:
    """A sequence of restricted searches; ``run`` returns the best plan, then those of other
    searches."""

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        global_batch: int,
        settings: Settings,
        model: ComputeModel,
    ) -> None:
        self.job = (chain, cluster, global_batch)
        self.settings = settings
        self.model = model
        self.pools = able_pools(chain, cluster, model)
        self.budget = Budget(settings.time_budget, settings.memory_budget)
        self.plans: list[Plan] = []
        self.bounds = [math.inf]
        self.reason: InfeasibleError | None = None
        self.interrupted = False

    def run(self) -> list[Plan]:
        if not self.pools:  # the plain search raises the error with the reason
            return [PoolSearch(*self.job, self.settings, self.model).run()]
        variants = list(self.variants())
        for at, variant in enumerate(variants):
            if self.interrupted:
                break
            share = (self.settings.time_budget - self.budget.seconds) / (len(variants) - at)
            self._search(replace(variant, time_budget=share))
        if not self.plans:
            raise self.reason or InfeasibleError(
                f"No plan was found that {self._name} runs. Try another cluster or batch."
            )
        best = min(self.plans, key=_seconds)
        bound = min(*self.bounds, _seconds(best))
        assert best.certificate is not None
        target = self.settings.target
        scope = best.certificate.scope + (f", for {target.full_name}" if target is not None else "")
        certificate = replace(
            best.certificate, lower_bound_seconds=bound, gap=_seconds(best) / bound - 1, scope=scope
        )
        return [
            replace(best, certificate=certificate),
            *(plan for plan in self.plans if plan is not best),
        ]

    @property
    def _name(self) -> str:
        return (
            "a system with equal shares"
            if self.settings.target is None
            else self.settings.target.full_name
        )

    def variants(self) -> Iterator[Settings]:
        """Yield the settings of each search of (1) and (2), the largest stages first."""
        settings, target = self.settings, self.settings.target
        if target is None:
            for replicas in self._replicas(len(self.job[1].devices)):
                units = settings.units or tuple(
                    even_unit(pool.count, replicas) for pool in self.pools
                )
                yield replace(settings, replicas=replicas, units=units)
        elif not target.one_grid and not any(
            layer.tied_to is not None for layer in self.job[0].layers
        ):
            units = settings.units or tuple(node_unit(pool) for pool in self.pools)
            yield replace(settings, zero=settings.zero or self._levels(target), units=units)
        else:
            yield from self._grids(target)

    def _grids(self, target: Target) -> Iterator[Settings]:
        """Yield the settings of each grid.

        A stage takes R x T devices, or a multiple if sequences are cut. A grid that could use less
        than half of the devices in the longest pipeline is omitted if there are larger ones.
        """
        settings = self.settings
        total = sum(pool.count for pool in self.pools)
        most = max(max(node_widths(pool, widest(self.job[0].layers))) for pool in self.pools)
        widths = range(1, min(most, settings.max_width or most) + 1)
        pairs = [(replicas, width) for replicas in self._replicas(total) for width in widths]
        largest = max(pool.count for pool in self.pools)
        node = math.lcm(*(pool.per_node for pool in self.pools)) if target.whole_hosts else 1
        length = self.job[0].sequence_length
        fitting = [
            (replicas, width)
            for replicas, width in pairs
            if replicas * width <= largest
            and replicas * width % node == 0
            and length % position_parts(width, context=1) == 0
        ]
        long_enough = [pair for pair in fitting if 2 * math.prod(pair) * MOST_STAGES >= total]
        for replicas, width in sorted(
            long_enough or fitting, key=lambda pair: (-math.prod(pair), pair)
        ):
            size = replicas * width
            zero = settings.zero or self._levels(target)
            units = settings.units or tuple(min(size, pool.count) for pool in self.pools)
            yield replace(settings, replicas=replicas, width=width, zero=zero, units=units)

    def _levels(self, target: Target) -> tuple[int, ...]:
        """Return the ZeRO levels to search.

        Level 0 is omitted if there is ZeRO 1, which costs no more and holds less, or if the target
        splits experts over ranks that shard weights. Level 1 of the search tries only the extremes
        on many devices.
        """
        levels = target.levels(MOST_STAGES, self.job[0].optimizer)
        has_experts = any(layer.expert_parameters for layer in self.job[0].layers)
        if 1 in levels or (target.shards_splits and has_experts):
            levels = tuple(level for level in levels if level > 0)
        is_large = self.settings.level == 1 and sum(pool.count for pool in self.pools) > FEW_DEVICES
        return tuple(dict.fromkeys((levels[0], levels[-1]))) if is_large else levels

    def _replicas(self, most: int) -> list[int]:
        return [number for number in range(1, most + 1) if self.job[2] % number == 0]

    def _search(self, settings: Settings) -> None:
        best = (
            min(map(_seconds, self.plans), default=math.inf)
            if settings.target is not None
            else math.inf
        )
        search = PoolSearch(*self.job, replace(settings, ceiling=ROOM * best), self.model)
        self.interrupted = settings.time_budget <= 0 and bool(self.plans)
        try:
            if self.interrupted:
                self.bounds.append(search.free_bound)
                return
            plan = search.run()
        except InfeasibleError as error:
            self.reason = self.reason or error
            self.bounds.append(search.bound)
            return
        except KeyboardInterrupt:
            if not self.plans or not settings.ends_early:
                raise
            self.interrupted = True
            self.bounds.append(search.free_bound)
            return
        self.interrupted = search.interrupted
        assert plan.certificate is not None
        bound = plan.certificate.lower_bound_seconds
        if settings.target is None or settings.target.runs(plan, self.job[0]):
            self.plans.append(plan)
            self.bounds.append(bound)
        elif bound >= best or self.interrupted:
            self.bounds.append(bound)
        else:
            for variant in _parts(settings, settings.target, plan, search):
                self._search(variant)


def _parts(
    settings: Settings, target: Target, plan: Plan, search: PoolSearch
) -> Iterator[Settings]:
    """Yield the settings of (3): this search with single values of the first property in which its
    plan does not match the target."""
    kinds = {stage.recompute for stage in plan.stages}
    scope = with_splits(search_scope(settings, search.pools, search.units), search.prices)
    context, expert = scope.context or (1,), scope.expert or (1,)
    if len(kinds) > 1 and (target.one_recompute or Recompute.SELECTIVE in kinds):
        for choice in _recomputations(scope.recompute, target):
            yield replace(settings, recompute=choice)
    elif len(scope.zero) > 1:
        yield from (replace(settings, zero=(level,)) for level in scope.zero)
    elif len(context) > 1:
        yield from (replace(settings, context=number) for number in context)
    elif len(expert) > 1:
        yield from (replace(settings, expert=number) for number in expert)
    elif settings.width is None:
        widths = {
            width
            for pool in search.pools
            for width in node_widths(pool, widest(search.chain.layers))
        }
        allowed_widths = (width for width in sorted(widths) if scope.allows_width(width))
        yield from (replace(settings, width=width) for width in allowed_widths)


def _recomputations(kinds: Sequence[Recompute], target: Target) -> list[tuple[Recompute, ...]]:
    """Return the sets of recomputations that the stages of one plan may choose from."""
    if target.one_recompute:
        return [(kind,) for kind in kinds]
    others = tuple(kind for kind in kinds if kind is not Recompute.SELECTIVE)
    return [others, (Recompute.SELECTIVE,)]


def _seconds(plan: Plan) -> float:
    return plan.predicted.iteration_seconds if plan.predicted is not None else math.inf
