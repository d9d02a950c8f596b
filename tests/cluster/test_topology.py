"""Clusters as networks: routes, what they are worth, how they change, and the content that a
cluster carries."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.strategies import cluster_files, mutated_json

from argosy.cluster.file import build_cluster, cluster_from_content, with_changes
from argosy.cluster.topology import Cluster
from argosy.document import Document, parse_toml
from argosy.errors import InputError

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
RATES = st.sampled_from(("1 GB/s", "3 GB/s", "40 Gbit/s", "7.5 GiB/s"))
TIMES = st.sampled_from(("0 s", "7 us", "0.3 ms", "2 ms"))
GENERATORS = st.sampled_from(
    ("on-off", "periodic", "random-walk", "markov", "token-bucket", "flap", "straggler")
)


def built(content: dict[str, Any]) -> Cluster:
    return build_cluster(Document("cluster", content, {}), folder=Path())


def toml(text: str) -> Cluster:
    return build_cluster(parse_toml(text, file="cluster.toml"), folder=Path())


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """A [[changes]] entry of any kind for clusters that have a node a0 with nvlink and a NIC."""
    clock = draw(st.lists(st.integers(0, 500), min_size=1, max_size=4, unique=True).map(sorted))
    target = draw(st.sampled_from(("a0.nic", "a*.nic", "a0.nvlink", "*")))
    match draw(st.sampled_from(("rate", "latency", "both", "generator", "speed", "straggler"))):
        case "rate":
            return {"link": target, "steps": [[f"{time} s", draw(RATES)] for time in clock]}
        case "latency":
            return {
                "link": target,
                "latency_steps": [[f"{time} ms", draw(TIMES)] for time in clock],
            }
        case "both":
            steps, delays = (
                [[f"{time} s", draw(values)] for time in clock] for values in (RATES, TIMES)
            )
            return {"link": target, "steps": steps, "latency_steps": delays}
        case "generator":
            return {
                "link": target,
                "generator": draw(GENERATORS),
                "seed": draw(st.integers(0, 9)),
                "horizon": "40 s",
            }
        case "speed":
            return {
                "device": "a0.*",
                "steps": [[f"{time} s", draw(st.floats(0, 4))] for time in clock],
            }
    return {"device": "*", "generator": "straggler", "horizon": "3 min"}


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """Cluster files with everything: an own kind, parallel links that bypass the NICs or not,
    conflicts, changes."""
    content = draw(cluster_files(changing=False))
    content["kinds"] = [
        {
            "name": "own",
            "memory": "8 GB",
            "memory_bandwidth": draw(RATES),
            "flops": {"bf16": "1 TFLOP/s"},
        }
    ]
    extra = {
        "name": "z",
        "count": 2,
        "devices": {"kind": "own"},
        "nic": {"bandwidth": draw(RATES), "count": 2},
    }
    content["nodes"] = [*content["nodes"], extra]
    content["links"] = [
        {
            "between": draw(st.sampled_from((["a0", "z*"], ["z0", "z1"], ["z*", "z*"]))),
            "medium": "line",
            "bandwidth": draw(RATES),
            "latency": draw(TIMES),
            "bypasses_nic": draw(st.booleans()),
            "price_per_gb": 0.02,
        }
        for _ in range(draw(st.integers(0, 2)))
    ]
    content["conflicts"] = [["a0.nic", "z*.nic"]] if draw(st.booleans()) else []
    content["changes"] = draw(st.lists(changes(), max_size=3))
    return content


clusters = files().map(built)


# What a cluster carries


@few
@given(clusters)
def test_a_cluster_is_what_its_content_says(cluster: Cluster) -> None:
    again = cluster_from_content(cluster.content)
    assert again == cluster
    assert (again.content, again.hash) == (cluster.content, cluster.hash)


@few
@given(files(), st.randoms())
def test_the_order_of_fields_does_not_change_the_hash(content: dict[str, Any], random: Any) -> None:
    names = list(content)
    random.shuffle(names)
    assert built({name: content[name] for name in names}).hash == built(content).hash


@few
@given(clusters, st.lists(changes(), max_size=2), st.lists(changes(), max_size=2))
def test_changes_replace_those_before(
    cluster: Cluster, first: list[Any], second: list[Any]
) -> None:
    assert with_changes(with_changes(cluster, first), second) == with_changes(cluster, second)


@few
@given(clusters)
def test_without_changes_everything_is_constant(cluster: Cluster) -> None:
    still = with_changes(cluster, [])
    assert all(link.bandwidth.is_constant and link.latency.is_constant for link in still.links)
    assert all(device.speed.is_constant for device in still.devices)
    assert "changes" not in json.loads(still.content)
    assert with_changes(still, json.loads(cluster.content).get("changes", [])) == cluster


@settings(few, max_examples=300)
@given(st.data())
def test_a_file_with_a_random_mistake_is_refused_or_a_cluster(data: st.DataObject) -> None:
    content = data.draw(mutated_json(data.draw(files())))
    assume(isinstance(content, dict))
    try:
        cluster = built(content)
    except InputError as error:
        assert all(problem.file == "cluster" for problem in error.problems)
    else:
        assert cluster_from_content(cluster.content) == cluster


# Routes


@few
@given(clusters)
def test_routes_go_both_ways_and_are_alike(cluster: Cluster) -> None:
    for one, other in itertools.combinations([device.name for device in cluster.devices], 2):
        there, back = cluster.routes(one, other), cluster.routes(other, one)
        assert len(there) == len(back) > 0
        for forward, backward in zip(there, back, strict=True):
            assert forward.medium == backward.medium
            assert len(forward.links) == len(backward.links)
            assert cluster.latency(forward) == pytest.approx(cluster.latency(backward))
            assert cluster.bandwidth(forward) == cluster.bandwidth(backward)


@few
@given(clusters, st.floats(0, 700))
def test_a_route_is_as_wide_as_its_narrowest_link(cluster: Cluster, time: float) -> None:
    for source, target in itertools.permutations(
        [device.name for device in cluster.devices][-3:], 2
    ):
        for route in cluster.routes(source, target):
            links = [cluster.links[link] for link in route.links]
            assert cluster.bandwidth(route).at(time) == min(
                link.bandwidth.at(time) for link in links
            )
            assert cluster.latency(route, time) == pytest.approx(
                sum(link.latency.at(time) for link in links)
            )


@few
@given(clusters, st.floats(0, 1e9), st.floats(0, 50))
def test_no_route_is_faster_than_the_fastest(
    cluster: Cluster, num_bytes: float, time: float
) -> None:
    def arrival(route: Any) -> float:
        end = cluster.bandwidth(route).advance(time, num_bytes)
        return end + cluster.latency(route, end)

    source, target = cluster.devices[0].name, cluster.devices[-1].name
    assume(source != target)
    best = cluster.fastest(source, target, num_bytes, time)
    assert arrival(best) == min(arrival(route) for route in cluster.routes(source, target))


@few
@given(clusters)
def test_every_link_is_on_its_edge_and_every_device_in_its_node(cluster: Cluster) -> None:
    assert len({link.name for link in cluster.links}) == len(cluster.links)
    assert len(cluster.device_index) == len(cluster.devices)
    for link in cluster.links:
        node, _, medium = link.edge.partition(".")
        assert link.name == link.edge or (link.name.startswith(node) and medium in link.name)
    for device in cluster.devices:
        node, position = cluster.node_of[device.name]
        assert device.name == f"{device.node}.{position}" == node.devices[position]


TWO_NODES = """
name = "two"
[[nodes]]
name = "a"
count = 2
devices = { kind = "T4", count = 2 }
intra = [{ medium = "nvlink", bandwidth = "40 GB/s", latency = "4 us" },
         { medium = "pcie", bandwidth = "16 GB/s", latency = "6 us", shared = true }]
