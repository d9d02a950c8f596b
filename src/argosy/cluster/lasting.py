"""Return a cluster at one time, or from one time on: frozen in that state, or with the rest of its
changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import replace

from argosy.cluster.topology import Cluster, Node
from argosy.cluster.trace import Trace


def last_change(clusters: Sequence[Cluster]) -> float:
    """Return the seconds of the last knot of any trace; 0 if nothing changes."""
    return max((cluster.last_change for cluster in clusters), default=0.0)


def at_time_zero(cluster: Cluster) -> Cluster:
    """Return the cluster with its state at time 0 made permanent: the input of a plan without a
    scenario."""
    return at_moment(cluster, 0.0) if last_change([cluster]) else cluster


def at_moment(cluster: Cluster, time: float) -> Cluster:
    """Return the cluster with its state at a time made permanent."""
    return _with_traces(cluster, lambda trace: Trace.constant(trace.at(time)))


def from_moment(cluster: Cluster, time: float) -> Cluster:
    """Return the cluster with its changes from a time on, which becomes time 0."""
    return _with_traces(cluster, lambda trace: trace.after(time)) if time else cluster


def _with_traces(cluster: Cluster, change: Callable[[Trace], Trace]) -> Cluster:
    links = [
        replace(link, bandwidth=change(link.bandwidth), latency=change(link.latency))
        for link in cluster.links
    ]
    devices = [replace(device, speed=change(device.speed)) for device in cluster.devices]
    return replace(cluster, links=tuple(links), devices=tuple(devices))


def with_only(cluster: Cluster, names: Collection[str]) -> Cluster:
    """Return the cluster with every device permanently lost except those of these names."""
    devices = [
        d if d.name in names else replace(d, speed=Trace.constant(0.0)) for d in cluster.devices
    ]
    return replace(cluster, devices=tuple(devices))


def within_reach(cluster: Cluster) -> Cluster:
    """Return the cluster without the devices that links which are down at time 0 cut off from the
    rest.

    Of the parts into which the cluster falls, the one with most FLOP/s stays.
    """
    if all(link.bandwidth.at(0) > 0 for link in cluster.links):
        return cluster
    stays = max(_parts(cluster), key=lambda part: math.fsum(_speed(cluster, node) for node in part))
    return with_only(cluster, {name for node in stays for name in node.devices})


def _parts(cluster: Cluster) -> list[list[Node]]:
    """Return the connected parts of nodes that can reach each other; parts with later nodes come
    later.

    Nodes are grouped so that all members of a group reach the same others (``_view``), and one is
    tested for all. Without wires of their own, the nodes of one group reach each other and no node
    of another such group; groups with wires are tested pairwise.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    dead = {index for index, link in enumerate(cluster.links) if link.bandwidth.at(0) <= 0}
    dead |= {member for members, link in cluster.shared if link in dead for member in members}
    wires = _wires(cluster)
    for at, node in enumerate(cluster.nodes):
        groups.setdefault(_view(cluster, node, wires.get(node.name, ()), dead), []).append(at)
    parts = _DisjointParts(len(cluster.nodes))
    wired_groups: list[list[int]] = []
    for (wired, reach, *_), group in groups.items():
        first = cluster.nodes[group[0]]
        if not wired:
            if reach is not None:
                parts.join(group)
            continue
        if len(group) > 1 and _see_each_other(cluster, first, cluster.nodes[group[1]]):
            parts.join(group)
        wired_groups.append(group)
    for at, group in enumerate(wired_groups):
        unwired_groups = (members for view, members in groups.items() if not view[0])
        for tested in [*wired_groups[:at], *unwired_groups]:
            first, second = cluster.nodes[group[0]], cluster.nodes[tested[0]]
            apart = parts.part(group[0]) != parts.part(tested[0])
            if apart and _see_each_other(cluster, first, second):
                parts.join([*group, *tested])
    ordered = sorted(parts.members(), key=max)
    return [[cluster.nodes[at] for at in members] for members in ordered]


class _DisjointParts:
    """A union-find structure that joins indices of nodes, which begin as parts of their own."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def part(self, at: int) -> int:
        """Return the index that represents the part of ``at``."""
        parent = self._parent
        while parent[at] != at:
            parent[at] = at = parent[parent[at]]
        return at

    def join(self, members: Sequence[int]) -> None:
        """Make one part of the parts of ``members``."""
        for member in members[1:]:
            self._parent[self.part(member)] = self.part(members[0])

    def members(self) -> list[list[int]]:
        """Return the members of every part."""
        parts: dict[int, list[int]] = {}
        for at in range(len(self._parent)):
            parts.setdefault(self.part(at), []).append(at)
        return list(parts.values())


def _wires(cluster: Cluster) -> dict[str, tuple[tuple[int, bool], ...]]:
    """Return, per node, its ends of wires."""
    ends: dict[str, tuple[tuple[int, bool], ...]] = {}
    for at, wire in enumerate(cluster.wires):
        for names, end in ((wire.nodes, True), (wire.far_nodes, False)):
            for name in names:
                ends[name] = (*ends.get(name, ()), (at, end))
    return ends


def _view(
    cluster: Cluster, node: Node, wired: tuple[tuple[int, bool], ...], dead: Set[int]
) -> tuple[object, ...]:
    """Return a node's wires, the highest switch that it reaches (None: no network), and what
    determines which wire is fastest."""
    reach: tuple[int, ...] | None = None
    if node.nic and dead.isdisjoint(node.nic):
        working = next(
            (at for at, way in enumerate(node.uplinks) if not dead.isdisjoint(way)),
            len(node.uplinks),
        )
        reach = tuple(out for out, _ in node.uplinks[working:])
    if not wired:
        return wired, reach
    links = [
        (cluster.links[link].bandwidth, cluster.links[link].latency) for link in node.nic or ()
    ]
    shared = tuple(
        link for members, link in cluster.shared if not members.isdisjoint(node.nic or ())
    )
    return wired, reach, *links, shared


def _see_each_other(cluster: Cluster, left: Node, right: Node) -> bool:
    pairs = ((left.devices[0], right.devices[0]), (right.devices[0], left.devices[0]))
    return all(cluster.bandwidth_at(cluster.fastest(*pair, 1e6)) > 0 for pair in pairs)


def _speed(cluster: Cluster, node: Node) -> float:
    devices = [cluster.device(name) for name in node.devices]
    return sum(device.speed.at(0) * device.kind.fastest for device in devices)
