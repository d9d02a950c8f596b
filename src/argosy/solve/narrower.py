"""Run narrower searches beside a search of all plans, so that a restriction never gives a faster
plan.

(1)  Level 1 considers only some plans, so it also searches pipelines without replicas, and parts of
     the cluster, by themselves (``solve.parts``).
(2)  Few clusters have links on which tensor-parallel groups across nodes pay, so a search keeps
     groups inside nodes unless ``--width`` requests a width (``solve.spanning``). The searches of
     such requests follow, once for each width that fills several nodes of a pool, unless the bound
     on plans whose groups all have this width (``space.rate.width_bound``) is no less than the time
     of the best plan.
(3)  On a large cluster, level 1 considers only groups that fill a power of two of nodes or divide
     the nodes of a pool, and skips a width of (2) if that bound is not below the bound of every
     width inside nodes. It does not skip one that the best plan misses by far: then something else
     than throughput, such as memory, decides.

Level 2 continues the searches of (2) after its own proof, in the time that is left.
A certificate covers plans of (2) only if the best plan is one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from argosy.errors import NothingFitsError
from argosy.plan.plan import Plan
from argosy.solve.effort import REFINED, ROOM
from argosy.solve.finalists.candidate import Candidate, on_pools
from argosy.solve.finalists.judge import Complete
from argosy.solve.parts import narrower_searches
from argosy.solve.spanning import has_spanning_group
from argosy.space.rate import width_bound
from argosy.space.widths import node_widths, spanning_widths

if TYPE_CHECKING:
    from argosy.solve.pool_search import PoolSearch
    from argosy.solve.search.shape import Shape
    from argosy.solve.settings import Settings
    from argosy.space.pool import Pool

# On a large cluster level 1 searches a width in any case if the best plan takes longer than its
# bound by more than this factor.
_FAR = 1.5
# If a plan is within this factor of the bound, no part of the cluster has one that is worth it.
_CLOSE = 1.005


class NarrowerSearches:
    """The searches that run beside one search, with the rest of its time."""

    def __init__(self, whole: PoolSearch) -> None:
        self.whole = whole
        self.given = whole.settings
        self.widths: dict[int, PoolSearch] = {}
        """Searches that found a plan with groups of one width across nodes (2)."""

    def quick(self) -> Iterator[Candidate]:
        """Yield the plans of level 1."""
        whole = self.whole
        if whole.is_part:
            return
        if whole.settings.units is None and whole.incumbents.best > whole.bound * _CLOSE:
            job = (whole.prices, whole.shapes, whole.settings)
            for settings, pools, indices in narrower_searches(*job, lambda: whole.incumbents.best):
                search = self._start(settings, pools, is_part=True)
                with suppress(NothingFitsError):
                    search.quick()
                    yield on_pools(search.winners[-1], whole.prices, indices)
        for width in self._promising_widths():
            with suppress(NothingFitsError):
                yield self._first_plan(width)

    def prove(self) -> Iterator[Candidate]:
        """Yield the plans of level 2."""
        for width in self._promising_widths():
            with suppress(NothingFitsError):
                if width not in self.widths:
                    yield self._first_plan(width)
                self.widths[width].prove()
                yield self._on_all_pools(self.widths[width])

    def covers(self, stages: Complete) -> bool:
        """Return whether the proof of a plan with groups across nodes is that of the search of its
        width."""
        return self._search_of(stages) is not None

    def _search_of(self, stages: Complete) -> PoolSearch | None:
        widths = {part.tensor_width for choice in stages for part in choice.option.parts}
        is_alone = len(widths) == 1 and has_spanning_group(stages)
        return self.widths.get(widths.pop()) if is_alone else None

    def covered(self, plan: Plan, stages: Complete) -> Plan:
        """Return a plan with a certificate that covers the search of its width, too, if it has
        groups across nodes."""
        search = self._search_of(stages)
        if search is None:
            return plan
        own, other = plan.certificate, search.finish().certificate
        assert plan.predicted is not None and own is not None and other is not None
        bound = min(own.lower_bound_seconds, other.lower_bound_seconds)
        certificate = replace(
            own,
            lower_bound_seconds=bound,
            gap=plan.predicted.iteration_seconds / bound - 1,
            granularity=max(own.granularity, other.granularity),
            scope=f"{own.scope}, or {other.scope}",
            free_bound_seconds=min(bound, search.free_bound),
        )
        return replace(plan, certificate=certificate)

    def _start(
        self, settings: Settings, pools: tuple[Pool, ...], *, is_part: bool = False
    ) -> PoolSearch:
        whole = self.whole
        left = replace(settings, time_budget=settings.time_budget - whole.budget.seconds)
        job = (whole.chain, whole.cluster, whole.global_batch, left, whole.model)
        return type(whole)(*job, pools=pools, is_part=is_part)

    def _first_plan(self, width: int) -> Candidate:
        """Return the plan of level 1 for one width; raise NothingFitsError if there is none."""
        ceiling = ROOM * self.whole.incumbents.best
        request = replace(self.given, width=width, progress=None, ceiling=ceiling)
        search = self._start(request, self.whole.pools)
        search.quick()
        self.widths[width] = search
        return self._on_all_pools(search)

    def _on_all_pools(self, search: PoolSearch) -> Candidate:
        return on_pools(search.winner, self.whole.prices, range(len(self.whole.pools)))

    def _promising_widths(self) -> Iterator[int]:
        """Yield the widths of (2) when it is their turn, while there is time; those with the least
        bounds first."""
        whole = self.whole
        if not self.given.may_span or self.given.width is not None:
            return
        most = int(min(whole.prices.most_width, self.given.max_width or math.inf))
        bounds = {width: self._bound(width) for width in sorted(self._widths_across(most))}
        for width in sorted(bounds, key=bounds.__getitem__):
            best = whole.incumbents.best
            if bounds[width] < best and not whole.budget.is_spent:
                is_far = bounds[width] * _FAR < best
                is_searched = whole.level > 1 or whole.num_devices <= REFINED or is_far
                if is_searched or not self._is_bounded_inside(most, bounds[width]):
                    yield width

    def _widths_across(self, most: int) -> set[int]:
        """Return the widths of (2); of (3) only those that fill a power of two of nodes or divide
        the nodes of a pool."""
        whole = self.whole
        is_small = whole.level > 1 or whole.num_devices <= REFINED
        return {
            width
            for pool in whole.pools
            for width in spanning_widths(pool, most)
            if is_small or _divides(width // pool.per_node, len(pool.nodes))
        }

    def _is_bounded_inside(self, most: int, seconds: float) -> bool:
        """Return whether the bound of some width inside nodes is at most a number of seconds."""
        whole = self.whole
        inside = {width for pool in whole.pools for width in node_widths(pool, most)}
        # Those of the best plan come first, because they most likely decide.
        best = whole.incumbents.found[0]
        widths = sorted(inside, key=lambda width: abs(width - best.plan[0].option.width))
        shapes = [best.shape, *whole.shapes]
        pairs = itertools.product(shapes, widths)
        return any(self._shape_bound(shape, width) <= seconds for shape, width in pairs)

    def _bound(self, width: int) -> float:
        """Return a lower bound in seconds on plans whose groups all have this width."""
        return min(self._shape_bound(shape, width) for shape in self.whole.shapes)

    def _shape_bound(self, shape: Shape, width: int) -> float:
        whole, size, count = self.whole, shape.micro_batch_size, shape.num_micro_batches
        return width_bound(whole.prices, size, count, width, is_cut=self._is_cut)

    @property
    def _is_cut(self) -> bool:
        """Return whether the search cuts sequences."""
        return self.whole.scope(self.whole.units).context != (1,)


def _divides(number: int, nodes: int) -> bool:
    return nodes % number == 0 or number & (number - 1) == 0
