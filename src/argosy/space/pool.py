"""Group equal devices that also reach each other equally into pools.

Two devices belong to one pool if they are of one kind and equally efficient, their nodes look equal
from outside (devices, media, NIC, uplinks and wires), and they are in one *site*: no link between
their nodes is narrow or far. A plan then only states *how many* devices of each pool a stage takes;
``place`` chooses which ones. This makes the search independent of the number of devices.

A link above the NICs of two nodes separates sites if

    (1)  its bandwidth is less than that of two of these NICs, or its latency is over a millisecond.

Wider links are left to the simulator: bounds that ignore them are still lower bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from argosy.cluster.device import Device
from argosy.cluster.host import Tier, host_bandwidth, tier_size
from argosy.cluster.topology import Cluster, Node
from argosy.cost.communicate import DOWN
from argosy.cost.compute import ComputeModel
from argosy.errors import InputError, Problem
from argosy.units import counted
from argosy.workload.chain import Chain

# A link with more than this latency, in seconds, separates sites (1). Links inside a data centre
# stay far below it.
_FAR = 1e-3
# A link with less than the bandwidth of this many NICs separates sites (1): it limits even two
# nodes that send at once.
_NARROW = 2


_Looks = tuple[Any, ...]
"""The properties of a node that the rest of a cluster can see."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A set of interchangeable devices that a stage takes a number of."""

    index: int
    device: Device
    """One of the devices, as an example of all."""
    nodes: tuple[tuple[str, ...], ...]
    """Names of its devices, node by node."""
    node_size: int
    """Devices in each of these nodes, those of other pools included."""
    intra_bandwidth: float
    """Bytes/s between two devices of a node over the best medium; infinity for a single device."""
    intra_latency: float
    intra_is_shared: bool
    """Whether that bandwidth is one capacity for the whole node."""
    nic_bandwidth: float
    """Bytes/s out of a node, over the widest first link to anywhere else; 0 without a way out."""
    nic_latency: float
    """Seconds between two nodes, best case."""
    site: int = 0
    far: tuple[tuple[float, float], ...] = ()
    """For each site, bytes/s and least latency from here to there; infinity and 0 for its own.
    Empty if there is one site."""
    host_bandwidth: float = 0.0
    """Bytes/s between a device and the memory of its host, in each direction."""
    host_is_shared: bool = False
    """Whether the host's bandwidth is one capacity for the whole node."""
    nvme_bandwidth: float = 0.0
    """Bytes/s of a node's drive; 0 without one."""
    rooms: tuple[tuple[Tier, float], ...] = ()
    """Bytes that each device may keep in host memory and on a drive: an equal share of its
    node's."""

    def tier_room(self, tier: Tier) -> float:
        return dict(self.rooms).get(tier, 0.0)

    @property
    def name(self) -> str:
        return self.device.kind.name

    @cached_property
    def homes(self) -> frozenset[str]:
        """Return the names of the pool's nodes."""
        return frozenset(node[0].partition(".")[0] for node in self.nodes)

    @cached_property
    def memory_bandwidth(self) -> float:
        """Return the memory bandwidth that a device reaches, in bytes/s."""
        return self.device.efficiency * self.device.kind.memory_bandwidth

    @cached_property
    def exchange_rate(self) -> float:
        """Return the bytes/s that a device would send if all of its multiprocessors did."""
        return self.device.efficiency * self.device.kind.exchange_rate

    @cached_property
    def per_node(self) -> int:
        return len(self.nodes[0])

    @cached_property
    def count(self) -> int:
        return sum(map(len, self.nodes))

    def __repr__(self) -> str:
        return f"{self.count}x {self.name} in {counted(len(self.nodes), 'node')}"


def find_pools(cluster: Cluster) -> tuple[Pool, ...]:
    """Return the pools of a cluster as it is at time 0, in the order of their first device."""
    groups: dict[tuple[Any, ...], list[tuple[str, ...]]] = {}
    looks = {node.name: _looks(cluster, node) for node in cluster.nodes}
    for node in cluster.nodes:
        members: dict[tuple[Any, ...], list[str]] = {}
        for name in node.devices:
            device = cluster.device(name)
            if device.speed.at(0) > 0:
                key = (
                    device.kind,
                    device.efficiency * device.speed.at(0),
                    device.price_per_hour,
                    looks[node.name],
                )
                members.setdefault(key, []).append(name)
        for key, names in members.items():
            groups.setdefault((*key, len(names)), []).append(tuple(names))
    rows = (
        sorted(nodes, key=lambda names: cluster.node_of[names[0]][0].uplinks)
        for nodes in groups.values()
    )
    return with_sites(
        tuple(_pool(cluster, index, nodes, looks) for index, nodes in enumerate(rows)), cluster
    )


