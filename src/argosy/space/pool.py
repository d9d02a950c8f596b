"""Pools: devices that can take each other's place in a plan.

Two devices belong to one pool if they are of one kind and equally efficient, and their nodes look alike from outside:
the same devices, media, NIC, uplinks and wires. A plan then only says *how many* devices of each pool a stage takes;
which ones is a matter of placement (``place``). This is what makes the search independent of the number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from argosy.cluster.device import Device
from argosy.cluster.topology import Cluster, Node
from argosy.cost.communicate import DOWN
from argosy.cost.compute import ComputeModel
from argosy.errors import InputError, Problem
from argosy.units import counted
from argosy.workload.chain import Chain


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Interchangeable devices."""

    index: int
    device: Device
    """Any one of them."""
    nodes: tuple[tuple[str, ...], ...]
    """Names of its devices, node by node."""
    node_size: int
    """Devices in each of these nodes, those of other pools included."""
    intra_bandwidth: float
    """Bytes/s between two devices of a node over the best medium; infinity where a node has only one."""
    intra_latency: float
    intra_is_shared: bool
    """Whether that bandwidth is one capacity for the whole node."""
    nic_bandwidth: float
    """Bytes/s out of a node, over the widest first link to anywhere else; 0 without a way out."""
    nic_latency: float
    """Seconds between two nodes, best case."""

    @property
    def name(self) -> str:
        return self.device.kind.name

    @cached_property
    def homes(self) -> frozenset[str]:
        """Names of its nodes."""
        return frozenset(node[0].partition(".")[0] for node in self.nodes)

    @cached_property
    def memory_bandwidth(self) -> float:
        """Bytes/s that a device reaches."""
        return self.device.efficiency * self.device.kind.memory_bandwidth

    @cached_property
    def per_node(self) -> int:
        return len(self.nodes[0])

    @cached_property
    def count(self) -> int:
        return sum(map(len, self.nodes))

    def __repr__(self) -> str:
        return f"{self.count}x {self.name} in {counted(len(self.nodes), 'node')}"


def find_pools(cluster: Cluster) -> tuple[Pool, ...]:
    """The pools of a cluster as it is at time 0, in the order of their first device."""
    groups: dict[tuple[Any, ...], list[tuple[str, ...]]] = {}
    for node in cluster.nodes:
        looks = _looks(cluster, node)
        members: dict[tuple[Any, ...], list[str]] = {}
        for name in node.devices:
            device = cluster.device(name)
            if device.speed.at(0) > 0:
                key = (device.kind, device.efficiency * device.speed.at(0), device.price_per_hour, looks)
                members.setdefault(key, []).append(name)
        for key, names in members.items():
            groups.setdefault((*key, len(names)), []).append(tuple(names))
    return tuple(_pool(cluster, index, nodes) for index, nodes in enumerate(groups.values()))


def able_pools(chain: Chain, cluster: Cluster, model: ComputeModel) -> tuple[Pool, ...]:
    """The pools of a cluster at time 0 that can run the chain, numbered from 0."""
    able = [pool for pool in find_pools(cluster) if model.can_run(chain, pool.device)]
    if not chain.forward_flop:
        _check_measured(chain, able, model)
    return tuple(replace(pool, index=index) for index, pool in enumerate(able))


def _check_measured(chain: Chain, pools: Sequence[Pool], model: ComputeModel) -> None:
    """Refuse, all at once, kinds without a profile where the model states no FLOP to price them by."""
    lacking = dict.fromkeys(pool.name for pool in pools if model.profile_for(pool.device) is None)
    if lacking:
        expected = f"a measured profile of {chain.name}, because the model states no FLOP"
        suggestion = "measure it there (argosy profile), or leave these devices out of the cluster"
        raise InputError(Problem(path=kind, expected=expected, suggestion=suggestion) for kind in lacking)


def _pool(cluster: Cluster, index: int, nodes: Sequence[tuple[str, ...]]) -> Pool:
    home, _ = cluster.node_of[nodes[0][0]]
    best, shared = (float("inf"), 0.0), False
    if len(home.devices) > 1:
        routes = cluster.routes(home.devices[0], home.devices[1])
        route = max(routes, key=lambda r: (cluster.bandwidth_at(r), -cluster.latency(r)))
        best, shared = (max(DOWN, cluster.bandwidth_at(route)), cluster.latency(route)), len(route.links) == 1
    bandwidth, latency = _outward(cluster, home)
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
    )


def _outward(cluster: Cluster, home: Node) -> tuple[float, float]:
    """The widest first link and the least latency from a node to any other, one of each look and switch."""
    seen: set[tuple[Any, ...]] = set()
    bandwidth, latency = 0.0, float("inf")
    for other in cluster.nodes:
        looks = (_looks(cluster, other), other.uplinks)
        if other is home or looks in seen:
            continue
        seen.add(looks)
        for route in cluster.routes(home.devices[0], other.devices[0]):
            bandwidth = max(bandwidth, cluster.links[route.links[0]].bandwidth.at(0))
            latency = min(latency, cluster.latency(route))
    return bandwidth, latency if bandwidth else 0.0


def _looks(cluster: Cluster, node: Node) -> tuple[Any, ...]:
    """What a node looks like to the rest of the cluster, at time 0."""

    def figures(links: Sequence[int]) -> tuple[tuple[float, float], ...]:
        return tuple((cluster.links[link].bandwidth.at(0), cluster.links[link].latency.at(0)) for link in links)

    kinds = tuple((cluster.device(n).kind.name, cluster.device(n).efficiency) for n in node.devices)
    media = tuple((m.name, figures((m.outward[0], m.inward[0])), m.outward[0] == m.inward[0]) for m in node.media)
    uplinks = tuple(figures(pair) for pair in node.uplinks)
    wires = tuple((w.name, node.name in w.one) for w in cluster.wires if node.name in w.one or node.name in w.other)
    return kinds, media, figures(node.nic or ()), uplinks, wires
