"""Contended flows end when SimGrid, an independent simulator, says that they end."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.strategies import cluster_of

from argosy.cluster.topology import Cluster, Link
from argosy.cluster.trace import Trace
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import Flow, Task, TaskGraph
from argosy.timeline import SpanKind

PYTHON = "/usr/bin/python3"
ORACLE = Path(__file__).with_name("simgrid_oracle.py")

Network = tuple[Cluster, list[tuple[float, Flow]]]
"""A cluster, and flows with the moments at which they start."""


@cache
def missing() -> str | None:
    """Why there is no SimGrid to compare with."""
    if not Path(PYTHON).exists():
        return f"no {PYTHON}"
    found = subprocess.run([PYTHON, "-c", "import simgrid"], capture_output=True, check=False)
    return (
        None
        if found.returncode == 0
        else f"{PYTHON} has no simgrid module (Debian package python3-simgrid)"
    )


@pytest.fixture(autouse=True)
def _needs_simgrid() -> None:
    if reason := missing():
        pytest.skip(reason)


def simgrid(networks: Sequence[dict[str, Any]]) -> list[list[float]]:
    found = subprocess.run(
        [PYTHON, str(ORACLE)],
        input=json.dumps(networks),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    finish: list[list[float]] = json.loads(found.stdout)
    return finish


def as_simgrid_sees_it(network: Network) -> dict[str, Any]:
    """Every link, and every flow with the links that its only route crosses."""
    cluster, flows = network
    names = [device.name for device in cluster.devices]
    routes = [cluster.routes(names[flow.source], names[flow.target])[0] for _, flow in flows]
    return {
        "links": [
            list(zip(link.bandwidth.times, link.bandwidth.values, strict=True))
            for link in cluster.links
        ],
        "flows": [
            [start, int(flow.bytes), list(route.links)]
            for (start, flow), route in zip(flows, routes, strict=True)
        ],
    }


def ours(network: Network) -> list[float]:
    """Each flow is a transfer after a computation that lasts until its start."""
    cluster, flows = network
    tasks: list[Task] = []
    for index, (start, flow) in enumerate(flows):
        tasks.append(Task(kind=SpanKind.FORWARD, device=flow.source, seconds=start))
        tasks.append(
            Task(kind=SpanKind.TRANSFER, flows=(flow,), after=(2 * index,), micro_batch=index)
        )
    graph = TaskGraph(devices=tuple(device.name for device in cluster.devices), tasks=tuple(tasks))
    timeline = simulate_exact(graph, cluster)
    ends = {span.micro_batch: span.end for span in timeline.spans if span.kind is SpanKind.TRANSFER}
    return [ends[index] for index in range(len(flows))]


def random_network(seed: int, *, changing: bool = False) -> Network:
    """Hosts of several devices behind NICs, media inside them, racks under racks, shared
    capacities; a dozen flows."""
    dice = random.Random(seed)

    def rate() -> str:
        return f"{dice.randint(50, 5000)} B/s"

    hosts = dice.randint(2, 5)
    nodes: list[dict[str, Any]] = []
    for index in range(hosts):
        shared = dice.random() < 0.5
        nodes.append(
            {
                "name": f"h{index}x",
                "devices": {"kind": "A100-80GB", "count": dice.randint(1, 3)},
                "intra": [{"medium": "bus", "bandwidth": rate(), "shared": shared}],
                "nic": {"bandwidth": rate()},
            }
        )
    content: dict[str, Any] = {"name": "random", "nodes": nodes}
    if dice.random() < 0.6:
        content["switches"] = [
            {"name": "pod", "uplink": {"bandwidth": rate()}},
            {
                "name": "rack",
                "nodes": ["h0x*", "h1x*"],
                "parent": "pod",
                "uplink": {"bandwidth": rate()},
            },
        ]
    if dice.random() < 0.5:
        content["shared"] = [{"name": "root", "edges": ["h0x0.*"], "bandwidth": rate()}]
    if dice.random() < 0.3:
        content["links"] = [
            {"between": ["h0x*", f"h{hosts - 1}x*"], "bandwidth": rate(), "name": "wan"}
        ]
    cluster = cluster_of(content)
    if changing:
        cluster = replace(cluster, links=tuple(_changing(link, dice) for link in cluster.links))
    flows = []
    for _ in range(dice.randint(2, 14)):
        source, target = dice.sample(range(len(cluster.devices)), 2)
        start = dice.choice([0.0, 0.0, dice.uniform(0, 20), float(dice.randint(0, 10))])
        flows.append((start, Flow(source, target, float(dice.randint(100, 50_000)))))
    return cluster, flows


def _changing(link: Link, dice: random.Random) -> Link:
    """The same link with up to four changes within the first minute."""
    if dice.random() < 0.4:
        return link
    times = sorted(
        {
            dice.choice([dice.uniform(0.5, 60), float(dice.randint(1, 30))])
            for _ in range(dice.randint(1, 4))
        }
    )
    steps = [(time, float(dice.randint(20, 5000))) for time in times]
    return replace(link, bandwidth=Trace.from_steps(steps, initial=link.bandwidth.at(0)))


def test_simgrid_is_set_to_pure_max_min_sharing() -> None:
    network = {"links": [[[0, 100]]], "flows": [[0, 100, [0]], [0, 300, [0]]]}
    assert simgrid([network]) == [[pytest.approx(2.0, rel=1e-12), pytest.approx(4.0, rel=1e-12)]]


def _agree(networks: list[Network]) -> int:
    """Whether every flow of every network ends as in SimGrid; returns how many flows were slowed by
    others."""
    expected = simgrid([as_simgrid_sees_it(network) for network in networks])
    contended = 0
    for network, finish in zip(networks, expected, strict=True):
        found = ours(network)
        assert found == pytest.approx(finish, rel=1e-9)
        alone = [ours((network[0], [flow]))[0] for flow in network[1]]
        contended += sum(end > own * 1.001 for end, own in zip(found, alone, strict=True))
    return contended


def test_contended_flows_end_as_in_simgrid() -> None:
    assert _agree([random_network(seed) for seed in range(100)]) > 400


def test_contended_flows_on_changing_links_end_as_in_simgrid() -> None:
    assert _agree([random_network(seed, changing=True) for seed in range(100, 180)]) > 300


def test_a_hundred_flows_on_one_network_end_as_in_simgrid() -> None:
    cluster, _ = random_network(3, changing=True)
    dice = random.Random(5)
    flows = []
    for _ in range(100):
        source, target = dice.sample(range(len(cluster.devices)), 2)
        flows.append((dice.uniform(0, 100), Flow(source, target, float(dice.randint(10, 20_000)))))
    assert _agree([(cluster, flows)]) > 80
