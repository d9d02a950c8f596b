"""Define a cluster: devices in nodes, and a network of directed links with its routes.

The network is a multigraph. A user names *edges* (``v0.nic``, ``v0.nvlink``, ``wan``); inside, an
edge is one or more directed ``Link``s, each with its own capacity:

    edge                     links
    a node's medium          ``v0.2.nvlink.out`` and ``.in`` for every device, into a non-blocking
                             switch of the node
    a shared medium          ``v0.pcie``: one capacity for the whole node
    a node's NIC             ``v0.nic.out``, ``v0.nic.in``
    a switch's uplink        ``rack0.uplink.out``, ``rack0.uplink.in``
    a [[links]] entry        ``wan.forward``, ``wan.back``
    a [[shared]] entry       ``root0``: one capacity on top of the edges it lists

A transfer takes one ``Route``; parallel edges give several routes between the same two devices, and
*conflicts* list edges that cannot carry bytes at the same time. A route's latency is the sum of
those of its links; its bandwidth at any time is that of its narrowest link.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from argosy.cluster.device import Device
from argosy.cluster.trace import Trace, minimum
from argosy.errors import InfeasibleError, bad_input, closest

# Longest pattern that is matched; matching longer ones could take very long.
_LONGEST_PATTERN = 1000


@dataclass(frozen=True, kw_only=True)
class Link:
    """A directed capacity that the network has."""

    name: str
    edge: str
    """Name that the user gives it; the directions of one edge share this name."""
    bandwidth: Trace
    """Bytes/s over time; 0 = down."""
    latency: Trace
    """Seconds over time."""
    price_per_byte: float = 0.0
    """Price in the user's currency."""


