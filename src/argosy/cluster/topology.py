"""A cluster: devices in nodes, and a network of directed links with the routes that follow from it.

The network is a multigraph. What a user names is an *edge* (``v0.nic``, ``v0.nvlink``, ``wan``);
inside, an edge is one or more directed ``Link``s, each with its own capacity:

    edge                     links
    a node's medium          ``v0.2.nvlink.out`` and ``.in`` for every device, into a non-blocking switch of the node
    a shared medium          ``v0.pcie``: one capacity for the whole node
    a node's NIC             ``v0.nic.out``, ``v0.nic.in``
    a switch's uplink        ``rack0.uplink.out``, ``rack0.uplink.in``
    a [[links]] entry        ``wan.forward``, ``wan.back``
    a [[shared]] entry       ``root0``: one capacity on top of the edges it lists

A transfer takes one ``Route``; parallel edges give several routes between the same two devices, and
*conflicts* list edges that cannot carry bytes at the same time. A route's latency is the sum of its
links', its bandwidth at any moment that of its narrowest link.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from argosy.cluster.device import Device
from argosy.cluster.trace import Trace, minimum
from argosy.errors import InfeasibleError, bad_input, closest

_LONGEST_PATTERN = 1000


@dataclass(frozen=True, kw_only=True)
class Link:
    """One directed capacity of the network."""

    name: str
    edge: str
    """What the user calls it; the directions of one edge share this name."""
    bandwidth: Trace
    """Bytes/s over time; 0 = down."""
    latency: Trace
    """Seconds over time."""
    price_per_byte: float = 0.0
    """Currency units."""


@dataclass(frozen=True)
class Route:
    """One way from a device to another: indices of the links it crosses, in order."""

    medium: str
    links: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Medium:
    """A way for the devices of one node to talk: links out of and into each of them."""

    name: str
    outward: tuple[int, ...]
    """Per device of the node; the same link for all where the medium is shared."""
    inward: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How a scheduler and the network call a node; nothing of it matters to a plan."""

    name: str
    """The host's name, also in a scheduler."""
    address: str | None = None
    """Where other hosts reach it; its name unless given."""
    interface: str | None = None
    """The network interface that training uses; unless given, the one that leads to the first
    node."""
    port: int | None = None
    """Where the store of a run listens, if this is its first node."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The memory of a node, and how its devices reach it; None where the file does not say
    (``cluster.host``)."""

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
    """A host with its devices."""

    name: str
    devices: tuple[str, ...]
    media: tuple[Medium, ...] = ()
    nic: tuple[int, int] | None = None
    """Links out of and into the host."""
    uplinks: tuple[tuple[int, int], ...] = ()
    """Links out of and into each switch above the host, nearest first."""
    machine: Machine | None = None
    cpus: int | None = None
    """CPUs that a scheduler may give a job there; None where the file does not say."""
    gres: tuple[str | None, ...] = ()
    """Per device, the generic resource that Slurm has it under; None where the file does not
    say."""
    host_memory: HostMemory = HostMemory()


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A [[links]] entry: an edge between two groups of nodes, in place of the route through the
    switches."""

    name: str
    one: frozenset[str]
    other: frozenset[str]
    forward: int
    back: int
    bypasses_nic: bool


@dataclass(frozen=True, kw_only=True)
class CalibrationFactors:
    """What a calibration changes of every link and device; the defaults change nothing."""

    bandwidth: float = 1.0
    """Share of a link's stated bandwidth."""
    nic_bandwidth: float | None = None
    """The same for links outside nodes; None: as inside."""
    latency: float = 0.0
    """Seconds more for every message."""
    process_bytes: float = 0.0
    """Bytes of every device's memory that a process takes before the model."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices and the network between them, with everything that is known of their future."""

    name: str
    nodes: tuple[Node, ...]
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    wires: tuple[Wire, ...] = ()
    conflicts: tuple[tuple[frozenset[int], ...], ...] = ()
    """Each a list of edges (as sets of links) of which at most one may carry bytes at a time."""
    shared: tuple[tuple[frozenset[int], int], ...] = ()
    """(members, link): routes over any member also cross the link."""
    content: str = field(default="{}", repr=False)
    """The cluster file as canonical JSON, with every trace written out; ``fit`` is not in it."""
    fit: CalibrationFactors = CalibrationFactors()
    """The calibration that ``links`` and ``devices`` already contain."""

    @cached_property
    def hash(self) -> str:
        """Of ``content``; equal for equal clusters."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    @cached_property
    def device_index(self) -> dict[str, int]:
        return {device.name: index for index, device in enumerate(self.devices)}

    @cached_property
    def edges(self) -> dict[str, list[int]]:
        """Per edge, its links."""
        found: dict[str, list[int]] = {}
        for index, link in enumerate(self.links):
            found.setdefault(link.edge, []).append(index)
        return found

    @cached_property
    def halved(self) -> frozenset[int]:
        """Links of media that are not shared: a transfer crosses two of them, each with half of a
        medium's latency."""
        media = [
            medium
            for node in self.nodes
            for medium in node.media
            if medium.outward != medium.inward
        ]
        return frozenset(link for medium in media for link in medium.outward + medium.inward)

    @cached_property
    def node_of(self) -> dict[str, tuple[Node, int]]:
        """Per device name, its node and its position there."""
        return {
            name: (node, index) for node in self.nodes for index, name in enumerate(node.devices)
        }

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
        """Every way from one device to another, at least one."""
        key = (source, target)
        if key not in self._routes:
            found = tuple(self._find_routes(self.device(source).name, self.device(target).name))
            if not found:
                raise InfeasibleError(
                    f"{self.name}: no route from {source} to {target}; "
                    "give their nodes a nic, or a [[links]] entry between them"
                )
            self._routes[key] = found
        return self._routes[key]

    def with_routes(self, routes: Mapping[tuple[str, str], tuple[Route, ...]]) -> Cluster:
        """The same cluster with routes of the caller's own between some devices."""
        copy = replace(self)
        copy._routes.update(routes)
        return copy

    def with_links(
        self, links: Sequence[Link], routes: Mapping[tuple[str, str], tuple[Route, ...]]
    ) -> Cluster:
        """The same cluster with more links, and with routes over them to places that are no
        devices."""
        copy = replace(self, links=(*self.links, *links))
        copy._routes.update({**self._routes, **routes})
        return copy

    def latency(self, route: Route, time: float = 0.0) -> float:
        """Seconds from one end to the other at ``time``."""
        return sum(self.links[link].latency.at(time) for link in route.links)

    def bandwidth(self, route: Route) -> Trace:
        """Bytes/s over time if nobody else uses the route."""
        return minimum(self.links[link].bandwidth for link in route.links)

    def bandwidth_at(self, route: Route, time: float = 0.0) -> float:
        """The same at a moment."""
        return min(self.links[link].bandwidth.at(time) for link in route.links)

    def fastest(self, source: str, target: str, num_bytes: float, time: float = 0.0) -> Route:
        """The route over which so many bytes, alone on the network, arrive first; the earlier one
        on a tie."""

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
            forward = start.name in wire.one and end.name in wire.other
            back = start.name in wire.other and end.name in wire.one
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
    """Up from one host to the first switch that both are under, and down to the other."""
    common = {out for out, _ in start.uplinks} & {out for out, _ in end.uplinks}
    up = tuple(out for out, _ in start.uplinks if out not in common)
    down = tuple(into for out, into in end.uplinks if out not in common)
    return up + down[::-1]


def is_meant(name: str, pattern: str) -> bool:
    """Whether a pattern of a file or command (``a*.nic``) covers the name of an edge or device; no
    pattern is long."""
    return len(pattern) <= _LONGEST_PATTERN and fnmatchcase(name, pattern)


def canonical(content: dict[str, Any]) -> str:
    """JSON with sorted keys and no spaces: equal content, equal bytes."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
