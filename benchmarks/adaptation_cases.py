"""Traces on other clusters and models than those of ``benchmarks.adaptation``: dips, drops, drifts,
flaps, stragglers, preempted devices and random bandwidths.

Half of them (``KNOWN``) may be looked at while the controller is changed; the other half
(``APART``) has the same sorts of changes on other clusters, with other seeds, and is only played.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from argosy.cluster.changes import device_steps, link_steps
from argosy.cluster.file import build_cluster, with_changes
from argosy.cluster.generators import generate
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.document import Document

Change = dict[str, object]
Levels = Sequence[tuple[float, float]]
"""Parts of a trace's time, and the level from then on, relative to the calm one."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A calm cluster, the model that it trains, and how long."""

    cluster: Callable[[], Cluster]
    model: str
    """Sequences have 1,024 tokens."""
    global_batch: int
    seconds: float
    """About 200 steps of the plan for the calm cluster."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setting whose cluster changes."""

    name: str
    setting: Setting
    cluster: Cluster


def _nodes(name: str, kind: str, *, count: int, devices: int, nic: str) -> Change:
    node: Change = {
        "name": name,
        "count": count,
        "devices": {"kind": kind, "count": devices},
        "nic": {"bandwidth": nic, "latency": "20 us"},
    }
    if devices > 1:
        node["intra"] = [{"medium": "bus", "bandwidth": "50 GB/s", "latency": "5 us"}]
    return node


def _built(name: str, nodes: Sequence[Change], links: Sequence[Change] = ()) -> Cluster:
    content: dict[str, Any] = {"name": name, "nodes": list(nodes), "links": list(links)}
    return build_cluster(Document("cluster", content, {}), folder=Path())


@cache
def two_sites() -> Cluster:
    """Two sites of two nodes with two A100 each, behind a line of 10 Gbit/s."""
    nodes = [
        _nodes(name, "A100-40GB", count=2, devices=2, nic="25 Gbit/s") for name in ("east", "west")
    ]
    line: Change = {
        "name": "line",
        "between": ["east*", "west*"],
        "bandwidth": "10 Gbit/s",
        "latency": "10 ms",
    }
    return _built("two-sites", nodes, [line])


@cache
def singles() -> Cluster:
    """Four nodes of one L4 and two of one RTX 3090."""
    nodes = [
        _nodes("l", "L4", count=4, devices=1, nic="16 Gbit/s"),
        _nodes("r", "RTX-3090", count=2, devices=1, nic="10 Gbit/s"),
    ]
    return _built("singles", nodes)


@cache
def four_kinds() -> Cluster:
    """Two devices of each of four kinds."""
    kinds = (("p", "A100-40GB"), ("q", "V100-32GB"), ("r", "RTX-3090"), ("s", "L4"))
    nodes = [_nodes(name, kind, count=1, devices=2, nic="25 Gbit/s") for name, kind in kinds]
    return _built("four-kinds", nodes)


@cache
def equal_hosts() -> Cluster:
    """Three hosts of four RTX 4090."""
    return _built("hosts", [_nodes("h", "RTX-4090", count=3, devices=4, nic="25 Gbit/s")])


@cache
def workstations() -> Cluster:
    """Two RTX A6000 and two RTX 3090."""
    nodes = [
        _nodes("new", "RTX-A6000", count=1, devices=2, nic="25 Gbit/s"),
        _nodes("old", "RTX-3090", count=1, devices=2, nic="10 Gbit/s"),
    ]
    return _built("office", nodes)


SITES = Setting(cluster=two_sites, model="llama-3.2-3b", global_batch=64, seconds=300.0)
SINGLES = Setting(cluster=singles, model="gpt2-medium", global_batch=64, seconds=240.0)
KINDS = Setting(cluster=four_kinds, model="gpt2-xl", global_batch=64, seconds=350.0)
HOSTS = Setting(cluster=equal_hosts, model="gpt2-xl", global_batch=96, seconds=400.0)
OFFICE = Setting(cluster=workstations, model="llama-3.2-1b", global_batch=32, seconds=280.0)


def _link(setting: Setting, edge: str, levels: Levels) -> Change:
    cluster = setting.cluster()
    nominal = cluster.links[cluster.edges[edge][0]].bandwidth.at(0)
    return link_steps(edge, _trace(setting, levels, nominal))


def _device(setting: Setting, name: str, levels: Levels) -> Change:
    return device_steps(name, _trace(setting, levels, 1.0))


def _host(setting: Setting, node: str, levels: Levels) -> list[Change]:
    devices = next(n.devices for n in setting.cluster().nodes if n.name == node)
    return [_device(setting, name, levels) for name in devices]


def _trace(setting: Setting, levels: Levels, nominal: float) -> Trace:
    steps = [(setting.seconds * part, nominal * level) for part, level in levels]
    return Trace.from_steps(steps, initial=nominal)


def _generated(
    setting: Setting, edges: Sequence[str], name: str, seed: int, **parameters: object
) -> list[Change]:
    """Traces of a generator on edges, with a seed of its own for each."""
    cluster, changes = setting.cluster(), []
    for offset, edge in enumerate(edges):
        nominal = cluster.links[cluster.edges[edge][0]].bandwidth.at(0)
        trace = generate(
            name, parameters, nominal=nominal, seed=seed + offset, horizon=setting.seconds
        )
        changes.append(link_steps(edge, trace))
    return changes


