"""Plan a lab for a cluster file: hosts, bridges and the interfaces on which each link is shaped.

    (1)  A node is a host: a network namespace with one interface, plugged into a bridge.
    (2)  A switch is a bridge; its uplink is a cable to the bridge above it.
    (3)  A [[links]] entry between two whole sides of the network is a cable between their bridges.
    (4)  Every directed link of the cluster is the sending end of one cable, where a token bucket
         limits it.

Devices of one node communicate over its loopback at the machine's own speed. Parallel links, links
around a NIC and a capacity shared by several edges cannot be built this way and are refused by
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from argosy.cluster.topology import Cluster, Node
from argosy.errors import Problem, raise_any

SWITCH = "switch"
"""The namespace that contains all bridges."""
INTERFACE = "eth0"
"""A host's only interface beside its loopback."""
# The most nodes that a lab accepts.
_MOST_HOSTS = 64
_CORE = "core"
"""The bridge of hosts that are under no switch."""


@dataclass(frozen=True)
class Port:
    """One end of a cable, with the link that it shapes on sending."""

    namespace: str
    interface: str
    link: str | None
    """A directed link's name; None for an end that is not limited."""


@dataclass(frozen=True)
class Cable:
    """A cable that connects two ports; an end in the switch's namespace belongs to a bridge."""

    first: Port
    second: Port
    bridges: tuple[str | None, str]


@dataclass(frozen=True, kw_only=True)
class LabHost:
    """A host that represents a node of the cluster."""

    name: str
    address: str
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LabLayout:
    """A description of everything that a lab builds."""

    hosts: tuple[LabHost, ...]
    bridges: tuple[str, ...]
    cables: tuple[Cable, ...]

    @property
    def ports(self) -> dict[str, Port]:
        """Return ports by the link that each shapes."""
        return {
            port.link: port
            for cable in self.cables
            for port in (cable.first, cable.second)
            if port.link
        }

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (SWITCH, *(host.name for host in self.hosts))


def lay_out(cluster: Cluster) -> LabLayout:
    """Return the layout by (1) to (4); raise an ``InputError`` that names every edge that cannot be
    emulated."""
    problems = [*_refusals(cluster)]
    islands = _islands(cluster)
    for wire in cluster.wires:
        groups = (wire.nodes, wire.far_nodes)
        sides = [{islands[node] for node in group} for group in groups]
        reached = [{node for node, at in islands.items() if at in side} for side in sides]
        whole = all(nodes == set(group) for nodes, group in zip(reached, groups, strict=True))
        if not whole or any(len(side) != 1 for side in sides):
            problems.append(
                _problem(wire.name, "a link between two groups that nothing else connects")
            )
    raise_any(problems)
    hosts = tuple(
        LabHost(
            name=node.name, address=f"10.77.{index // 250}.{index % 250 + 1}", devices=node.devices
        )
        for index, node in enumerate(cluster.nodes)
    )
    bridges = {node.name: _bridge(cluster, node, islands[node.name]) for node in cluster.nodes}
    cables = [
        *_host_cables(cluster, bridges),
        *_uplinks(cluster, islands),
        *_wires(cluster, islands),
    ]
    names = dict.fromkeys(
        [*bridges.values(), *(bridge for cable in cables for bridge in cable.bridges if bridge)]
    )
    return LabLayout(hosts=hosts, bridges=tuple(names), cables=tuple(cables))


def not_emulated(cluster: Cluster) -> tuple[str, ...]:
    """Return, as sentences, what a lab does not emulate of a cluster that it can build."""
    notes = []
    latency = max((link.latency.at(0) for link in cluster.links), default=0.0)
    if latency >= 1e-3:
        notes.append(f"latency (up to {latency * 1e3:.3g} ms here): the lab shapes bandwidth only")
    media = sorted({medium.name for node in cluster.nodes for medium in node.media})
    if media:
        notes.append(f"{', '.join(media)}: devices of one node talk over the loopback, unshaped")
    return tuple(notes)


