"""Collect the options of plans that have a tensor-parallel group across nodes, if settings allow
them beside other groups.

Few clusters have links on which such a group pays, so the options of other plans are searched
first. Then a shape is searched for plans with such a group, unless

    (1)  their bound on throughput (``space.rate``) is no less than the time of the best plan, or
    (2)  no stage with such a group is within reach ((3) of ``solve.search.reach``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from argosy.solve.finalists.judge import Complete
from argosy.solve.search.reach import promising_shapes, within_reach
from argosy.solve.search.shape import Shape
from argosy.space.enumerate import Scope, spanning_parts, stage_options, stage_parts
from argosy.space.option import Option, Vector
from argosy.space.price import Prices, widest
from argosy.space.prune import Counters
from argosy.space.widths import spanning_widths


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
    most = widest(prices.chain.layers)
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