def _drift(begin: float, end: float, level: float, turns: int = 40) -> Levels:
    """A level that sinks by equal factors."""
    return [
        (begin + (end - begin) * turn / turns, level ** ((turn + 1) / turns))
        for turn in range(turns)
    ]


def _pulses(period: float, part: float, level: float) -> Levels:
    """A level that is low for a part of every period."""
    starts = [period * turn for turn in range(1, int(1 / period))]
    return [step for start in starts for step in ((start, level), (start + part * period, 1.0))]


def _sways(seed: int, levels: Sequence[float], mean: float) -> Levels:
    """Levels that are drawn after exponential times."""
    drawn, time = random.Random(seed), 0.0
    steps = []
    while (time := time + drawn.expovariate(1 / mean)) < 1:
        steps.append((time, drawn.choice(levels)))
    return steps


def _case(name: str, setting: Setting, changes: Sequence[Change]) -> Case:
    return Case(name=name, setting=setting, cluster=with_changes(setting.cluster(), list(changes)))


def known() -> list[Case]:
    """Return the cases that may be looked at while the controller is changed."""
    return [
        _case("sites: dip of the line", SITES, [_link(SITES, "line", [(0.3, 0.2), (0.33, 1.0)])]),
        _case("singles: drop of a link", SINGLES, [_link(SINGLES, "l1.nic", [(0.25, 0.15)])]),
        _case("kinds: drift of a link", KINDS, [_link(KINDS, "p0.nic", _drift(0.2, 0.7, 0.1))]),
        _case("hosts: flap of a link", HOSTS, [_link(HOSTS, "h1.nic", _pulses(0.06, 0.35, 0.1))]),
        _case(
            "kinds: a device lags and recovers",
            KINDS,
            [_device(KINDS, "p0.1", [(0.3, 0.4), (0.55, 1.0)])],
        ),
        _case("hosts: a host slows by 20 %", HOSTS, _host(HOSTS, "h2", [(0.2, 0.8)])),
        _case(
            "sites: a host slows by 30 % and recovers",
            SITES,
            _host(SITES, "east0", [(0.25, 0.7), (0.65, 1.0)]),
        ),
        _case(
            "singles: a device is preempted and returns",
            SINGLES,
            [_device(SINGLES, "l2.0", [(0.3, 0.0), (0.6, 1.0)])],
        ),
        _case(
            "office: both links wander",
            OFFICE,
            _generated(
                OFFICE, ["new0.nic", "old0.nic"], "random-walk", 70, step="3 s", volatility=0.25
            ),
        ),
        _case(
            "sites: the line is shared now and then",
            SITES,
            _generated(SITES, ["line"], "on-off", 71, on="30 s", off="20 s", low=0.15),
        ),
        _case("hosts: a host sways", HOSTS, _host(HOSTS, "h0", _sways(72, (1.0, 0.75, 0.5), 0.15))),
        _case(
            "kinds: a link drops while a device lags",
            KINDS,
            [
                _link(KINDS, "s0.nic", [(0.3, 0.2), (0.8, 1.0)]),
                _device(KINDS, "r0.0", [(0.3, 0.5), (0.6, 1.0)]),
            ],
        ),
    ]


def apart() -> list[Case]:
    """Return the cases that are only played."""
    return [
        _case("kinds: dip of a link", KINDS, [_link(KINDS, "p0.nic", [(0.4, 0.1), (0.43, 1.0)])]),
        _case("sites: drop of the line", SITES, [_link(SITES, "line", [(0.3, 0.2)])]),
        _case("hosts: drift of a link", HOSTS, [_link(HOSTS, "h0.nic", _drift(0.1, 0.6, 0.12))]),
        _case(
            "singles: flap of a link",
            SINGLES,
            [_link(SINGLES, "r0.nic", _pulses(0.05, 0.4, 0.15))],
        ),
        _case(
            "singles: a device lags and recovers",
            SINGLES,
            [_device(SINGLES, "l3.0", [(0.2, 0.5), (0.5, 1.0)])],
        ),
        _case("office: a host slows by 15 %", OFFICE, _host(OFFICE, "new0", [(0.3, 0.85)])),
        _case(
            "kinds: a host slows by 30 % and recovers",
            KINDS,
            _host(KINDS, "r0", [(0.2, 0.7), (0.6, 1.0)]),
        ),
        _case(
            "hosts: a device is preempted and returns",
            HOSTS,
            [_device(HOSTS, "h1.2", [(0.25, 0.0), (0.5, 1.0)])],
        ),
        _case(
            "sites: two links wander",
            SITES,
            _generated(SITES, ["line", "east1.nic"], "random-walk", 80, step="4 s", volatility=0.3),
        ),
        _case(
            "office: a link is shared now and then",
            OFFICE,
            _generated(OFFICE, ["old0.nic"], "on-off", 81, on="25 s", off="25 s", low=0.1),
        ),
        _case("kinds: a host sways", KINDS, _host(KINDS, "p0", _sways(82, (1.0, 0.8, 0.6), 0.12))),
        _case(
            "singles: a link drops while a device lags",
            SINGLES,
            [
                _link(SINGLES, "l0.nic", [(0.25, 0.2), (0.7, 1.0)]),
                _device(SINGLES, "r1.0", [(0.25, 0.6), (0.9, 1.0)]),
            ],
        ),
    ]
