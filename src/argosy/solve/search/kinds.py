"""Classify plans by what is certain about how their stages send a micro-batch on.

A stage's replicas need not act at the same moment, and what they send need not arrive at once, so
the way of a micro-batch through a plan is certain only along one *thread*: the replicas that hold
one sample.

    *mixed*  Some stage has replicas of several pools. In the worst case a thread passes the
             quickest replica of every stage, and a transfer is a single sample.
    *alike*  Every stage has replicas of one pool. Those with one sample more come first, so the
             thread of the first sample passes a slowest replica of every stage. A transfer is what
             two replicas have in common.
    *even*   All replicas of a stage are equal and fill whole nodes or are in one node, neither
             sequences nor experts are cut, the numbers of replicas and of nodes divide one another,
             and there is only one route between two devices. Then permutations of a stage's nodes
             and of the replicas in them are symmetries of the plan: the replicas of a stage act at
             the same moment, and a transfer takes what NICs, the medium of a node or the links
             between sites need for the whole micro-batch. If a group fills several nodes, each of
             them sends and receives its slice of every sample, as much as each other one.

Kinds later in this list have tighter bounds. A plan is of the last kind that fits it, so the kinds
divide all plans.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from argosy.cluster.topology import Cluster
from argosy.space.option import Option, PoolPart, Vector
from argosy.space.pool import Pool


class PlanKind(StrEnum):
    MIXED = "mixed"
    ALIKE = "alike"
    EVEN = "even"


@dataclass(frozen=True, kw_only=True)
class Ground:
    """The facts about placement that are known before anything is placed (``space.place``)."""

    node_units: Vector
    """For each pool, the number of units in a node; 1 if a unit is one or several nodes, 0 if units
    do not divide nodes."""
    alone: tuple[bool, ...]
    """For each pool, whether its nodes have no devices of other pools."""
    plain: bool
    """Whether nodes communicate only over their NICs and one switch."""
    through_nics: bool = True
    """Whether everything that leaves a node passes its NIC."""
    is_symmetric: bool = False
    """Whether nodes of a pool are interchangeable, with one route from node to node."""
    has_one_medium: tuple[bool, ...] = ()
    """For each pool, whether there is only one route inside its nodes."""
    has_single_lines: bool = False
    """Whether one wire at most leads from a site to another, so that pools of a site share it."""
    is_duplex: bool = False
    """Whether gradients find the same bandwidth as activations in the other direction."""
    is_quick: bool = False
    """Whether even plans are distinguished only if all numbers of replicas and nodes divide one
    another."""

    def leaves_nodes(self, part: PoolPart, pool: Pool) -> bool:
        """Return whether a part of a stage fills nodes, so that its transfers to other stages leave
        these."""
        return self.alone[pool.index] and part.devices % pool.per_node == 0


def ground_of(
    cluster: Cluster, pools: Sequence[Pool], units: Vector, *, is_quick: bool = False
) -> Ground:
    """Return the facts for stages that take multiples of ``units`` devices."""
    sizes = [(pool.per_node, unit) for pool, unit in zip(pools, units, strict=True)]
    return Ground(
        node_units=tuple(
            1 if unit % size == 0 else 0 if size % unit else size // unit for size, unit in sizes
        ),
        alone=tuple(pool.per_node == pool.node_size for pool in pools),
        plain=not cluster.wires and not any(node.uplinks for node in cluster.nodes),
        through_nics=not any(wire.bypasses_nic for wire in cluster.wires),
        is_symmetric=_is_symmetric(cluster, pools),
        has_one_medium=tuple(
            len(cluster.node_of[pool.nodes[0][0]][0].media) == 1 for pool in pools
        ),
        has_single_lines=_has_single_lines(cluster, pools),
        is_duplex=_is_duplex(cluster, pools),
        is_quick=is_quick,
    )


def _has_single_lines(cluster: Cluster, pools: Sequence[Pool]) -> bool:
    """Return whether at most one wire joins any two sites."""
    if any(node.uplinks for node in cluster.nodes):
        return False
    site_of = {home: pool.site for pool in pools for home in pool.homes}
    pairs = [
        {
            frozenset((site_of[near], site_of[far]))
            for near, far in itertools.product(wire.nodes, wire.far_nodes)
            if near in site_of and far in site_of and site_of[near] != site_of[far]
        }
        for wire in cluster.wires
    ]
    return sum(map(len, pairs)) == len(frozenset().union(*pairs))


def _is_duplex(cluster: Cluster, pools: Sequence[Pool]) -> bool:
    """Return whether NICs and the links between sites are as wide in both directions."""
    for node in cluster.nodes:
        if len({cluster.links[link].bandwidth.at(0) for link in node.nic or ()}) > 1:
            return False
    return all(
        first.far[second.site][0] == second.far[first.site][0]
        for first, second in itertools.combinations(pools, 2)
        if first.far and first.site != second.site
    )


def _is_symmetric(cluster: Cluster, pools: Sequence[Pool]) -> bool:
    """Return whether nodes are interchangeable: those of a pool have the same wires
    (``space.pool``), but not always the same uplinks."""
    if cluster.shared or any(node.uplinks for node in cluster.nodes):
        return False
    nodes = {home[0].partition(".")[0]: home[0] for pool in pools for home in pool.nodes[:2]}
    return all(
        len(cluster.routes(source, target)) == 1
        for source, target in itertools.combinations(nodes.values(), 2)
    )


def kinds_of(options: Sequence[Option], ground: Ground) -> list[PlanKind]:
    """Return the kind of the plans that have only stages of each option."""
    kinds = [PlanKind.MIXED if len(option.parts) > 1 else PlanKind.ALIKE for option in options]
    if not ground.is_symmetric:
        return kinds
    numbers = [_even_numbers(option, ground) for option in options]
    all_numbers = list(itertools.chain.from_iterable(numbers))
    chain = _longest_chain(all_numbers)
    if ground.is_quick and not chain.issuperset(all_numbers):
        return kinds
    return [
        PlanKind.EVEN if own and chain.issuperset(own) else kind
        for own, kind in zip(numbers, kinds, strict=True)
    ]


def _even_numbers(option: Option, ground: Ground) -> tuple[int, ...]:
    """Return the numbers of replicas and of nodes; empty if no plan with such a stage is even."""
    part, pool = option.parts[0], option.pools[0]
    is_cut = part.extra or option.context > 1 or option.expert > 1
    if (
        len(option.parts) > 1
        or is_cut
        or not ground.alone[part.pool]
        or not ground.node_units[part.pool]
    ):
        return ()
    if part.devices < pool.per_node:
        return (
            (option.replicas, 1) if ground.has_one_medium[part.pool] and pool.nic_bandwidth else ()
        )
    nodes, rest = divmod(part.devices, pool.per_node)
    return (option.replicas, nodes) if pool.nic_bandwidth and not rest else ()


def _longest_chain(numbers: Sequence[int]) -> frozenset[int]:
    """Return the numbers that divide one another and occur most often together."""
    times = Counter(numbers)
    best: dict[int, tuple[int, frozenset[int]]] = {}
    for number in sorted(times):
        weight, chain = max(
            (best[divisor] for divisor in best if number % divisor == 0),
            key=lambda item: item[0],
            default=(0, frozenset()),
        )
        best[number] = weight + times[number], chain | {number}
    return max(best.values(), key=lambda item: item[0], default=(0, frozenset()))[1]


class Hop(NamedTuple):
    """A lower bound on the time that a transfer takes: seconds per output byte, and latency."""

    per_byte: float
    latency: float


def even_hops(option: Option, ground: Ground, sites: Iterable[int]) -> list[Hop]:
    """Return the transfers of all samples of a micro-batch from replicas that act together: to a
    stage that may be in the same node, to one in other nodes, and to one in each of some other
    sites."""
    part, pool = option.parts[0], option.pools[0]
    outside = Hop(nic_seconds(part, pool), pool.nic_latency)
    anywhere = outside
    if not ground.leaves_nodes(part, pool):
        samples, lanes = (
            (part.all_samples, 1) if pool.intra_is_shared else (part.samples, part.width)
        )
        inside = Hop(samples / (pool.intra_bandwidth * lanes), pool.intra_latency)
        anywhere = _least([inside, outside])
    far = [
        Hop(max(outside.per_byte, part.all_samples / pool.far[site][0]), pool.far[site][1])
        for site in sites
    ]
    return [anywhere, outside, *far]


def hop_inside(option: Option, ground: Ground, samples: int) -> Hop:
    """Return the transfer from any replica to a stage that may be in the same node."""
    hops = []
    for part, pool in zip(option.parts, option.pools, strict=True):
        ways = [_over_nics(part, pool)] if pool.nic_bandwidth else []
        if not ground.leaves_nodes(part, pool) or not ways:
            lanes = 1 if pool.intra_is_shared else part.width
            ways.append(Hop(1 / (pool.intra_bandwidth * lanes), pool.intra_latency))
        per_byte = min(samples, part.most) * min(way.per_byte for way in ways)
        hops.append(Hop(per_byte, min(way.latency for way in ways)))
    return _least(hops)


def hop_outside(option: Option, samples: int) -> Hop:
    """Return the transfer from any replica to a stage in other nodes."""
    hops = []
    for part, pool in zip(option.parts, option.pools, strict=True):
        way = _over_nics(part, pool) if pool.nic_bandwidth else Hop(0.0, 0.0)
        hops.append(Hop(min(samples, part.most) * way.per_byte, way.latency))
    return _least(hops)


def hop_to_site(option: Option, samples: int, site: int) -> Hop:
    """Return the transfer from any replica to a stage of another site."""
    near = hop_outside(option, samples)
    links = [(pool.far[site], part) for part, pool in zip(option.parts, option.pools, strict=True)]
    per_byte = min(min(samples, part.most) / rate for (rate, _), part in links)
    return Hop(max(near.per_byte, per_byte), min(latency for (_, latency), _ in links))


def _over_nics(part: PoolPart, pool: Pool) -> Hop:
    nics = max(1, part.width // pool.per_node)
    return Hop(1 / (nics * pool.nic_bandwidth), pool.nic_latency)


def _least(hops: Sequence[Hop]) -> Hop:
    return Hop(min(hop.per_byte for hop in hops), min(hop.latency for hop in hops))


def sending_seconds(option: Option, ways: SiteWays | None = None, *, fewest: bool) -> float:
    """Return the seconds per output byte that NICs, or the links to a site, need for what the
    replica with most (``fewest``) samples sends of a micro-batch: its part of the next one
    follows."""
    seconds = []
    for part, pool in zip(option.parts, option.pools, strict=True):
        samples = part.samples if fewest else part.most
        near = samples * _over_nics(part, pool).per_byte if pool.nic_bandwidth else 0.0
        seconds.append(near if ways is None else max(near, samples / ways.rate(pool)))
    return min(seconds)


def nic_seconds(part: PoolPart, pool: Pool) -> float:
    """Return the seconds per output byte that the NICs of a part's nodes need for a micro-batch
    that leaves these."""
    if not pool.nic_bandwidth:
        return 0.0
    return part.all_samples / (math.ceil(part.devices / pool.per_node) * pool.nic_bandwidth)


def leaving_seconds(option: Option, ground: Ground) -> float:
    """Return the seconds per output byte that the NICs of an option's busiest part need for a
    micro-batch."""
    if not ground.through_nics:
        return 0.0
    return max(
        nic_seconds(part, pool) for part, pool in zip(option.parts, option.pools, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class SiteWays:
    """A set of lines that leads from the pools of a stage to another site."""

    site: int
    is_spread: bool
    """Whether the next stage may be at several other sites at once: then all lines count."""
    has_single_lines: bool
    """Whether pools of one site share one line to each other site."""

    def rate(self, pool: Pool) -> float:
        """Return the bytes/s that can leave the site of a pool for the next stage."""
        if not self.is_spread:
            return pool.far[self.site][0]
        return sum(rate for site, (rate, _) in enumerate(pool.far) if site != pool.site)

    def lines(self, option: Option) -> list[tuple[int, float]]:
        """Return the samples of a stage that pass each line, and the bytes/s of the line."""
        groups: dict[int, tuple[int, float]] = {}
        for part, pool in zip(option.parts, option.pools, strict=True):
            line = pool.site if self.has_single_lines else pool.index
            samples, rate = groups.get(line, (0, 0.0))
            groups[line] = samples + part.all_samples, max(rate, self.rate(pool))
        return list(groups.values())


def crossing_seconds(option: Option, ways: SiteWays) -> float:
    """Return the seconds per output byte that the busiest line to another site needs for a
    micro-batch."""
    return max(samples / rate for samples, rate in ways.lines(option))


def arriving_seconds(option: Option, ground: Ground, ways: SiteWays | None = None) -> float:
    """Return the least seconds per output byte of one sample to a replica in other nodes, or at
    another site, if all NICs or lines of a stage serve it alone."""
    near = 0.0
    if ground.through_nics and all(pool.nic_bandwidth for pool in option.pools):
        near = 1 / sum(
            math.ceil(part.devices / pool.per_node) * pool.nic_bandwidth
            for part, pool in zip(option.parts, option.pools, strict=True)
        )
    return near if ways is None else max(near, 1 / sum(rate for _, rate in ways.lines(option)))
