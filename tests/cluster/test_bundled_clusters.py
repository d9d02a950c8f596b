"""The clusters in the package load, are connected, and are what their names say."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from pathlib import Path

import pytest

import argosy
from argosy.cluster.file import bundled_clusters, load_cluster

FOLDER = Path(argosy.__file__).parent / "data" / "clusters"
NAMES = bundled_clusters()
each_cluster = pytest.mark.parametrize("name", NAMES)

KINDS = {
    "three-kinds-64": {"A100-80GB": 16, "V100-32GB": 24, "T4": 24},
    "mixed-48": {"A100-40GB": 12, "V100-16GB": 36},
    "four-kinds-1024": {"H100-80GB": 256, "A100-80GB": 256, "A100-40GB": 256, "V100-32GB": 256},
    "four-kinds-4096": {"H100-80GB": 1024, "A100-80GB": 1024, "A100-40GB": 1024, "V100-32GB": 1024},
}


def test_there_is_one_for_every_size() -> None:
    sizes = {len(load_cluster(name).devices) for name in NAMES}
    assert {4, 8, 16, 32, 48, 64, 128, 1024, 4096} <= sizes
    assert len(NAMES) >= 10


@each_cluster
def test_file_opens_with_what_it_is_and_has_its_own_name(name: str) -> None:
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert max(map(len, text.splitlines())) <= 120
    assert load_cluster(name).name == name


@each_cluster
def test_number_in_the_name_counts_devices(name: str) -> None:
    number = name.rpartition("-")[2]
    if number.isdecimal():
        assert len(load_cluster(name).devices) == int(number)


@each_cluster
def test_devices_are_unequal(name: str) -> None:
    assert len({device.kind.name for device in load_cluster(name).devices}) > 1


@each_cluster
def test_every_node_reaches_every_other(name: str) -> None:
    cluster = load_cluster(name)
    for one, other in permutations(cluster.nodes, 2):
        for route in cluster.routes(one.devices[0], other.devices[0]):
            assert cluster.bandwidth(route).at(0) > 0


@each_cluster
def test_devices_of_a_node_reach_each_other_faster_than_those_of_another(name: str) -> None:
    cluster = load_cluster(name)
    for node in cluster.nodes:
        assert len(node.devices) == 1 or node.media
        if node.nic and node.media:
            inside = max(cluster.links[medium.outward[0]].bandwidth.at(0) for medium in node.media)
            per_device = cluster.links[node.nic[0]].bandwidth.at(0) / len(node.devices)
            assert inside > per_device


@pytest.mark.parametrize("name", KINDS)
def test_mixture_is_as_promised(name: str) -> None:
    cluster = load_cluster(name)
    assert Counter(device.kind.name for device in cluster.devices) == KINDS[name]
    assert {len(node.devices) for node in cluster.nodes} == {4 if name == "mixed-48" else 8}


def test_one_device_per_node_has_no_inner_network() -> None:
    cluster = load_cluster("one-per-node-16")
    assert all(len(node.devices) == 1 and not node.media for node in cluster.nodes)


def test_a_rack_s_uplink_is_narrower_than_its_nodes_together() -> None:
    cluster = load_cluster("racks-128")
    for node in cluster.nodes:
        assert node.nic is not None
        below = 4 * cluster.links[node.nic[0]].bandwidth.at(0)
        assert cluster.links[node.uplinks[0][0]].bandwidth.at(0) == below / 2
