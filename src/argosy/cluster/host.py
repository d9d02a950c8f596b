"""Model the host memory of nodes and the links to it, for plans that keep something outside their
devices.

Defaults for what a cluster file omits:

    (1)  size       the memory of the node's devices together, at least 32 GiB
    (2)  bandwidth  that of the device's kind (``data/devices.toml``), in each direction; if
         ``shared``, the largest one

A plan may use ``USABLE_HOST`` of (1), every device an equal share. Links to host memory are not
among those of a ``Cluster``: ``with_host_links`` adds them for the exact engine.
"""

from __future__ import annotations

from enum import StrEnum

from argosy.cluster.topology import Cluster, Link, Node, Route
from argosy.cluster.trace import Trace
from argosy.units import GIB


class Tier(StrEnum):
    """A place outside the devices where a stage of a plan keeps data."""

    HOST = "host"
    """Memory of the node."""
    NVME = "nvme"
    """A drive of the node; priced and simulated, not run."""


# Share of a host's memory that a plan may fill: the rest is for the system and the data.
USABLE_HOST = 0.8
# Least bytes of host memory that are assumed (1).
_LEAST_SIZE = 32 * GIB


def host_size(cluster: Cluster, node: Node) -> float:
    """Return the bytes of a node's host memory, by default (1)."""
    if node.host_memory.size is not None:
        return node.host_memory.size
    return max(_LEAST_SIZE, sum(cluster.device(name).kind.memory for name in node.devices))


def tier_size(cluster: Cluster, node: Node, tier: Tier) -> float:
    """Return the bytes that a plan may keep in host memory or on the drive of a node; 0 without a
    drive."""
    if tier is Tier.NVME:
        return node.host_memory.nvme_size or 0.0
    return USABLE_HOST * host_size(cluster, node)


def host_bandwidth(cluster: Cluster, name: str) -> float:
    """Return the bytes/s between one device and its host, by default (2)."""
    node, _ = cluster.node_of[name]
    if node.host_memory.bandwidth is not None:
        return node.host_memory.bandwidth
    kinds = [
        cluster.device(device).kind
        for device in (node.devices if node.host_memory.shared else (name,))
    ]
    return max(kind.host_bandwidth for kind in kinds)


def tier_name(node: str, tier: Tier) -> str:
    """Return the name of a tier as the end of a flow: ``box0.host``."""
    return f"{node}.{tier}"


def with_host_links(cluster: Cluster) -> Cluster:
    """Return the cluster with links and routes between every device and the memory and drive of its
    node."""
    links: list[Link] = []
    routes: dict[tuple[str, str], tuple[Route, ...]] = {}

    def add(name: str, edge: str, bandwidth: float) -> int:
        links.append(
            Link(
                name=name,
                edge=edge,
                bandwidth=Trace.constant(bandwidth),
                latency=Trace.constant(0.0),
            )
        )
        return len(cluster.links) + len(links) - 1

    for node in cluster.nodes:
        edge = tier_name(node.name, Tier.HOST)
        common = None
        if node.host_memory.shared:
            rate = host_bandwidth(cluster, node.devices[0])
            common = tuple(add(f"{edge}.{way}", edge, rate) for way in ("out", "in"))
        drive = None
        if node.host_memory.nvme_size is not None:
            nvme = tier_name(node.name, Tier.NVME)
            drive = tuple(
                add(f"{nvme}.{way}", nvme, node.host_memory.nvme_bandwidth) for way in ("out", "in")
            )
        for name in node.devices:
            rate = host_bandwidth(cluster, name)
            own = common or tuple(add(f"{name}.host.{way}", edge, rate) for way in ("out", "in"))
            routes[name, edge] = (Route("host", (own[0],)),)
            routes[edge, name] = (Route("host", (own[1],)),)
            if drive is not None:
                far = tier_name(node.name, Tier.NVME)
                routes[name, far] = (Route("nvme", (own[0], drive[0])),)
                routes[far, name] = (Route("nvme", (own[1], drive[1])),)
    return cluster.with_links(links, routes)
