"""Hold what an import found, and write it as a commented cluster file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from argosy.cluster.imports.kinds import kinds_called
from argosy.units import RATE, TIME


@dataclass(frozen=True, kw_only=True)
class FoundMedium:
    """A medium that connects the devices of a node."""

    name: str
    bandwidth: float
    """Bytes/s, per device and direction."""
    latency: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class FoundNode:
    """A group of hosts that are equal."""

    hosts: tuple[str, ...]
    devices: tuple[tuple[str, int], ...]
    """Pairs of kind and count."""
    intra: tuple[FoundMedium, ...] = ()
    nic: tuple[float, int] | None = None
    """Bytes/s of one NIC, and the number of NICs."""
    note: str = ""
    is_named: bool = False
    """Whether ``hosts`` are the machines' own names."""
    addresses: tuple[str | None, ...] = ()
    """Address of each host at which others reach it; None if that is its name."""
    cpus: int | None = None
    gres: tuple[str, ...] = ()
    """Slurm's name of each entry of ``devices``."""


@dataclass(frozen=True, kw_only=True)
class FoundSwitch:
    """A switch that belongs to a tree, with its uplink."""

    name: str
    hosts: tuple[str, ...]
    parent: str | None
    uplink: float
    """Bytes/s."""


def cluster_text(
    name: str, nodes: Sequence[FoundNode], switches: Sequence[FoundSwitch] = (), *, source: str
) -> str:
    """Return the text of a cluster file."""
    lines = [
        f"# From {source}. Please check the bandwidths: most sources do not state them.",
        f'name = "{name}"',
        "",
    ]
    names: dict[str, str] = {}
    for index, node in enumerate(nodes):
        letter = chr(ord("a") + index) if index < 26 else f"n{index}x"
        names |= {host: f"{letter}{at}" for at, host in enumerate(node.hosts)}
        lines += _node(letter, node)
    for switch in switches:
        members = ", ".join(f'"{names[host]}"' for host in switch.hosts if host in names)
        lines += ["[[switches]]", f'name = "{switch.name}"']
        lines += [f"nodes = [{members}]"] if members else []
        lines += [f'parent = "{switch.parent}"'] if switch.parent else []
        lines += [f'uplink = {{ bandwidth = "{RATE.format(switch.uplink)}" }}', ""]
    return "\n".join(lines).rstrip() + "\n"


def _node(letter: str, node: FoundNode) -> list[str]:
    lines = ["[[nodes]]", f'name = "{letter}"']
    lines += [f"# {node.note}"] if node.note else []
    if node.is_named:
        lines.append(f"hosts = [{', '.join(_hosts(node))}]")
    elif len(node.hosts) > 1:
        lines.append(f"count = {len(node.hosts)}")
    lines += [f"cpus = {node.cpus}"] if node.cpus else []
    groups = [
        f'{{ kind = "{kind}", count = {count}{f", gres = {json.dumps(gres)}" if gres else ""} }}'
        for (kind, count), gres in zip_longest(node.devices, node.gres)
    ]
    lines.append(f"devices = [{', '.join(groups)}]")
    if node.intra:
        lines.append("intra = [")
        for medium in node.intra:
            latency = f', latency = "{TIME.format(medium.latency)}"' if medium.latency else ""
            note = f"  # {medium.note}" if medium.note else ""
            fields = f'medium = "{medium.name}", bandwidth = "{RATE.format(medium.bandwidth)}"'
            lines.append(f"  {{ {fields}{latency} }},{note}")
        lines.append("]")
    if node.nic is not None:
        rate, count = node.nic
        several = f", count = {count}" if count > 1 else ""
        lines.append(f'nic = {{ bandwidth = "{RATE.format(rate)}"{several} }}')
    return [*lines, ""]


def _hosts(node: FoundNode) -> Iterator[str]:
    for host, address in zip_longest(node.hosts, node.addresses):
        name = json.dumps(host)
        yield name if address is None else f"{{ name = {name}, address = {json.dumps(address)} }}"


def catalogue_kind(name: str) -> str | None:
    """Return the kind of the catalogue that a driver's name for a card means; None if it is not
    clear.

    >>> catalogue_kind("NVIDIA A100-SXM4-80GB"), catalogue_kind("Tesla V100-SXM2-32GB")
    ('A100-80GB', 'V100-32GB')
    >>> catalogue_kind("NVIDIA H200")
    'H200'
    >>> catalogue_kind("Some Card") is None
    True
    """
    choices = kinds_called(name)
    return choices[0] if len(choices) == 1 else None
