"""Build a ``Cluster`` from the fields of a cluster file, and report every wrong reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from argosy.cluster.catalogue import device_kind
from argosy.cluster.device import Device
from argosy.cluster.schema import ClusterSchema, HostMemorySchema, NodeSchema, SwitchSchema
from argosy.cluster.topology import Cluster, HostMemory, Link, Machine, Medium, Node, Wire, is_meant
from argosy.cluster.trace import Trace
from argosy.document import Document, Location
from argosy.errors import InputError, Mismatch, Problem, closest

# Largest number of devices of a cluster, to bound time and memory.
_MOST_DEVICES = 100_000
# Largest number of switches above one another.
_MOST_LEVELS = 64


class Builder:
    """A builder that collects nodes, links and problems while it walks a cluster file."""

    def __init__(self, schema: ClusterSchema, document: Document) -> None:
        self.schema = schema
        self.document = document
        self.problems: list[Problem] = []
        self.nodes: list[Node] = []
        self.names: dict[str, None] = {}
        """Names of the nodes, in order."""
        self.hosts: set[str] = set()
        self.devices: list[Device] = []
        self.links: list[Link] = []
        self.edges: dict[str, list[int]] = {}
        for index, kind in enumerate(schema.kinds):
            if any(kind.name == earlier.name for earlier in schema.kinds[:index]):
                self._report(("kinds", index, "name"), "a name that no other kind has", kind.name)
        self.kinds = {
            kind.name: kind.value(flops=tuple(sorted(kind.flops.items()))) for kind in schema.kinds
        }

    def build(self) -> Cluster:
        num_devices = sum(
            node.num_nodes * sum(group.count for group in node.devices)
            for node in self.schema.nodes
        )
        if num_devices > _MOST_DEVICES:
            raise self.document.error(
                ("nodes",), f"at most {_MOST_DEVICES} devices in all", num_devices
            )
        conflicts: list[tuple[frozenset[int], ...]] = []
        for index, node in enumerate(self.schema.nodes):
            conflicts += self._add_nodes(node, ("nodes", index))
        self._add_switches()
        wires = self._add_wires()
        shared = self._add_shared()
        for index, names in enumerate(self.schema.conflicts):
            place: Location = ("conflicts", index)
            sides = [
                frozenset(self._edge(name, (*place, position)))
                for position, name in enumerate(names)
            ]
            if len(sides) < 2 or sum(map(len, sides)) > len(frozenset().union(*sides)):
                self._report(place, "two or more different edges", names)
            conflicts.append(tuple(sides))
        self.raise_problems()
        return Cluster(
            name=self.schema.name,
            nodes=tuple(self.nodes),
            devices=tuple(self.devices),
            links=tuple(self.links),
            wires=tuple(wires),
            conflicts=tuple(conflicts),
            shared=tuple(shared),
        )

    def raise_problems(self) -> None:
        if self.problems:
            raise InputError(sorted(self.problems, key=lambda problem: problem.line or 0))

    def _add_nodes(self, schema: NodeSchema, place: Location) -> list[tuple[frozenset[int], ...]]:
        num_devices = sum(group.count for group in schema.devices)
        if num_devices > 1 and not schema.intra:
            expected = f"at least one medium between the {num_devices} devices of a node"
            self._report((*place, "intra"), expected)
        names = [f"{schema.name}{index}" for index in range(schema.num_nodes)]
        taken = [name for name in names if name in self.names]
        if taken:
            self._report((*place, "name"), "nodes that differ in name plus index", _few(taken))
        self._check_kinds(schema, place)
        self._check_media(schema, place)
        self._check_hosts(schema, place)
        conflicts = []
        for index, name in enumerate(names):
            node = self._add_node(schema, name, index)
            by_medium = {medium.name: medium for medium in node.media}
            for group in schema.conflicts:
                if all(medium in by_medium for medium in group):
                    conflicts += [
                        _sides([by_medium[medium] for medium in group], at)
                        for at in range(len(node.devices))
                    ]
        return conflicts

    def _check_kinds(self, schema: NodeSchema, place: Location) -> None:
        for position, group in enumerate(schema.devices):
            if group.kind not in self.kinds:
                try:
                    self.kinds[group.kind] = device_kind(group.kind)
                except Mismatch as error:
                    where = (*place, "devices", position, "kind")
                    own = [kind.name for kind in self.schema.kinds]
                    suggestion = closest(group.kind, own) or error.suggestion
                    expected = f"{error.expected} or from [[kinds]]"
                    self._report(where, expected, group.kind, suggestion)

    def _check_media(self, schema: NodeSchema, place: Location) -> None:
        media = [medium.medium for medium in schema.intra]
        for position, medium in enumerate(media):
            if medium in media[:position] or medium in ("nic", "uplink"):
                where = (*place, "intra", position, "medium")
                self._report(where, "a name used once per node, neither nic nor uplink", medium)
        for position, names in enumerate(schema.conflicts):
            where = (*place, "conflicts", position)
            for index, name in enumerate(names):
                if name not in media:
                    expected = (
                        f"one of the media {', '.join(media)}" if media else "media under intra"
                    )
                    self._report((*where, index), expected, name, closest(name, media))
            if len(set(names)) < max(len(names), 2):
                self._report(where, "two or more different media", names)

    def _check_hosts(self, schema: NodeSchema, place: Location) -> None:
        if schema.hosts and len(schema.hosts) != schema.num_nodes:
            expected = f"{schema.num_nodes}, one for each of the group's nodes"
            self._report((*place, "hosts"), expected, len(schema.hosts))
        for position, host in enumerate(schema.hosts):
            if host.name in self.hosts:
                where = (*place, "hosts", position)
                self._report(where, "a host that no other node has", host.name)
            self.hosts.add(host.name)

    def _add_node(self, schema: NodeSchema, name: str, index: int) -> Node:
        devices: list[str] = []
        gres: list[str | None] = []
        for group in schema.devices:
            kind = self.kinds.get(group.kind)
            if kind is None:  # ``_check_kinds`` has reported it
                continue
            for _ in range(group.count):
                device = Device(
                    name=f"{name}.{len(devices)}",
                    node=name,
                    kind=kind,
                    efficiency=group.efficiency,
                    price_per_hour=group.price_per_hour,
                )
                self.devices.append(device)
                devices.append(device.name)
                gres.append(group.gres)
        media = tuple(
            self._add_medium(
                name, devices, medium.medium, medium.bandwidth, medium.latency, medium.shared
            )
            for medium in schema.intra
        )
        nic = None
        if schema.nic is not None:
            nic = self._add_edge(
                f"{name}.nic",
                ("out", "in"),
                schema.nic.bandwidth * schema.nic.count,
                schema.nic.latency,
            )
        machine = Machine(**schema.hosts[index].model_dump()) if index < len(schema.hosts) else None
        node = Node(
            name=name,
            devices=tuple(devices),
            media=media,
            nic=nic,
            machine=machine,
            cpus=schema.cpus,
            gres=tuple(gres),
            host_memory=_host_memory(schema.host_memory),
        )
        self.nodes.append(node)
        self.names[name] = None
        return node

    def _add_medium(
        self,
        node: str,
        devices: list[str],
        medium: str,
        bandwidth: float,
        latency: float,
        is_shared: bool,
    ) -> Medium:
        edge = f"{node}.{medium}"
        if is_shared:
            link = self._add_link(edge, edge, bandwidth, latency)
            return Medium(
                name=medium, outward=(link,) * len(devices), inward=(link,) * len(devices)
            )
        # Out and in are crossed one after the other, so each carries half of the medium's latency.
        pairs = [
            [
                self._add_link(f"{device}.{medium}.{way}", edge, bandwidth, latency / 2)
                for way in ("out", "in")
            ]
            for device in devices
        ]
        return Medium(
            name=medium,
            outward=tuple(out for out, _ in pairs),
            inward=tuple(into for _, into in pairs),
        )

    def _add_switches(self) -> None:
        names = {switch.name: switch for switch in self.schema.switches}
        uplinks: dict[str, tuple[int, int]] = {}
        home: dict[str, str] = {}
        for index, switch in enumerate(self.schema.switches):
            place: Location = ("switches", index)
            if switch.name in uplinks or switch.name in self.names:
                expected = "a name that no other switch or node has"
                self._report((*place, "name"), expected, switch.name)
            uplink = switch.uplink
            uplinks[switch.name] = self._add_edge(
                f"{switch.name}.uplink", ("out", "in"), uplink.bandwidth, uplink.latency
            )
            if switch.parent is not None and switch.parent not in names:
                expected = f"one of the switches {', '.join(sorted(names))}"
                self._report(
                    (*place, "parent"), expected, switch.parent, closest(switch.parent, names)
                )
            elif len(self._above(switch.parent, names)) > _MOST_LEVELS:
                self._report(
                    (*place, "parent"),
                    f"at most {_MOST_LEVELS} switches above one another",
                    switch.parent,
                )
            elif switch.name in self._above(switch.parent, names):
                self._report(
                    (*place, "parent"), f"a switch that is not below {switch.name}", switch.parent
                )
            for position, pattern in enumerate(switch.nodes):
                for node in self._nodes(pattern, (*place, "nodes", position)):
                    if node in home:
                        expected = f"nodes under one switch: {node} is already under {home[node]}"
                        self._report((*place, "nodes", position), expected, pattern)
                    home[node] = switch.name
        for index, value in enumerate(self.nodes):
            chain = self._above(home.get(value.name), names)
            self.nodes[index] = replace(value, uplinks=tuple(uplinks[name] for name in chain))

    def _above(self, switch: str | None, known: Mapping[str, SwitchSchema]) -> list[str]:
        """Return ``switch`` and the switches above it, nearest first, up to ``_MOST_LEVELS``."""
        chain: dict[str, None] = {}
        while (
            switch is not None
            and switch in known
            and switch not in chain
            and len(chain) <= _MOST_LEVELS
        ):
            chain[switch] = None
            switch = known[switch].parent
        return list(chain)

    def _add_wires(self) -> list[Wire]:
        wires = []
        for index, link in enumerate(self.schema.links):
            place: Location = ("links", index)
            left, right = (
                self._nodes(pattern, (*place, "between", at))
                for at, pattern in enumerate(link.between)
            )
            common = sorted(set(left) & set(right))
            if common and link.between[0] != link.between[1]:
                expected = f"two groups that do not share {_few(common)}"
                self._report((*place, "between"), expected, " and ".join(link.between))
            elif common and len(left) == 1:
                self._report((*place, "between"), "two nodes or more", left[0])
            name = link.name or (
                link.medium if link.medium not in self.edges else f"{link.medium}-{index}"
            )
            if name in self.edges:
                self._report((*place, "name"), "a name that no other edge has", name)
            forward, back = self._add_edge(name, ("forward", "back"), link.bandwidth, link.latency)
            for added in (forward, back):
                self.links[added] = replace(
                    self.links[added], price_per_byte=link.price_per_gb / 1e9
                )
            wires.append(
                Wire(
                    name=name,
                    nodes=frozenset(left),
                    far_nodes=frozenset(right),
                    forward=forward,
                    back=back,
                    bypasses_nic=link.bypasses_nic,
                )
            )
        return wires

    def _add_shared(self) -> list[tuple[frozenset[int], int]]:
        shared = []
        for index, group in enumerate(self.schema.shared):
            members = [
                link
                for position, edge in enumerate(group.edges)
                for link in self._edge(edge, ("shared", index, "edges", position))
            ]
            if group.name in self.edges:
                self._report(("shared", index, "name"), "a name that no other edge has", group.name)
            shared.append(
                (frozenset(members), self._add_link(group.name, group.name, group.bandwidth, 0.0))
            )
        return shared

    def _add_edge(
        self, edge: str, ways: tuple[str, str], bandwidth: float, latency: float
    ) -> tuple[int, int]:
        first, second = (self._add_link(f"{edge}.{way}", edge, bandwidth, latency) for way in ways)
        return first, second

    def _add_link(self, name: str, edge: str, bandwidth: float, latency: float) -> int:
        index = len(self.links)
        self.links.append(
            Link(
                name=name,
                edge=edge,
                bandwidth=Trace.constant(bandwidth),
                latency=Trace.constant(latency),
            )
        )
        self.edges.setdefault(edge, []).append(index)
        return index

    def _nodes(self, pattern: str, place: Location) -> list[str]:
        if pattern in self.names:  # importers write nodes one by one
            return [pattern]
        names = list(self.names)
        matches = [name for name in names if is_meant(name, pattern)]
        if not matches:
            self._report(
                place,
                f'a node ({_few(names)}) or a pattern such as "a*"',
                pattern,
                closest(pattern, names),
            )
        return matches

    def _edge(self, pattern: str, place: Location) -> list[int]:
        matches = [
            link for edge, links in self.edges.items() if is_meant(edge, pattern) for link in links
        ]
        if not matches:
            self._report(
                place, f"an edge such as {_few(self.edges)}", pattern, closest(pattern, self.edges)
            )
        return matches

    def _report(
        self, place: Location, expected: str, found: object = None, suggestion: str | None = None
    ) -> None:
        self.problems.append(self.document.problem(place, expected, found, suggestion=suggestion))


def _host_memory(schema: HostMemorySchema | None) -> HostMemory:
    if schema is None:
        return HostMemory()
    drive = schema.nvme
    of_drive = {} if drive is None else {"nvme_size": drive.size, "nvme_bandwidth": drive.bandwidth}
    memory: HostMemory = schema.value(**of_drive)
    return memory


def _sides(media: list[Medium], device: int) -> tuple[frozenset[int], ...]:
    """Return, for one device, its links of each medium that conflicts with the others."""
    return tuple(frozenset((medium.outward[device], medium.inward[device])) for medium in media)


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:4]) + (", ..." if len(listed) > 4 else "")
