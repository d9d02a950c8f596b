"""Programs in the exact engine: compute alone adds up, collectives overlap, and found programs beat
the simple ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from spmd_models import captured

from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.group import DeviceGroup, device_group
from argosy.dtype import Dtype
from argosy.solve.programs.placement import Pricing
from argosy.solve.programs.rehearse import program_tasks, rehearse
from argosy.solve.programs.spmd import find_program
from argosy.space.operations.rules import CutKind
from argosy.timeline import SpanKind

CLUSTER = """
name = "mixed"
[[nodes]]
name = "v"
devices = { kind = "V100-16GB", count = 2 }
intra = [{ medium = "nvlink", bandwidth = "150 GB/s", latency = "5 us" }]
nic = { bandwidth = "10 Gbit/s", latency = "20 us" }
[[nodes]]
name = "p"
devices = { kind = "P100", count = 2 }
intra = [{ medium = "pcie", bandwidth = "12 GB/s", latency = "10 us" }]
nic = { bandwidth = "10 Gbit/s", latency = "20 us" }
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    file = tmp_path_factory.mktemp("cluster") / "mixed.toml"
    file.write_text(CLUSTER, encoding="utf-8")
    return load_cluster(str(Path(file)))


def test_a_group_reads_its_cluster(cluster: Cluster) -> None:
    group = device_group(cluster, [device.name for device in cluster.devices], Dtype.FP32)
    assert group.bandwidth == pytest.approx(1.25e9) and group.nodes == 2 and group.per_node == 2
    kinds = [device.kind for device in cluster.devices]
    reached = [kind.reached.share(Dtype.FP32) * kind.peak(Dtype.FP32) for kind in kinds]
    assert group.flops == pytest.approx(reached), "as layers are priced"
    assert group.inside == (12e9, pytest.approx(2e-5)) or group.inside[0] == 12e9


def slow(group: DeviceGroup) -> Pricing:
    """The cluster's network under devices so slow that small models are worth sharing."""
    return Pricing(group=replace(group, flops=tuple(1e-5 * f for f in group.flops)))


@pytest.mark.parametrize("name", ["language", "plain"])
def test_found_programs_are_no_slower_than_simple_ones(name: str, cluster: Cluster) -> None:
    names = [device.name for device in cluster.devices]
    pricing = slow(device_group(cluster, names, Dtype.FP32))
    graph = captured(name)
    found = find_program(graph, pricing)
    own = rehearse(found, pricing, cluster).end
    for kind, ratios in (
        (CutKind.SAMPLES, pricing.group.even),
        (CutKind.SAMPLES, pricing.group.by_speed),
    ):
        other = find_program(graph, pricing, kind=kind, ratios=ratios)
        assert found.seconds <= other.seconds * (1 + 1e-9)
        assert own <= rehearse(other, pricing, cluster).end * 1.02


def test_compute_adds_up_and_collectives_wait_their_turn(cluster: Cluster) -> None:
    pricing = slow(device_group(cluster, [device.name for device in cluster.devices], Dtype.FP32))
    program = find_program(
        captured("language"), pricing, kind=CutKind.SAMPLES, ratios=pricing.group.even
    )
    graph = program_tasks(program, pricing)
    busy = [0.0] * len(graph.devices)
    for task in graph.tasks:
        if task.device >= 0:
            busy[task.device] += task.seconds
    assert max(busy) == pytest.approx(program.compute_seconds, rel=1e-6), (
        "all wait for the slowest kind"
    )
    collectives = [
        index for index, task in enumerate(graph.tasks) if task.kind is SpanKind.COLLECTIVE
    ]
    assert len(collectives) == len([move for move in program.moves if move.seconds > 0])
    for before, after in itertools.pairwise(collectives):
        assert before in graph.tasks[after].after
    end = rehearse(program, pricing, cluster).end
    assert max(busy) <= end <= program.seconds * 1.05, "what overlaps is not paid twice"


def test_gathers_of_stored_weights_come_before_what_reads_them(cluster: Cluster) -> None:
    """ZeRO's: in the exact engine they come one after the other, take their price, and hold up who
    reads them."""
    pricing = slow(device_group(cluster, [device.name for device in cluster.devices], Dtype.FP32))
    graph = captured("perceptron")
    program = find_program(
        graph, pricing, kind=CutKind.STORED, ratios=pricing.group.by_speed, capped=False
    )
    gathered = [move for move in program.moves if move.value in graph.parameters]
    assert len(gathered) == len(graph.parameters)
    tasks = program_tasks(program, pricing).tasks
    assert all(task.kind is SpanKind.COLLECTIVE for task in tasks[: len(gathered)])
    spans = rehearse(program, pricing, cluster).spans
    computing = min(span.start for span in spans if span.kind is SpanKind.FORWARD)
    assert computing == pytest.approx(sum(move.seconds for move in gathered[:2]), rel=1e-9), (
        "of the first layer alone"
    )
