"""Bound the seconds of summing tied gradients, and divide plans by the place of their last stage.

The gradients of weights that two stages hold go twice around a ring of the n tensor-parallel groups
that have them, B bytes, once the first of the stages is through. Devices of a node follow one
another in the ring. If it is not inside one node,

    (1)  2 (n - 1) / n B bytes leave every node of the ring through its NIC, and 2 (n - 1) latencies
         pass; a node of a group that fills several sends its slices only
    (2)  as many leave every site of the ring for another one, with the latencies between these

The first stage alone does not determine where the ring goes. If (1) or (2) are long enough to
matter, a search divides its plans: by the site of the last stage (``Menu.by_last_site``), and into

    (3)  those whose first and last stage are in one node. Stages are placed in rows
         (``space.place``), so that no other node of that pool is used
    (4)  all others, to which (1) and (2) apply
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from argosy.solve.search.kinds import Ground
from argosy.solve.search.prefix import Fixed
from argosy.space.option import Option
from argosy.space.place import row_places
from argosy.space.pool import Pool
from argosy.space.price import FloatArray, Prices

# Plans are divided if (1) or (2) can be longer than this share of the time to beat.
_WORTH = 0.002
Tied = tuple[int, int, FloatArray]
"""A layer, the other one, and for each option the least seconds of a stage that has the first and
not the other."""


def tied_costs(options: Sequence[Option], ground: Ground) -> list[Tied]:
    """Return the least seconds of tied weights, for both stages that have them."""
    costs: list[Tied] = []
    for index, partner, weights in options[0].prices.tied:
        least = np.array([tied_seconds([option], weights, ground) for option in options])
        costs += [(index, partner, least), (partner, index, least)]
    return costs


def tied_apart(
    options: Sequence[Option], ground: Ground, site: int | None, upper: float
) -> list[Tied]:
    """Return the least seconds of tied weights for plans of (4) whose last stage is in a site, or
    anywhere.

    The list is empty if the first and the last layer are not tied, if numbers of devices do not
    determine which stages share a node, or if the difference is negligible.
    """
    prices = options[0].prices
    ends = [
        weights
        for index, partner, weights in prices.tied
        if (partner, index) == (0, prices.num_layers - 1)
    ]
    if not ends or not all(ground.alone) or not all(ground.node_units):
        return []
    others = [pool for pool in prices.pools if site in (None, pool.site)]
    nodes = max(number for option in options for number in option.nodes_of_copies)
    least = [
        tied_seconds([option], ends[0], ground, others, leaves_node=True, nodes_of_copy=nodes)
        for option in options
    ]
    apart = np.array(least)
    if apart.max() <= _WORTH * upper:
        return []
    return [
        (layer, partner, apart if (layer, partner) == (0, prices.num_layers - 1) else anywhere)
        for layer, partner, anywhere in tied_costs(options, ground)
    ]


def tied_seconds(
    stages: Sequence[Option],
    weights: int,
    ground: Ground,
    others: Sequence[Pool] = (),
    *,
    leaves_node: bool = False,
    nodes_of_copy: int = 1,
) -> float:
    """Return the least seconds of summing tied weights of two stages.

    One of the stages may be unknown: then it has devices of at least one of the pools ``others``,
    and a copy of the weights on at most ``nodes_of_copy`` nodes.
    ``leaves_node`` tells whether the ring is certainly not inside one node.
    """
    prices = stages[0].prices
    count = sum(stage.holders for stage in stages) + (len(stages) == 1)
    around, share = 2 * (count - 1), weights * prices.exchanged_bytes(0) / count
    narrowest = min(_widest_way_out(stage, ground) for stage in stages)
    least = around * share / narrowest if narrowest else 0.0
    if not leaves_node and not any(stage.spans_nodes for stage in stages):
        return least
    pools = list(itertools.chain.from_iterable(stage.pools for stage in stages))
    ways = list(_ways_out_of_nodes(stages, others, nodes_of_copy)) if ground.through_nics else []
    are_known = len(stages) > 1 or len({pool.site for pool in others}) == 1
    if are_known and all(len(layers) == 2 for layers, _ in prices.chain.shared):
        ways += _ways_out_of_sites(pools, others)
    return max([least, *(around * (share / rate + latency) for rate, latency in ways)])


def _ways_out_of_nodes(
    stages: Sequence[Option], others: Sequence[Pool], nodes_of_copy: int
) -> Iterator[tuple[float, float]]:
    """Yield the rates and latencies of (1)."""
    for stage in stages:
        for rate, pool in zip(stage.ways_out, stage.pools, strict=True):
            if rate:
                yield rate, pool.nic_latency
    if others and all(pool.nic_bandwidth for pool in others):
        rate = nodes_of_copy * max(pool.nic_bandwidth for pool in others)
        yield rate, min(pool.nic_latency for pool in others)


def _ways_out_of_sites(
    pools: Sequence[Pool], others: Sequence[Pool]
) -> Iterator[tuple[float, float]]:
    """Yield the rates and latencies of (2); the other stage is in the site of all ``others``."""
    sites = {pool.site for pool in (*pools, *others)}
    for site in sites if len(sites) > 1 else ():
        here = [pool for pool in (*pools, *others) if pool.site == site]
        ways = [pool.far[target] for pool in here for target in sites - {site}]
        yield max(rate for rate, _ in ways), min(latency for _, latency in ways)


def _widest_way_out(option: Option, ground: Ground) -> float:
    ways = []
    for part, pool, rate in zip(option.parts, option.pools, option.ways_out, strict=True):
        inside = (
            0.0
            if ground.leaves_nodes(part, pool) and ground.plain
            else pool.intra_bandwidth * part.width
        )
        ways.append(max(rate, inside))
    return max(ways)


def tied_tails(
    options: Sequence[Option], ranges: Sequence[tuple[int, int]], ground: Ground
) -> Iterator[tuple[int, float]]:
    """Yield the first stage with tied weights of a complete plan, and the least seconds of their
    sum and update."""
    prices = options[0].prices
    for index, partner, weights in prices.tied:
        first, last = sorted(
            at
            for at, (begin, end) in enumerate(ranges)
            for layer in (index, partner)
            if begin <= layer < end
        )
        if first != last:
            both = [options[first], options[last]]
            seconds = tied_seconds(
                both, weights, ground, leaves_node=_leaves_node(prices, options, first, last)
            )
            yield (
                first,
                seconds
                + max(prices.weigh_range(options[at].update, *ranges[at]) for at in (first, last)),
            )


def with_tied(
    fixed: Sequence[Fixed], stages: Sequence[tuple[Option, int, int]], ground: Ground
) -> tuple[Fixed, ...]:
    """Return the stages of a complete plan; the first one with tied weights waits for their sum
    with the other. ``stages`` has an option, a first layer and an end for each."""
    waiting = list(fixed)
    options, ranges = [stage[0] for stage in stages], [stage[1:] for stage in stages]
    for first, seconds in tied_tails(options, ranges, ground):
        forward, backward, late, over, back, tail, sent = waiting[first]
        waiting[first] = (forward, backward, late, over, back, max(tail, seconds), sent)
    return tuple(waiting)


def _leaves_node(prices: Prices, options: Sequence[Option], first: int, last: int) -> bool:
    """Return whether two stages of a complete plan are certainly not in one node."""
    places = row_places(prices.pools, options)
    if places is None:
        return False
    nodes = set()
    for stage in (first, last):
        for part, (begin, end) in zip(options[stage].parts, places[stage], strict=True):
            pool = prices.pools[part.pool]
            for at in (begin // pool.per_node, (end - 1) // pool.per_node):
                nodes.add(pool.nodes[at][0].partition(".")[0])
    return len(nodes) > 1
