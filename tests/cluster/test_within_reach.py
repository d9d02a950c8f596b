"""A link that is down cuts a cluster in parts; plans are for one of them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from argosy.cluster.file import build_cluster, load_cluster, with_changes
from argosy.cluster.lasting import _parts, _see_each_other, at_time_zero, within_reach
from argosy.cluster.topology import Cluster, Node
from argosy.cluster.trace import Trace
from argosy.document import Document
from argosy.planner import find_plan
from argosy.workload.load import load_model


def test_what_is_cut_off_counts_as_lost_and_the_rest_is_planned_for() -> None:
    calm = with_changes(load_cluster("mixed-8"), [])
    assert within_reach(calm) is calm
    cut = calm.nodes[1]
    down = with_changes(
        calm, [{"link": f"{cut.name}.nic", "steps": [["0 s", "0 Gbit/s"], ["60 s", "25 Gbit/s"]]}]
    )
    left = within_reach(at_time_zero(down))
    lost = {device.name for device in left.devices if device.speed.at(0) == 0}
    parts = [set(node.devices) for node in calm.nodes]
    assert lost in parts
    chain = load_model("gpt2", sequence_length=512, dtype="fp16")
    assert not lost & set(find_plan(chain, left, global_batch=16).devices)


def test_of_several_parts_the_fastest_stays() -> None:
    calm = with_changes(load_cluster("mixed-16"), [])
    changes = [{"link": "v*.nic", "steps": [["0 s", "0 Gbit/s"]]}]
    left = within_reach(at_time_zero(with_changes(calm, changes)))
    assert {device.name[0] for device in left.devices if device.speed.at(0) > 0} == {"a"}


def parts_by_asking_every_pair(cluster: Cluster) -> list[set[str]]:
    """The oracle: every node is asked whether it sees each of the others."""
    parts: list[list[Node]] = []
    for node in cluster.nodes:
        joined = [
            part for part in parts if any(_see_each_other(cluster, node, other) for other in part)
        ]
        parts = [part for part in parts if part not in joined] + [
            [node, *(one for part in joined for one in part)]
        ]
    return [{node.name for node in part} for part in parts]


def drawn_cluster(draw: random.Random) -> Cluster:
    """Nodes under two layers of switches, wires between some of them, shared capacities; many links
    down."""
    names = [f"{draw.choice('abc')}{at}0" for at in range(draw.randint(2, 9))]
    nodes: list[dict[str, Any]] = [
        {
            "name": name[:-1],
            "devices": {"kind": "A100-80GB"},
            "nic": {"bandwidth": f"{draw.choice((1, 2))} GB/s"},
        }
        for name in names
    ]
    content: dict[str, Any] = {
        "name": "drawn",
        "nodes": nodes,
        "switches": [],
        "links": [],
        "shared": [],
    }
    uplink = {"bandwidth": "5 GB/s"}
    racks = [[name for at, name in enumerate(names) if at % 4 == rack] for rack in range(3)]
    if draw.random() < 0.7:
        content["switches"] += [{"name": "top", "uplink": uplink}]
        for at, rack in enumerate(rack for rack in racks if rack):
            above = {"parent": "top"} if draw.random() < 0.5 else {}
            content["switches"] += [{"name": f"r{at}", "nodes": rack, "uplink": uplink, **above}]
    for at in range(draw.choice((0, 0, 1, 2, 6))):
        one, other = draw.sample(names, 2)
        ends = (
            [f"{one[0]}*", f"{other[0]}*"]
            if one[0] != other[0] and draw.random() < 0.5
            else [one, other]
        )
        rate = f"{draw.choice((1, 3))} GB/s"
        wire = {
            "between": ends,
            "bandwidth": rate,
            "medium": f"w{at}",
            "bypasses_nic": draw.random() < 0.5,
        }
        content["links"] += [wire]
    if draw.random() < 0.4:
        content["shared"] += [
            {"name": "bus", "edges": [f"{draw.choice(names)}.nic"], "bandwidth": "1 GB/s"}
        ]
    cluster = build_cluster(Document("drawn", content, {}), folder=Path())
    share, soon = draw.choice((0.05, 0.3, 0.7)), Trace((0.0, 1e-4), (0.0, 9e9))
    links = [
        replace(link, bandwidth=draw.choice((Trace.constant(0.0), soon)))
        if draw.random() < share
        else link
        for link in cluster.links
    ]
    return replace(cluster, links=tuple(links))


@pytest.mark.parametrize("seed", range(60))
def test_groups_of_nodes_make_the_parts_that_asking_every_pair_makes(seed: int) -> None:
    cluster = drawn_cluster(random.Random(seed))
    assert [{node.name for node in part} for part in _parts(cluster)] == parts_by_asking_every_pair(
        cluster
    )


def test_a_thousand_nodes_that_hear_nobody_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {
            "name": "a",
            "count": 1000,
            "devices": {"kind": "A100-80GB"},
            "nic": {"bandwidth": "1 GB/s"},
        }
    ]
    calm = build_cluster(Document("many", {"name": "many", "nodes": nodes}, {}), folder=Path())
    down = [
        link if link.edge.startswith("a9") else replace(link, bandwidth=Trace.constant(0.0))
        for link in calm.links
    ]
    monkeypatch.setattr("argosy.cluster.lasting._see_each_other", lambda *_: pytest.fail("asked"))
    left = within_reach(replace(calm, links=tuple(down)))
    assert math.fsum(device.speed.at(0) for device in left.devices) == 111
