"""A cluster at one moment, and from one moment on: as it is then for ever, or with what is left of its future."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from argosy.cluster.topology import Cluster, Node
from argosy.cluster.trace import Trace


def last_change(clusters: Sequence[Cluster]) -> float:
    """The last knot of any trace; 0 where nothing changes."""
    traces = [trace for cluster in clusters for link in cluster.links for trace in (link.bandwidth, link.latency)]
    traces += [device.speed for cluster in clusters for device in cluster.devices]
    return max((trace.times[-1] for trace in traces), default=0.0)


def at_time_zero(cluster: Cluster) -> Cluster:
    """The cluster as it is at time 0, for ever: what a plan without a scenario is made for."""
    return at_moment(cluster, 0.0) if last_change([cluster]) else cluster


def at_moment(cluster: Cluster, time: float) -> Cluster:
    """The cluster as it is at a moment, for ever."""
    return _with_traces(cluster, lambda trace: Trace.constant(trace.at(time)))


def from_moment(cluster: Cluster, time: float) -> Cluster:
    """The cluster with its future from a moment on, which becomes time 0."""
    return _with_traces(cluster, lambda trace: trace.after(time)) if time else cluster


def _with_traces(cluster: Cluster, change: Callable[[Trace], Trace]) -> Cluster:
    links = [replace(link, bandwidth=change(link.bandwidth), latency=change(link.latency)) for link in cluster.links]
    devices = [replace(device, speed=change(device.speed)) for device in cluster.devices]
    return replace(cluster, links=tuple(links), devices=tuple(devices))


def with_only(cluster: Cluster, names: Collection[str]) -> Cluster:
    """The cluster with every device lost for ever but those of these names."""
    devices = [d if d.name in names else replace(d, speed=Trace.constant(0.0)) for d in cluster.devices]
    return replace(cluster, devices=tuple(devices))


def within_reach(cluster: Cluster) -> Cluster:
    """The cluster without the devices that a link which is down at time 0 cuts off from the rest: of the parts into
    which it falls the one with most speed stays."""
    if all(link.bandwidth.at(0) > 0 for link in cluster.links):
        return cluster
    parts: list[list[Node]] = []
    for node in cluster.nodes:
        joined = [part for part in parts if any(_see_each_other(cluster, node, other) for other in part)]
        parts = [part for part in parts if part not in joined] + [[node, *(one for part in joined for one in part)]]
    stays = max(parts, key=lambda part: sum(_speed(cluster, node) for node in part))
    return with_only(cluster, {name for node in stays for name in node.devices})


def _see_each_other(cluster: Cluster, one: Node, other: Node) -> bool:
    pairs = ((one.devices[0], other.devices[0]), (other.devices[0], one.devices[0]))
    return all(cluster.bandwidth_at(cluster.fastest(*pair, 1e6)) > 0 for pair in pairs)


def _speed(cluster: Cluster, node: Node) -> float:
    devices = [cluster.device(name) for name in node.devices]
    return sum(device.speed.at(0) * max(rate for _, rate in device.kind.flops) for device in devices)
