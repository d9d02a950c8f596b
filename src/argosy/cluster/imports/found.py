"""What an import found, and the commented cluster file that says it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from argosy.cluster.catalogue import catalogue
from argosy.units import RATE, TIME


@dataclass(frozen=True, kw_only=True)
class FoundMedium:
    """A way for the devices of a node to talk."""

    name: str
    bandwidth: float
    """Bytes/s, per device and direction."""
    latency: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class FoundNode:
    """Hosts that are alike."""

    hosts: tuple[str, ...]
    devices: tuple[tuple[str, int], ...]
    """(kind, how many)."""
    intra: tuple[FoundMedium, ...] = ()
    nic: tuple[float, int] | None = None
    """Bytes/s of one, and how many."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class FoundSwitch:
    """A switch of a tree, with its cable upwards."""

    name: str
    hosts: tuple[str, ...]
    parent: str | None
    uplink: float
    """Bytes/s."""


def cluster_text(name: str, nodes: Sequence[FoundNode], switches: Sequence[FoundSwitch] = (), *, source: str) -> str:
    """The text of a cluster file; comments say which host is which node."""
    lines = [f"# From {source}. Please check the bandwidths: most sources do not tell them.", f'name = "{name}"', ""]
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
    shown = ", ".join(node.hosts[:8]) + (f", ... {len(node.hosts)} in all" if len(node.hosts) > 8 else "")
    lines = ["[[nodes]]", f'name = "{letter}"  # {shown}']
    lines += [f"# {node.note}"] if node.note else []
    lines += [f"count = {len(node.hosts)}"] if len(node.hosts) > 1 else []
    groups = ", ".join(f'{{ kind = "{kind}", count = {count} }}' for kind, count in node.devices)
    lines.append(f"devices = [{groups}]")
    if node.intra:
        lines.append("intra = [")
        for medium in node.intra:
            latency = f', latency = "{TIME.format(medium.latency)}"' if medium.latency else ""
            note = f"  # {medium.note}" if medium.note else ""
            lines.append(
                f'  {{ medium = "{medium.name}", bandwidth = "{RATE.format(medium.bandwidth)}"{latency} }},{note}'
            )
        lines.append("]")
    if node.nic is not None:
        rate, count = node.nic
        several = f", count = {count}" if count > 1 else ""
        lines.append(f'nic = {{ bandwidth = "{RATE.format(rate)}"{several} }}')
    return [*lines, ""]


def catalogue_kind(name: str) -> str | None:
    """The kind of the catalogue that a driver's name for a card means; the one with most in common.

    >>> catalogue_kind("NVIDIA A100-SXM4-80GB"), catalogue_kind("Tesla V100-SXM2-32GB"), catalogue_kind("NVIDIA H200")
    ('A100-80GB', 'V100-32GB', 'H200')
    >>> catalogue_kind("Some Card") is None
    True
    """
    words = _words(name)
    matches = [kind for kind in (one.name for one in catalogue()) if _words(kind) <= words]
    return max(matches, key=lambda kind: (len(_words(kind)), kind), default=None)


def _words(name: str) -> set[str]:
    """Lower-case runs of letters and digits; ``RTX A6000`` and ``RTX-A6000`` have the same."""
    return set(re.findall(r"[a-z0-9]+", name.lower().replace("geforce", "").replace(" ti", "ti")))