def _refusals(cluster: Cluster) -> list[Problem]:
    problems = []
    if len(cluster.nodes) > _MOST_HOSTS:
        problems.append(_problem("nodes", f"at most {_MOST_HOSTS} nodes", str(len(cluster.nodes))))
    if len(cluster.nodes) > 1:
        problems += [
            _problem(node.name, "a nic on every node") for node in cluster.nodes if node.nic is None
        ]
    problems += [
        _problem(wire.name, "a link that uses the NICs")
        for wire in cluster.wires
        if wire.bypasses_nic
    ]
    problems += [
        _problem(cluster.links[link].name, "no capacity shared by several edges")
        for _, link in cluster.shared
    ]
    pairs = [frozenset((wire.nodes, wire.far_nodes)) for wire in cluster.wires]
    problems += [
        _problem(wire.name, "one link between two groups, none parallel to it")
        for index, wire in enumerate(cluster.wires)
        if pairs[index] in pairs[:index]
    ]
    return problems


def _problem(where: str, expected: str, found: str | None = None) -> Problem:
    return Problem(where, found, f"{expected}, in a cluster for the lab")


def _islands(cluster: Cluster) -> dict[str, int]:
    """Return, per node, the number of its side of the network: two nodes that no [[links]] entry
    separates share one."""
    islands: dict[str, int] = {}
    for node in cluster.nodes:
        apart = {
            peer
            for wire in cluster.wires
            for here, there in ((wire.nodes, wire.far_nodes), (wire.far_nodes, wire.nodes))
            if node.name in here
            for peer in there
        }
        near = [
            islands[peer.name]
            for peer in cluster.nodes
            if peer.name in islands and peer.name not in apart
        ]
        islands[node.name] = near[0] if near else max(islands.values(), default=-1) + 1
    return islands


def _bridge(cluster: Cluster, node: Node, island: int) -> str:
    return _switch(cluster, node.uplinks[0][0]) if node.uplinks else f"{_CORE}{island}"


def _switch(cluster: Cluster, uplink: int) -> str:
    return cluster.links[uplink].edge.removesuffix(".uplink")


def _host_cables(cluster: Cluster, bridges: Mapping[str, str]) -> list[Cable]:
    cables = []
    for index, node in enumerate(cluster.nodes):
        out, into = (cluster.links[link].name for link in node.nic) if node.nic else (None, None)
        inside, outside = Port(node.name, INTERFACE, out), Port(SWITCH, f"port{index}", into)
        cables.append(Cable(inside, outside, (None, bridges[node.name])))
    return cables


def _uplinks(cluster: Cluster, islands: Mapping[str, int]) -> list[Cable]:
    """Return every switch's cable to the one above it, or to the core of its side."""
    cables: dict[str, Cable] = {}
    for node in cluster.nodes:
        for at, (out, into) in enumerate(node.uplinks):
            name = _switch(cluster, out)
            above = node.uplinks[at + 1][0] if at + 1 < len(node.uplinks) else None
            parent = f"{_CORE}{islands[node.name]}" if above is None else _switch(cluster, above)
            number = 2 * len(cables)
            if name not in cables:
                up = Port(SWITCH, f"up{number}", cluster.links[out].name)
                down = Port(SWITCH, f"up{number + 1}", cluster.links[into].name)
                cables[name] = Cable(up, down, (name, parent))
    return list(cables.values())


def _wires(cluster: Cluster, islands: Mapping[str, int]) -> list[Cable]:
    cables = []
    for index, wire in enumerate(cluster.wires):
        sides = tuple(f"{_CORE}{islands[min(group)]}" for group in (wire.nodes, wire.far_nodes))
        ports = [
            Port(SWITCH, f"wire{2 * index + at}", cluster.links[link].name)
            for at, link in enumerate((wire.forward, wire.back))
        ]
        cables.append(Cable(ports[0], ports[1], (sides[0], sides[1])))
    return cables
