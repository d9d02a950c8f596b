"""A cluster at one moment, and from one moment on: as it is then for ever, or with what is left of
its future."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import replace

from argosy.cluster.topology import Cluster, Node
from argosy.cluster.trace import Trace


def last_change(clusters: Sequence[Cluster]) -> float:
    """The last knot of any trace; 0 where nothing changes."""
    traces = [
        trace
        for cluster in clusters
        for link in cluster.links
        for trace in (link.bandwidth, link.latency)
    ]
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
    links = [
        replace(link, bandwidth=change(link.bandwidth), latency=change(link.latency))
        for link in cluster.links
    ]
    devices = [replace(device, speed=change(device.speed)) for device in cluster.devices]
    return replace(cluster, links=tuple(links), devices=tuple(devices))


def with_only(cluster: Cluster, names: Collection[str]) -> Cluster:
    """The cluster with every device lost for ever but those of these names."""
    devices = [
        d if d.name in names else replace(d, speed=Trace.constant(0.0)) for d in cluster.devices
    ]
    return replace(cluster, devices=tuple(devices))


def within_reach(cluster: Cluster) -> Cluster:
    """The cluster without the devices that a link which is down at time 0 cuts off from the rest:
    of the parts into which it falls the one with most speed stays."""
    if all(link.bandwidth.at(0) > 0 for link in cluster.links):
        return cluster
    stays = max(_parts(cluster), key=lambda part: math.fsum(_speed(cluster, node) for node in part))
    return with_only(cluster, {name for node in stays for name in node.devices})


def _parts(cluster: Cluster) -> list[list[Node]]:
    """The nodes that see each other, or see others that do; parts with later nodes come later.

    Nodes are taken in groups of which each member sees the same others (``_view``), so that one
    speaks for all. Without wires of their own, those of one group see each other and nobody of
    another such group; what has wires is asked.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    dead = {link for link, one in enumerate(cluster.links) if one.bandwidth.at(0) <= 0}
    dead |= {member for members, link in cluster.shared if link in dead for member in members}
    wires = _wires(cluster)
    for at, node in enumerate(cluster.nodes):
        groups.setdefault(_view(cluster, node, wires.get(node.name, ()), dead), []).append(at)
    part_of = list(range(len(cluster.nodes)))

    def part(at: int) -> int:
        while part_of[at] != at:
            part_of[at] = at = part_of[part_of[at]]
        return at

    def join(members: Sequence[int]) -> None:
        for member in members[1:]:
            part_of[part(member)] = part(members[0])

    asked: list[list[int]] = []
    for (wired, reach, *_), group in groups.items():
        first = cluster.nodes[group[0]]
        if not wired:
            if reach is not None:
                join(group)
            continue
        if len(group) > 1 and _see_each_other(cluster, first, cluster.nodes[group[1]]):
            join(group)
        asked.append(group)
    for at, group in enumerate(asked):
        others = [*asked[:at], *(other for view, other in groups.items() if not view[0])]
        for other in others:
            apart = part(group[0]) != part(other[0])
            if apart and _see_each_other(cluster, cluster.nodes[group[0]], cluster.nodes[other[0]]):
                join([*group, *other])
    parts: dict[int, list[int]] = {}
    for at in range(len(cluster.nodes)):
        parts.setdefault(part(at), []).append(at)
    return [[cluster.nodes[at] for at in one] for one in sorted(parts.values(), key=max)]


def _wires(cluster: Cluster) -> dict[str, tuple[tuple[int, bool], ...]]:
    """Per node its ends of wires."""
    found: dict[str, tuple[tuple[int, bool], ...]] = {}
    for at, wire in enumerate(cluster.wires):
        for names, end in ((wire.one, True), (wire.other, False)):
            for name in names:
                found[name] = (*found.get(name, ()), (at, end))
    return found


def _view(
    cluster: Cluster, node: Node, wired: tuple[tuple[int, bool], ...], dead: Set[int]
) -> tuple[object, ...]:
    """Its wires; how far up the switches it is heard (None: not at all); and what decides which
    wire is the fastest."""
    reach: tuple[int, ...] | None = None
    if node.nic and dead.isdisjoint(node.nic):
        heard = next(
            (at for at, way in enumerate(node.uplinks) if not dead.isdisjoint(way)),
            len(node.uplinks),
        )
        reach = tuple(out for out, _ in node.uplinks[heard:])
    if not wired:
        return wired, reach
    links = [
        (cluster.links[link].bandwidth, cluster.links[link].latency) for link in node.nic or ()
    ]
    shared = tuple(
        link for members, link in cluster.shared if not members.isdisjoint(node.nic or ())
    )
    return wired, reach, *links, shared


def _see_each_other(cluster: Cluster, one: Node, other: Node) -> bool:
    pairs = ((one.devices[0], other.devices[0]), (other.devices[0], one.devices[0]))
    return all(cluster.bandwidth_at(cluster.fastest(*pair, 1e6)) > 0 for pair in pairs)


def _speed(cluster: Cluster, node: Node) -> float:
    devices = [cluster.device(name) for name in node.devices]
    return sum(
        device.speed.at(0) * max(rate for _, rate in device.kind.flops) for device in devices
    )
