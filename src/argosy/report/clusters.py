"""Describe a cluster for people: its nodes, the links between them, and their changes over time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.table import Table

from argosy.cluster.topology import Cluster, Node
from argosy.cluster.trace import Trace
from argosy.report.marks import names_in_short, sparkline
from argosy.report.tables import plain_table
from argosy.units import RATE, TIME


def node_table(cluster: Cluster) -> Table:
    """Return a table with a line per node; equal neighbouring nodes share a line."""
    table = plain_table("node", "devices", "between its devices", "network")
    described = [(node.name, _node_cells(cluster, node)) for node in cluster.nodes]
    for cells, group in groupby(described, key=lambda pair: pair[1]):
        table.add_row(names_in_short(name for name, _ in group), *cells)
    return table


def _node_cells(cluster: Cluster, node: Node) -> tuple[str, str, str]:
    """Return the cells of a node: its devices, the links between them, its network."""
    kinds = [cluster.device(name).kind.name for name in node.devices]
    counted = " + ".join(f"{len(list(group))}x {kind}" for kind, group in groupby(kinds))
    media = ", ".join(
        f"{medium.name} {_nominal(cluster, medium.outward[0])}" for medium in node.media
    )
    return counted, media or "-", _nominal(cluster, node.nic[0]) if node.nic else "-"


def _nominal(cluster: Cluster, link: int) -> str:
    """Return the bandwidth of a link at time 0 as text."""
    return RATE.format(cluster.links[link].bandwidth.at(0))


def link_table(cluster: Cluster) -> Table:
    """Return a table of edges that belong to no node: switches, lines between groups, shared
    capacities."""
    table = plain_table("link", "between", ">bandwidth", ">latency")
    between = {
        wire.name: " and ".join(
            names_in_short(sorted(names)) for names in (wire.nodes, wire.far_nodes)
        )
        for wire in cluster.wires
    }
    shown = {
        cluster.links[index].edge
        for node in cluster.nodes
        for index in (
            *(node.nic or ()),
            *(link for medium in node.media for link in medium.outward),
        )
    }
    for link in cluster.links:
        if link.edge not in shown:
            shown.add(link.edge)
            rate = RATE.format(link.bandwidth.at(0))
            latency = TIME.short(link.latency.at(0))
            table.add_row(link.edge, between.get(link.edge, "-"), rate, latency)
    return table


def change_table(cluster: Cluster) -> Table:
    """Return a table of traces that are not constant, each as a sparkline up to its last change."""
    table = plain_table("what changes", "lowest", "highest", ">changes", ">until", "")
    for name, trace, unit in _changes(cluster):
        low, high = (
            RATE.format(v) if unit else f"{v:g}x" for v in (min(trace.values), max(trace.values))
        )
        last = trace.times[-1]
        picture = sparkline(trace, last)
        table.add_row(name, low, high, str(len(trace.times) - 1), TIME.short(last), picture)
    return table


def _changes(cluster: Cluster) -> Iterator[tuple[str, Trace, bool]]:
    """Yield edges and devices with a trace that is not constant, and whether it is a bandwidth."""
    seen: set[str] = set()
    for link in cluster.links:
        if not link.bandwidth.is_constant and link.edge not in seen:
            seen.add(link.edge)
            yield link.edge, link.bandwidth, True
    for device in cluster.devices:
        if not device.speed.is_constant:
            yield device.name, device.speed, False


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return a cluster as a dict for JSON, in bytes/s, seconds and relative speeds."""
    return {
        "name": cluster.name,
        "hash": cluster.hash,
        "nodes": [{"name": node.name, "devices": node.devices} for node in cluster.nodes],
        "devices": [
            {
                "name": device.name,
                "kind": device.kind.name,
                "efficiency": device.efficiency,
                "price_per_hour": device.price_per_hour,
                "speed": _steps(device.speed),
            }
            for device in cluster.devices
        ],
        "links": [
            {
                "name": link.name,
                "edge": link.edge,
                "bandwidth": _steps(link.bandwidth),
                "latency": _steps(link.latency),
            }
            for link in cluster.links
        ],
    }


def _steps(trace: Trace) -> list[tuple[float, float]]:
    """Return a trace as a list of (time, value) pairs."""
    return list(zip(trace.times, trace.values, strict=True))