def with_sites(pools: tuple[Pool, ...], cluster: Cluster) -> tuple[Pool, ...]:
    """Return the pools with their sites, which (1) separates."""
    ways = {
        (source.index, target.index): _way(cluster, source, target)
        for source, target in itertools.permutations(pools, 2)
    }
    site_of = [pool.index for pool in pools]
    for (source, target), way in ways.items():
        nic = min(pools[source].nic_bandwidth, pools[target].nic_bandwidth)
        if way.rate >= _NARROW * nic and way.extra_latency <= _FAR:
            old, new = site_of[target], site_of[source]
            site_of = [new if site == old else site for site in site_of]
    sites = sorted(set(site_of))
    if len(sites) < 2:
        return pools

    def far(pool: Pool, site: int) -> tuple[float, float]:
        if site == site_of[pool.index]:
            return math.inf, 0.0
        there = [
            ways[pool.index, target.index] for target in pools if site_of[target.index] == site
        ]
        return max(way.rate for way in there), min(way.latency for way in there)

    return tuple(
        replace(
            pool,
            site=sites.index(site_of[pool.index]),
            far=tuple(far(pool, site) for site in sites),
        )
        for pool in pools
    )


class _Way(NamedTuple):
    """A path that leads from the nodes of one pool to those of another."""

    rate: float
    """Bytes/s of all links other than NICs; infinite inside a node."""
    latency: float
    """Seconds of the shortest route."""
    extra_latency: float
    """Seconds of the shortest route without NICs."""


def _way(cluster: Cluster, source: Pool, target: Pool) -> _Way:
    if not source.homes.isdisjoint(target.homes):
        return _Way(math.inf, 0.0, 0.0)
    nics = {link for node in cluster.nodes for link in node.nic or ()}
    rate, latency, extra = 0.0, math.inf, math.inf
    for route in cluster.routes(source.nodes[0][0], target.nodes[0][0]):
        middle = [cluster.links[link] for link in route.links if link not in nics]
        rate += max(DOWN, min((link.bandwidth.at(0) for link in middle), default=math.inf))
        latency = min(latency, cluster.latency(route))
        extra = min(extra, sum(link.latency.at(0) for link in middle))
    return _Way(rate, latency, extra)


def able_pools(chain: Chain, cluster: Cluster, model: ComputeModel) -> tuple[Pool, ...]:
    """Return the pools of a cluster at time 0 that can run the chain, numbered from 0."""
    able = [pool for pool in find_pools(cluster) if model.can_run(chain, pool.device)]
    if not chain.states_work:
        _check_measured(chain, able, model)
    return tuple(replace(pool, index=index) for index, pool in enumerate(able))


def _check_measured(chain: Chain, pools: Sequence[Pool], model: ComputeModel) -> None:
    """Raise InputError that lists all kinds without a profile, if the model states no FLOP to price
    them by."""
    lacking = dict.fromkeys(pool.name for pool in pools if model.profile_for(pool.device) is None)
    if lacking:
        expected = f"a measured profile of {chain.name}, because the model states no FLOP"
        suggestion = "measure it there (argosy profile), or leave these devices out of the cluster"
        raise InputError(
            Problem(path=kind, expected=expected, suggestion=suggestion) for kind in lacking
        )


def _pool(
    cluster: Cluster, index: int, nodes: Sequence[tuple[str, ...]], looks: Mapping[str, _Looks]
) -> Pool:
    home, _ = cluster.node_of[nodes[0][0]]
    best, shared = (float("inf"), 0.0), False
    if len(home.devices) > 1:
        routes = cluster.routes(home.devices[0], home.devices[1])
        route = max(routes, key=lambda r: (cluster.bandwidth_at(r), -cluster.latency(r)))
        best = (max(DOWN, cluster.bandwidth_at(route)), cluster.latency(route))
        shared = len(route.links) == 1
    bandwidth, latency = _outward(cluster, home, looks)
    return Pool(
        index=index,
        device=cluster.device(nodes[0][0]),
        nodes=tuple(nodes),
        node_size=len(home.devices),
        intra_bandwidth=best[0],
        intra_latency=best[1],
        intra_is_shared=shared,
        nic_bandwidth=bandwidth,
        nic_latency=latency,
        host_bandwidth=host_bandwidth(cluster, nodes[0][0]),
        host_is_shared=home.host_memory.shared,
        nvme_bandwidth=home.host_memory.nvme_bandwidth,
        rooms=tuple((tier, tier_size(cluster, home, tier) / len(home.devices)) for tier in Tier),
    )


