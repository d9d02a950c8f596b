"""A cluster as it is at one moment, for ever, or from one moment on."""

from __future__ import annotations

from dataclasses import replace

from argosy.cluster.topology import Cluster, Node
from argosy.cluster.trace import Trace


def at_time_zero(cluster: Cluster) -> Cluster:
    """The cluster as it is at time 0, for ever: what a plan without a scenario is made for."""
    if all(link.bandwidth.is_constant and link.latency.is_constant for link in cluster.links) and all(
        device.speed.is_constant for device in cluster.devices
    ):
        return cluster
    links = tuple(
        replace(link, bandwidth=Trace.constant(link.bandwidth.at(0)), latency=Trace.constant(link.latency.at(0)))
        for link in cluster.links
    )
    devices = tuple(replace(device, speed=Trace.constant(device.speed.at(0))) for device in cluster.devices)
    return replace(cluster, links=links, devices=devices)


def from_moment(cluster: Cluster, moment: float) -> Cluster:
    """The cluster with time 0 at a later moment."""
    if moment == 0:
        return cluster
    links = tuple(
        replace(link, bandwidth=link.bandwidth.after(moment), latency=link.latency.after(moment))
        for link in cluster.links
    )
    devices = tuple(replace(device, speed=device.speed.after(moment)) for device in cluster.devices)
    return replace(cluster, links=links, devices=devices)


def within_reach(cluster: Cluster) -> Cluster:
    """The same at time 0, with every device lost that the rest cannot reach because a link is down: of the parts into
    which that cuts the cluster the one with most speed stays."""
    if all(link.bandwidth.at(0) > 0 for link in cluster.links):
        return cluster
    parts: list[list[Node]] = []
    for node in cluster.nodes:
        joined = [part for part in parts if any(_see_each_other(cluster, node, other) for other in part)]
        parts = [part for part in parts if part not in joined] + [[node, *(one for part in joined for one in part)]]
    stays = max(parts, key=lambda part: sum(_speed(cluster, node) for node in part))
    kept = {name for node in stays for name in node.devices}
    devices = [
        device if device.name in kept else replace(device, speed=Trace.constant(0.0)) for device in cluster.devices
    ]
    return replace(cluster, devices=tuple(devices))


def _see_each_other(cluster: Cluster, one: Node, other: Node) -> bool:
    pairs = ((one.devices[0], other.devices[0]), (other.devices[0], one.devices[0]))
    return all(cluster.bandwidth(cluster.fastest(*pair, 1e6)).at(0) > 0 for pair in pairs)


def _speed(cluster: Cluster, node: Node) -> float:
    devices = [cluster.device(name) for name in node.devices]
    return sum(device.speed.at(0) * max(rate for _, rate in device.kind.flops) for device in devices)