nic = { bandwidth = "8 Gbit/s", latency = "10 us", count = 2 }
"""


def names(cluster: Cluster, source: str, target: str) -> dict[str, list[str]]:
    """Per medium, the links that a transfer crosses."""
    routes = cluster.routes(source, target)
    return {route.medium: [cluster.links[link].name for link in route.links] for route in routes}


def test_devices_of_one_node_talk_over_every_medium() -> None:
    assert names(toml(TWO_NODES), "a0.0", "a0.1") == {
        "nvlink": ["a0.0.nvlink.out", "a0.1.nvlink.in"],
        "pcie": ["a0.pcie"],
    }


def test_a_route_has_the_latency_of_its_medium() -> None:
    cluster = toml(TWO_NODES)
    assert [cluster.latency(route) for route in cluster.routes("a0.0", "a0.1")] == pytest.approx(
        [4e-6, 6e-6]
    )
    assert [cluster.latency(route) for route in cluster.routes("a0.0", "a1.0")] == pytest.approx(
        [20e-6]
    )


def test_several_nics_of_a_host_are_one_wider_edge() -> None:
    cluster = toml(TWO_NODES)
    (route,) = cluster.routes("a0.0", "a1.0")
    assert cluster.bandwidth(route).at(0) == 2e9


def test_a_changed_latency_is_that_of_the_medium_again() -> None:
    steps = [["1 s", "20 us"]]
    cluster = with_changes(toml(TWO_NODES), [{"link": "a0.*", "latency_steps": steps}])
    latencies = [
        cluster.latency(route, time) for time in (0, 1) for route in cluster.routes("a0.0", "a0.1")
    ]
    assert latencies == pytest.approx([4e-6, 6e-6, 20e-6, 20e-6])


RACKS = """
[[switches]]
name = "rack0"
nodes = ["a0"]
parent = "hall"
uplink = { bandwidth = "1 GB/s", latency = "1 us" }
[[switches]]
name = "rack1"
nodes = ["a1", "a2"]
parent = "hall"
uplink = { bandwidth = "1 GB/s", latency = "1 us" }
[[switches]]
name = "hall"
uplink = { bandwidth = "1 GB/s" }
"""


def test_a_route_climbs_to_the_first_switch_in_common() -> None:
    cluster = toml(TWO_NODES.replace("count = 2\ndevices", "count = 4\ndevices") + RACKS)
    assert names(cluster, "a1.0", "a2.0") == {"network": ["a1.nic.out", "a2.nic.in"]}
    assert names(cluster, "a0.0", "a1.1") == {
        "network": ["a0.nic.out", "rack0.uplink.out", "rack1.uplink.in", "a1.nic.in"]
    }
    assert names(cluster, "a3.0", "a0.1") == {
        "network": ["a3.nic.out", "hall.uplink.in", "rack0.uplink.in", "a0.nic.in"]
    }


def test_links_replace_the_switch_and_stand_side_by_side() -> None:
    link = (
        '[[links]]\nname = "{}"\nbetween = ["a0", "a1"]\nbandwidth = "1 GB/s"\nbypasses_nic = {}\n'
    )
    cluster = toml(TWO_NODES + link.format("cable", "true") + link.format("wan", "false"))
    assert names(cluster, "a0.0", "a1.0") == {
        "cable": ["cable.forward"],
        "wan": ["a0.nic.out", "wan.forward", "a1.nic.in"],
    }
    assert names(cluster, "a1.0", "a0.0")["wan"] == ["a1.nic.out", "wan.back", "a0.nic.in"]


def test_links_without_a_name_are_called_after_their_medium() -> None:
    link = '[[links]]\nmedium = "wan"\nbetween = ["a0", "a1"]\nbandwidth = "1 GB/s"\n'
    assert list(names(toml(TWO_NODES + link * 3), "a0.0", "a1.0")) == ["wan", "wan-1", "wan-2"]


def test_a_shared_capacity_is_crossed_on_top() -> None:
    shared = '[[shared]]\nname = "root"\nedges = ["a0.nic", "a0.pcie"]\nbandwidth = "1 GB/s"\n'
    cluster = toml(TWO_NODES + shared)
    assert names(cluster, "a0.0", "a0.1")["pcie"] == ["a0.pcie", "root"]
    assert names(cluster, "a1.0", "a0.0") == {"network": ["a1.nic.out", "a0.nic.in", "root"]}


def test_conflicts_inside_a_node_hold_for_each_device() -> None:
    cluster = toml(TWO_NODES.replace("nic =", 'conflicts = [["nvlink", "pcie"]]\nnic ='))
    shown = [
        [sorted(cluster.links[link].name for link in side) for side in sides]
        for sides in cluster.conflicts
    ]
    assert shown[:2] == [
        [["a0.0.nvlink.in", "a0.0.nvlink.out"], ["a0.pcie"]],
        [["a0.1.nvlink.in", "a0.1.nvlink.out"], ["a0.pcie"]],
    ]
    assert len(shown) == 4


def test_prices_of_links_are_per_byte() -> None:
    link = '[[links]]\nname = "wan"\nbetween = ["a0", "a1"]\nbandwidth = "1 GB/s"\nprice_per_gb = 0.02\n'
    prices = {
        link.name: link.price_per_byte
        for link in toml(TWO_NODES + link).links
        if link.price_per_byte
    }
    assert prices == pytest.approx({"wan.forward": 2e-11, "wan.back": 2e-11})


# Patterns, and changes on top of changes


@pytest.mark.parametrize(
    ("pattern", "changed"),
    [
        ("*.nic", {"a0.nic", "a1.nic"}),
        ("a0.*", {"a0.nic", "a0.nvlink", "a0.pcie"}),
        ("a?.pcie", {"a0.pcie", "a1.pcie"}),
        ("a[1].n*", {"a1.nic", "a1.nvlink"}),
        ("a1.nvlink", {"a1.nvlink"}),
        ("*", {"a0.nic", "a0.nvlink", "a0.pcie", "a1.nic", "a1.nvlink", "a1.pcie"}),
    ],
)
def test_a_pattern_changes_what_it_matches(pattern: str, changed: set[str]) -> None:
    before = toml(TWO_NODES)
    after = with_changes(before, [{"link": pattern, "steps": [["0 s", "1 B/s"]]}])
    pairs = zip(before.links, after.links, strict=True)
    assert {old.edge for old, new in pairs if old != new} == changed
    assert all(link.bandwidth.at(0) == 1 for link in after.links if link.edge in changed)


def test_a_pattern_of_devices_changes_what_it_matches() -> None:
    cluster = with_changes(toml(TWO_NODES), [{"device": "*.1", "steps": [["2 s", 0]]}])
    assert [device.speed.at(2) for device in cluster.devices] == [1, 0, 1, 0]


def test_what_one_generator_draws_for_several_edges_differs() -> None:
    cluster = with_changes(toml(TWO_NODES), [{"link": "*.nic", "generator": "on-off", "seed": 3}])
    assert len({link.bandwidth for link in cluster.links if link.edge.endswith(".nic")}) == 2


def test_the_later_of_two_changes_wins_and_starts_from_what_the_file_states() -> None:
    cluster = with_changes(
        toml(TWO_NODES),
        [
            {"link": "*.nic", "steps": [["0 s", "1 B/s"]]},
            {"link": "a0.nic", "steps": [["5 s", "3 B/s"]]},
            {"device": "a0.0", "steps": [["0 s", 0.5]]},
            {"device": "a0.0", "steps": [["5 s", 0.25]]},
        ],
    )
    rates = {link.name: (link.bandwidth.at(0), link.bandwidth.at(5)) for link in cluster.links}
    assert rates["a0.nic.out"] == (2e9, 3)
    assert rates["a1.nic.out"] == (1, 1)
    assert (cluster.devices[0].speed.at(0), cluster.devices[0].speed.at(5)) == (1, 0.25)


def test_bandwidth_and_latency_of_one_edge_change_apart() -> None:
    cluster = with_changes(
        toml(TWO_NODES),
        [
            {"link": "a0.nic", "steps": [["5 s", "3 B/s"]]},
            {"link": "a0.nic", "latency_steps": [["5 s", "1 s"]]},
        ],
    )
    link = next(link for link in cluster.links if link.name == "a0.nic.in")
    assert (link.bandwidth.at(5), link.latency.at(5)) == (3, 1)


def test_names_in_full_are_looked_up_and_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that programs write name every node and edge: as many searches would take quadratic
    time."""
    nodes = '[[nodes]]\nname = "a"\ncount = 3\ndevices = { kind = "T4" }\nnic = { bandwidth = "1 GB/s" }\n'
    switches = "".join(
        f'[[switches]]\nname = "s{at}"\nnodes = ["a{at}"]\nuplink = {{ bandwidth = "1 GB/s" }}\n'
        for at in range(3)
    )
    moved = '[[changes]]\nlink = "a*.nic"\nsteps = [["5 s", "2 GB/s"]]\n[[changes]]\ndevice = "*"\nsteps = [["5 s", 0.5]]\n'
    written = toml(f'name = "full"\n{nodes}{switches}{moved}')

    def search(name: str, pattern: str) -> bool:
        raise AssertionError(f"{pattern} is a name")

    for module in ("build", "changes"):
        monkeypatch.setattr(f"argosy.cluster.{module}.is_meant", search)
    again = cluster_from_content(written.content)
    assert again == written
    assert {node.name: len(node.uplinks) for node in again.nodes} == {"a0": 1, "a1": 1, "a2": 1}