def _outward(cluster: Cluster, home: Node, looks: Mapping[str, _Looks]) -> tuple[float, float]:
    """Return the bandwidth of the widest first link and the least latency from a node to any other;
    one node of each look and switch represents the rest."""
    seen: set[tuple[Any, ...]] = set()
    bandwidth, latency = 0.0, float("inf")
    for target in cluster.nodes:
        sort = (looks[target.name], target.uplinks)
        if target is home or sort in seen:
            continue
        seen.add(sort)
        for route in cluster.routes(home.devices[0], target.devices[0]):
            bandwidth = max(bandwidth, cluster.links[route.links[0]].bandwidth.at(0))
            latency = min(latency, cluster.latency(route))
    return bandwidth, latency if bandwidth else 0.0


def _looks(cluster: Cluster, node: Node) -> _Looks:
    """Return the properties that the rest of the cluster can see of a node at time 0."""

    def figures(links: Sequence[int]) -> tuple[tuple[float, float], ...]:
        return tuple(
            (cluster.links[link].bandwidth.at(0), cluster.links[link].latency.at(0))
            for link in links
        )

    kinds = tuple((cluster.device(n).kind.name, cluster.device(n).efficiency) for n in node.devices)
    media = tuple(
        (m.name, figures((m.outward[0], m.inward[0])), m.outward[0] == m.inward[0])
        for m in node.media
    )
    uplinks = tuple(figures(pair) for pair in node.uplinks)
    narrow = tuple(pair for pair in node.uplinks if _separates(cluster, node, pair))
    wires = tuple(
        (w.name, node.name in w.nodes)
        for w in cluster.wires
        if node.name in w.nodes or node.name in w.far_nodes
    )
    return kinds, media, figures(node.nic or ()), uplinks, narrow, wires, node.host_memory


def _separates(cluster: Cluster, node: Node, uplink: tuple[int, int]) -> bool:
    """Return whether an uplink of a node separates sites (1)."""
    nic = min((cluster.links[link].bandwidth.at(0) for link in node.nic or ()), default=0.0)
    links = [cluster.links[link] for link in uplink]
    return any(link.bandwidth.at(0) < _NARROW * nic or link.latency.at(0) > _FAR for link in links)


def line_between_sites(pools: Sequence[Pool]) -> tuple[float, float]:
    """Return bytes/s and seconds such that every ring or tree over the sites of these pools uses a
    line with at most this bandwidth, and one with at least this latency; infinity and 0 on one
    site.

    Over two sites the line is used in both directions. Over more sites slow lines can be avoided as
    long as the others connect all sites.
    """
    sites = {pool.site for pool in pools}
    if len(sites) == 1:
        return math.inf, 0.0
    lines: dict[frozenset[int], list[tuple[float, float]]] = {}
    for source, target in itertools.permutations(pools, 2):
        if source.site != target.site:
            pair = frozenset((source.site, target.site))
            lines.setdefault(pair, []).append(source.far[target.site])
    if len(sites) == 2:
        (both,) = lines.values()
        return min(rate for rate, _ in both), max(seconds for _, seconds in both)
    rates = {pair: max(rate for rate, _ in both) for pair, both in lines.items()}
    latencies = {pair: min(seconds for _, seconds in both) for pair, both in lines.items()}
    bandwidth = next(
        rate
        for rate in sorted(rates.values(), reverse=True)
        if _connects([pair for pair in rates if rates[pair] >= rate], sites)
    )
    latency = next(
        seconds
        for seconds in sorted(latencies.values())
        if _connects([pair for pair in latencies if latencies[pair] <= seconds], sites)
    )
    return bandwidth, latency


def _connects(pairs: Sequence[frozenset[int]], sites: set[int]) -> bool:
    """Return whether lines between these pairs of sites connect all sites."""
    reached = {min(sites)}
    while more := {site for pair in pairs if pair & reached for site in pair - reached}:
        reached |= more
    return reached == sites
