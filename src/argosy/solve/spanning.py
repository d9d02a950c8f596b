"""Search for plans that have a tensor-parallel group across nodes, beside other groups.

Few clusters have links on which such a group pays, so the options of other plans are searched
first. Then a shape is searched for plans with such a group, unless

    (1)  their bound on throughput (``space.rate``) is no less than the time of the best plan, or
    (2)  no stage with such a group is within reach ((3) of ``solve.search.reach``).

By default this comes last, at level 2, and costs little: it judges the plans that the bounds lead
to and spends a few rounds. At level 1 it comes only if

    (3)  the best plan takes most of a device's memory, on a small cluster: then a search with a
         restriction may have no other plans, and must not find a faster one.

Only if the best plan has such a group, the certificate is about them, and the proof continues.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from argosy.cost.planned import planned_memory
from argosy.solve import effort
from argosy.solve.finalists.judge import Complete
from argosy.solve.finalists.verdict import placed
from argosy.solve.search.grid import all_cuts, coarse_cuts
from argosy.solve.search.kinds import ground_of
from argosy.solve.search.menu import Menu
from argosy.solve.search.reach import promising_shapes, within_reach
from argosy.solve.search.shape import Shape
from argosy.space.enumerate import Scope, spanning_parts, stage_options, stage_parts
from argosy.space.option import Option, Vector
from argosy.space.price import Prices
from argosy.space.prune import Counters
from argosy.space.widths import spanning_widths

if TYPE_CHECKING:
    from argosy.solve.pool_search import PoolSearch

# The share of a device's memory from which on (3) calls a plan tight.
_TIGHT = 0.5


def inside_nodes(scope: Scope) -> Scope:
    """Return the part of a scope whose tensor-parallel groups are inside nodes."""
    return replace(scope, spanning=False)


def has_spanning_group(plan: Complete) -> bool:
    """Return whether a stage of a plan has a group across nodes."""
    return any(choice.option.has_spanning_group for choice in plan)


def spanning_shapes(
    prices: Prices, shapes: Sequence[Shape], scope: Scope
) -> list[tuple[float, Shape]]:
    """Return the shapes with the bounds (1), most promising first; none if the scope has no groups
    across nodes."""
    most = prices.most_width
    widths = (width for pool in prices.pools for width in spanning_widths(pool, most))
    if not scope.spanning or not any(map(scope.allows_width, widths)):
        return []
    return promising_shapes(prices, shapes, scope, spanning=True)


def spanning_options(
    prices: Prices,
    shape: Shape,
    scope: Scope,
    counters: Counters,
    known: Mapping[int, Mapping[Vector, Sequence[Option]]],
    below: float,
) -> dict[Vector, list[Option]]:
    """Return all options of a shape, if a plan with a group across nodes may take less than
    ``below`` seconds (2); otherwise none.

    ``known`` has options without such groups, by the size of micro-batches.
    """
    size, inside, unseen = shape.micro_batch_size, inside_nodes(scope), Counters()
    rare = spanning_parts(prices, size, scope, counters)
    parts = stage_parts(prices, size, inside, unseen) if rare else {}
    if rare and scope.prune and below < math.inf:
        rare = within_reach(prices, shape, parts, rare, scope.counts(prices.pools), below)
    options = stage_options(prices, size, scope, counters, rare)
    if not options:
        return {}
    others = known.get(size) or stage_options(prices, size, inside, unseen, parts)
    vectors = {*others, *options}
    return {vector: [*others.get(vector, ()), *options.get(vector, ())] for vector in vectors}


class SpanningSearch:
    """The part of a search that is about plans with a group across nodes."""

    def __init__(self, whole: PoolSearch) -> None:
        self.whole = whole

    def search(self, rounds: float, *, spans: bool | None = None) -> None:
        """Search for better plans, after all others, and spend ``rounds`` on bounds, of these plans
        alone if ``spans`` is set."""
        whole = self.whole
        scope, before = whole.scope(whole.units), whole.incumbents.best
        shapes = spanning_shapes(whole.prices, whole.shapes, scope)
        proves, whole.left_across = whole.level > 1 or rounds == math.inf, math.inf
        ground = ground_of(whole.cluster, whole.pools, whole.units, is_quick=not proves)
        grid = all_cuts(whole.prices) if proves else coarse_cuts(whole.prices)
        for bound, shape in shapes:
            if whole.is_late() or (whole.settings.prune and bound >= whole.goal):
                whole.left_across = min(whole.left_across, bound)
                continue
            known = {} if whole.is_quick else whole.menus
            job = (whole.prices, shape, scope, whole.counters, known, whole.incumbents.best)
            if options := spanning_options(*job):
                whole.menus[shape.micro_batch_size] = options
                menu = Menu(whole.prices, options, shape, ground, grid, spanning=True)
                whole.first_look(menu, scope.counts(whole.pools), bound, whole.units)
        if whole.incumbents.best < before:
            whole.vary(scope)
        whole.left_across = min(whole.left_across, whole.incumbents.best)
        whole.incumbents.confirm(effort.PLAYS if whole.is_quick else math.inf)
        if rounds and any(branch.spans for branch in whole.branches):
            whole.raise_bound(rounds, 0.0 if proves else effort.QUICK_GAP, spans=spans)

    def mix(self) -> None:
        """Search although the settings leave it open; keep these plans in the scope only if the
        best plan is one of them."""
        whole, allowed = self.whole, self.whole.settings
        if not allowed.may_span or allowed.width is not None or whole.is_late():
            return
        if whole.level == 1 and not self._is_tight():
            return
        whole.settings = replace(allowed, spanning=True)
        rounds = effort.MIXING_ROUNDS if whole.level == 1 else effort.SPANNING_ROUNDS
        self.search(rounds, spans=True)
        best = whole.incumbents.found[0].plan
        if not has_spanning_group(best) or whole.narrower.covers(best):
            whole.settings, whole.left_across = allowed, math.inf
            whole.branches = [branch for branch in whole.branches if not branch.spans]
            return
        whole.proofs = [(*proof[:-1], False) for proof in whole.proofs]
        if whole.level == 1:
            whole.raise_bound(effort.SPANNING_ROUNDS, effort.QUICK_GAP)
        else:
            whole.raise_bound(math.inf)

    def _is_tight(self) -> bool:
        """Return whether (3) holds."""
        whole = self.whole
        plan = placed(whole.incumbents.found[0], whole.prices, whole.cluster)
        memory = {device.name: device.kind.memory for device in whole.cluster.devices}
        held = planned_memory(plan, whole.prices.chain)
        return any(amount > _TIGHT * memory[name] for name, amount in held.items())
