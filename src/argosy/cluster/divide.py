"""Divide a cluster into parts between which links are slower than inside: candidates for islands.

With b(x, y) the bandwidth between two nodes at time 0, the parts of level b are the connected
components of the graph of nodes with an edge wherever b(x, y) >= b. Every bandwidth that occurs
gives a division.
"""

from __future__ import annotations

import itertools
import math

from argosy.cluster.topology import Cluster, Node
from argosy.errors import InfeasibleError, bad_input, impossible

Division = tuple[tuple[str, ...], ...]
"""Devices by part, in the cluster's order."""

# Option that error messages name.
_OPTION = "--islands"
# Bytes of the message for which the fastest of several routes is chosen.
_PROBE_BYTES = 1e6


def divisions(cluster: Cluster) -> list[Division]:
    """Return every division of at least two parts that follows from the bandwidths between nodes,
    coarsest first."""
    nodes = _live(cluster)
    edges: dict[float, list[tuple[int, int]]] = {}
    for left, right in itertools.combinations(range(len(nodes)), 2):
        bandwidth = _bandwidth(cluster, nodes[left], nodes[right])
        edges.setdefault(bandwidth, []).append((left, right))
    part_of = list(range(len(nodes)))
    levels = [_parts(cluster, nodes, part_of)]
    for bandwidth in sorted(edges, reverse=True):
        if bandwidth > 0:
            for left, right in edges[bandwidth]:
                old, new = part_of[right], part_of[left]
                part_of = [new if part == old else part for part in part_of]
            levels.append(_parts(cluster, nodes, part_of))
    distinct = {len(division): division for division in levels if len(division) > 1}
    return [distinct[count] for count in sorted(distinct)]


def division_into(cluster: Cluster, count: int) -> Division:
    """Return the division into ``count`` parts: the coarsest that has at least as many, with its
    slowest parts joined."""
    most = len(_live(cluster))
    if most < 2:
        reason = f"{cluster.name} has one node"
        raise impossible(f"form {count} islands", reason, f"{_OPTION} off")
    if not 2 <= count <= most:
        expected = "2, for its two nodes" if most == 2 else f"2 to {most}, the number of its nodes"
        raise bad_input(f"for {cluster.name} {expected}", count, _OPTION)
    finer = next(division for division in divisions(cluster) if len(division) >= count)
    parts = [list(part) for part in finer]
    while len(parts) > count:
        parts.sort(key=lambda part: (_speed(cluster, part), part))
        parts = [parts[0] + parts[1], *parts[2:]]
    order = cluster.device_index
    return tuple(
        sorted(
            (tuple(sorted(part, key=order.__getitem__)) for part in parts),
            key=lambda p: order[p[0]],
        )
    )


def _live(cluster: Cluster) -> list[Node]:
    """Return the nodes with a device that is not lost at time 0."""
    return [
        node
        for node in cluster.nodes
        if any(cluster.device(name).speed.at(0) > 0 for name in node.devices)
    ]


def _bandwidth(cluster: Cluster, left: Node, right: Node) -> float:
    """Return the bytes/s between two nodes at time 0, in the slower direction; 0 without a
    route."""
    slower = math.inf
    for source, target in ((left, right), (right, left)):
        try:
            route = cluster.fastest(source.devices[0], target.devices[0], _PROBE_BYTES)
        except InfeasibleError:
            return 0.0
        slower = min(slower, cluster.bandwidth_at(route))
    return slower


def _parts(cluster: Cluster, nodes: list[Node], part_of: list[int]) -> Division:
    parts: dict[int, list[str]] = {}
    for node, part in zip(nodes, part_of, strict=True):
        parts.setdefault(part, []).extend(
            name for name in node.devices if cluster.device(name).speed.at(0) > 0
        )
    return tuple(tuple(devices) for devices in parts.values())


def _speed(cluster: Cluster, devices: list[str]) -> float:
    """Return the FLOP/s of devices at time 0, each in the format in which it is fastest."""
    members = [cluster.device(name) for name in devices]
    return math.fsum(device.speed.at(0) * device.kind.fastest for device in members)