@dataclass(frozen=True)
class Route:
    """A way that leads from a device to another: indices of the links it crosses, in order."""

    medium: str
    links: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Medium:
    """A medium that connects the devices of one node by links out of and into each of them."""

    name: str
    outward: tuple[int, ...]
    """Link per device of the node; one link for all if the medium is shared."""
    inward: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine that runs a node, as schedulers and the network name it; plans do not depend on
    it."""

    name: str
    """Name of the host, also in a scheduler."""
    address: str | None = None
    """Address at which other hosts reach it; its name unless given."""
    interface: str | None = None
    """Network interface that training uses; unless given, the one that leads to the first node."""
    port: int | None = None
    """Port at which the store of a run listens, if this is its first node."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """A description of the memory that a node has and of the links to it; None for what the file
    omits (``cluster.host``)."""

    size: float | None = None
    """Bytes."""
    bandwidth: float | None = None
    """Bytes/s of a device, in each direction; of all devices of the node together if ``shared``."""
    shared: bool = False
    """Whether one link in each direction serves all devices of the node."""
    nvme_size: float | None = None
    """Bytes of a drive; None: there is none."""
    nvme_bandwidth: float = 0.0
    """Bytes/s in each direction, for all devices of the node together."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host that has devices."""

    name: str
    devices: tuple[str, ...]
    media: tuple[Medium, ...] = ()
    nic: tuple[int, int] | None = None
    """Links out of and into the host."""
    uplinks: tuple[tuple[int, int], ...] = ()
    """Links out of and into each switch above the host, nearest first."""
    machine: Machine | None = None
    cpus: int | None = None
    """CPUs that a scheduler may give a job there; None if the file does not state it."""
    gres: tuple[str | None, ...] = ()
    """Generic resource of Slurm per device; None if the file does not state it."""
    host_memory: HostMemory = HostMemory()


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A [[links]] entry, which is an edge between two groups of nodes in place of the route through
    the switches."""

    name: str
    nodes: frozenset[str]
    """The names of the nodes at the end where ``forward`` begins."""
    far_nodes: frozenset[str]
    forward: int
    back: int
    bypasses_nic: bool


@dataclass(frozen=True, kw_only=True)
class CalibrationFactors:
    """A set of factors by which a calibration changes links and devices; the defaults change
    nothing."""

    bandwidth: float = 1.0
    """Share of a link's stated bandwidth that reaches the program."""
    nic_bandwidth: float | None = None
    """Share of the stated bandwidth for links between nodes; None: ``bandwidth``."""
    latency: float = 0.0
    """Seconds added to the latency of every message."""
    process_bytes: float = 0.0
    """Bytes of every device's memory that a process takes before the model."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster, which consists of devices and the network between them, with all known future
    changes."""

    name: str
    nodes: tuple[Node, ...]
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    wires: tuple[Wire, ...] = ()
    conflicts: tuple[tuple[frozenset[int], ...], ...] = ()
    """Groups of edges (as sets of links) of which at most one may carry bytes at a time."""
    shared: tuple[tuple[frozenset[int], int], ...] = ()
    """Pairs (members, link): routes over any member also cross the link."""
    content: str = field(default="{}", repr=False)
    """The cluster file as canonical JSON, with every trace written out; ``fit`` is not in it."""
    fit: CalibrationFactors = CalibrationFactors()
    """Calibration that ``links`` and ``devices`` already contain."""

    @cached_property
    def hash(self) -> str:
        """Return the SHA-256 of ``content``; equal for equal clusters."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    def names_without(self, used: Container[str]) -> list[str]:
        """Return the names of the devices that are not among those used."""
        return [device.name for device in self.devices if device.name not in used]

    @property
    def identity(self) -> dict[str, str]:
        """Return the name and the hash, for a JSON document."""
        return {"name": self.name, "hash": self.hash}

    @cached_property
    def device_index(self) -> dict[str, int]:
        return {device.name: index for index, device in enumerate(self.devices)}

    @cached_property
    def edges(self) -> dict[str, list[int]]:
        """Return the links of each edge."""
        links: dict[str, list[int]] = {}
        for index, link in enumerate(self.links):
            links.setdefault(link.edge, []).append(index)
        return links

    @cached_property
    def halved(self) -> frozenset[int]:
        """Return the links of media that are not shared: a transfer crosses two of them, each with
        half of the medium's latency."""
        media = [
            medium
            for node in self.nodes
            for medium in node.media
            if medium.outward != medium.inward
        ]
        return frozenset(link for medium in media for link in medium.outward + medium.inward)

    @cached_property
    def node_of(self) -> dict[str, tuple[Node, int]]:
        """Return the node and the position in it for each device name."""
        return {
            name: (node, index) for node in self.nodes for index, name in enumerate(node.devices)
        }

    @cached_property
    def last_change(self) -> float:
        """Return the seconds of the last knot of any trace; 0 if nothing changes."""
        traces = itertools.chain(
            (link.bandwidth for link in self.links),
            (link.latency for link in self.links),
            (device.speed for device in self.devices),
        )
        return max((trace.times[-1] for trace in traces), default=0.0)

    @cached_property
    def node_names(self) -> dict[str, str]:
        """Return the name of the node for each device name."""
        return {device.name: device.node for device in self.devices}

    @cached_property
    def _routes(self) -> dict[tuple[str, str], tuple[Route, ...]]:
        return {}

    def device(self, name: str) -> Device:
        if name not in self.device_index:
            raise bad_input(
                f"a device of {self.name}", name, suggestion=closest(name, self.device_index)
            )
        return self.devices[self.device_index[name]]

    def routes(self, source: str, target: str) -> tuple[Route, ...]:
        """Return every route from one device to another, at least one; raise an ``InfeasibleError``
        if there is none."""
        key = (source, target)
        if key not in self._routes:
            routes = tuple(self._find_routes(self.device(source).name, self.device(target).name))
            if not routes:
                raise InfeasibleError(
                    f"{self.name}: no route from {source} to {target}; "
                    "give their nodes a nic, or a [[links]] entry between them"
                )
            self._routes[key] = routes
        return self._routes[key]

    def with_routes(self, routes: Mapping[tuple[str, str], tuple[Route, ...]]) -> Cluster:
        """Return the cluster with the caller's routes between some devices."""
        copy = replace(self)
        copy._routes.update(routes)
        return copy

    def with_links(
        self, links: Sequence[Link], routes: Mapping[tuple[str, str], tuple[Route, ...]]
    ) -> Cluster:
        """Return the cluster with more links, and with routes over them to places that are no
        devices."""
        copy = replace(self, links=(*self.links, *links))
        copy._routes.update({**self._routes, **routes})
        return copy

    def latency(self, route: Route, time: float = 0.0) -> float:
        """Return the seconds of latency from one end of a route to the other at ``time``."""
        return sum(self.links[link].latency.at(time) for link in route.links)

    def bandwidth(self, route: Route) -> Trace:
        """Return the bytes/s over time that a route has without other traffic."""
        return minimum(self.links[link].bandwidth for link in route.links)

    def bandwidth_at(self, route: Route, time: float = 0.0) -> float:
        """Return the bytes/s at ``time`` that a route has without other traffic."""
        return min(self.links[link].bandwidth.at(time) for link in route.links)

    def fastest(self, source: str, target: str, num_bytes: float, time: float = 0.0) -> Route:
        """Return the route over which ``num_bytes``, alone on the network, arrive first; the
        earlier one on a tie."""

        def arrival(route: Route) -> float:
            end = self.bandwidth(route).advance(time, num_bytes)
            return end + self.latency(route, end)

        choices = self.routes(source, target)
        return choices[0] if len(choices) == 1 else min(choices, key=arrival)

    def _find_routes(self, source: str, target: str) -> Iterator[Route]:
        (start, out_index), (end, in_index) = self.node_of[source], self.node_of[target]
        if start is end:
            for medium in start.media:
                yield self._route(medium.name, (medium.outward[out_index], medium.inward[in_index]))
            return
        nics = (start.nic[0], end.nic[1]) if start.nic and end.nic else None
        has_wire = False
        for wire in self.wires:
            forward = start.name in wire.nodes and end.name in wire.far_nodes
            back = start.name in wire.far_nodes and end.name in wire.nodes
            if not (forward or back):
                continue
            has_wire = True
            middle = wire.forward if forward else wire.back
            if wire.bypasses_nic:
                yield self._route(wire.name, (middle,))
            elif nics:
                yield self._route(wire.name, (nics[0], middle, nics[1]))
        if nics and not has_wire:
            yield self._route("network", (nics[0], *_between(start, end), nics[1]))

    def _route(self, medium: str, links: tuple[int, ...]) -> Route:
        extra = [link for members, link in self.shared if not members.isdisjoint(links)]
        return Route(medium, tuple(dict.fromkeys((*links, *extra))))

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for device in self.devices:
            counts[device.kind.name] = counts.get(device.kind.name, 0) + 1
        kinds = " + ".join(f"{count}x {kind}" for kind, count in counts.items())
        return f"{self.name}: {kinds} in {len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''}"


def _between(start: Node, end: Node) -> tuple[int, ...]:
    """Return the links up from one host to the first switch that both are under, and down to the
    other."""
    common = {out for out, _ in start.uplinks} & {out for out, _ in end.uplinks}
    up = tuple(out for out, _ in start.uplinks if out not in common)
    down = tuple(into for out, into in end.uplinks if out not in common)
    return up + down[::-1]


def is_meant(name: str, pattern: str) -> bool:
    """Return whether a pattern of a file or command (``a*.nic``) matches the name of an edge or
    device; very long patterns match nothing."""
    return len(pattern) <= _LONGEST_PATTERN and fnmatchcase(name, pattern)


def canonical(content: dict[str, Any]) -> str:
    """Return JSON with sorted keys and no spaces: equal content gives equal bytes."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
