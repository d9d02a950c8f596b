"""Pipeline times known from elsewhere: a published schedule's table, closed forms, and DAPPLE's
recursion."""

from __future__ import annotations

import pytest
from support.oracles import dapple_end, recurrence_end
from support.strategies import full_mesh

from argosy.cluster.topology import Cluster
from argosy.schedule import Schedule, ScheduleKind, ScheduleSpec, build_schedule, in_flight
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import TaskGraph
from benchmarks.bare_pipeline import StageCost, pipeline_graph

KFKB, EAGER, ZERO_BUBBLE = ScheduleKind.KFKB, ScheduleKind.EAGER, ScheduleKind.ZERO_BUBBLE

# Stages, micro-batches, transfer; then iteration time and peak live forwards at stage 0 for k = 1,
# 2, 4 and M.
TABLE = """
2 16 0    51/2  51/4   51/8   51/16
2 16 1    67/2  53/4   53/8   53/16
2 16 2    83/2  62/4   58/8   70/16
2 16 3    99/2  78/4   72/8   102/16
4 16 0.5  71/4  60/8   60/16  60/16
4 16 1    85/4  63/8   63/16  63/16
4 16 2    113/4 77/8   72/16  84/16
4 16 3    141/4 99/8   93/16  120/16
8 32 1    185/8 131/16 131/32 131/32
8 32 2    253/8 161/16 148/32 176/32
"""


def cells() -> list[tuple[int, int, float, int, float, int]]:
    found = []
    for line in TABLE.split("\n")[1:-1]:
        stages, count, transfer, *results = line.split()
        for k, result in zip((1, 2, 4, int(count)), results, strict=True):
            seconds, live = result.split("/")
            found.append((int(stages), int(count), float(transfer), k, float(seconds), int(live)))
    return found


def pipeline(
    schedule: Schedule, transfer: float, backward: float = 2.0
) -> tuple[TaskGraph, Cluster]:
    cost = StageCost(forward=1, backward=backward, output_bytes=transfer, activation_bytes=1)
    cluster = full_mesh(schedule.num_stages)
    names = [device.name for device in cluster.devices]
    return pipeline_graph(schedule, [cost] * schedule.num_stages, names), cluster


@pytest.mark.parametrize(("stages", "count", "transfer", "k", "seconds", "live"), cells())
def test_kfkb_takes_the_published_time_and_memory(
    stages: int, count: int, transfer: float, k: int, seconds: float, live: int
) -> None:
    schedule = build_schedule(ScheduleSpec(kind=KFKB, k=k), stages, count)
    graph, cluster = pipeline(schedule, transfer)
    timeline = simulate_exact(graph, cluster)
    assert timeline.iteration_ends == (seconds,)
    assert recurrence_end(graph, cluster) == seconds
    assert timeline.peak_memory()["n0.0"] == live
    assert in_flight(schedule)[0] == live


def test_a_ragged_last_group_keeps_backwards_in_order() -> None:
    graph, cluster = pipeline(build_schedule(ScheduleSpec(kind=KFKB, k=2), 2, 5), 1)
    assert simulate_exact(graph, cluster).end == 20
    assert recurrence_end(graph, cluster) == 20


@pytest.mark.parametrize("stages", range(1, 7))
def test_zero_bubble_fills_the_drain(stages: int) -> None:
    """With F = I = W = 1 only the S - 1 forwards of the ramp are lost, as soon as there are S
    micro-batches."""
    for count in range(stages, 13):
        graph, cluster = pipeline(build_schedule(ScheduleSpec(kind=ZERO_BUBBLE), stages, count), 0)
        assert simulate_exact(graph, cluster).end == 3 * count + stages - 1
        assert recurrence_end(graph, cluster) == 3 * count + stages - 1


@pytest.mark.parametrize("kind", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, EAGER, KFKB])
def test_without_transfers_every_kind_takes_the_same(kind: ScheduleKind) -> None:
    for stages, count, k in [(1, 1, 1), (2, 7, 3), (5, 5, 2), (4, 9, 4)]:
        graph, cluster = pipeline(build_schedule(ScheduleSpec(kind=kind, k=k), stages, count), 0)
        assert simulate_exact(graph, cluster).end == 3 * (count + stages - 1)


def test_interleaving_divides_the_ramp_by_the_chunks() -> None:
    """W workers, v chunks of 1/v the work each: v M t + (W - 1) t with t = F + B of a chunk."""
    for workers, chunks, groups in [(2, 2, 2), (3, 2, 3), (4, 2, 2), (2, 3, 4), (4, 3, 1)]:
        count = workers * groups
        spec = ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=chunks)
        schedule = build_schedule(spec, workers * chunks, count)
        graph, cluster = pipeline(schedule, 0)
        assert simulate_exact(graph, cluster).end == 3 * (chunks * count + workers - 1)


@pytest.mark.parametrize("transfer", [0.0, 0.07, 0.5])
@pytest.mark.parametrize("warm_up", [(3, 3, 3), (3, 2, 1), (4, 3, 1), (4, 4, 2)])
def test_warm_up_forwards_follow_dapples_recursion(
    warm_up: tuple[int, ...], transfer: float
) -> None:
    forward, backward = (0.3, 0.09, 0.3), (0.6, 0.09, 0.6)
    for count in (4, 7, 12):
        spec = ScheduleSpec(kind=EAGER, depth=warm_up)
        costs = [
            StageCost(forward=f, backward=b, output_bytes=transfer)
            for f, b in zip(forward, backward, strict=True)
        ]
        cluster = full_mesh(3)
        graph = pipeline_graph(
            build_schedule(spec, 3, count), costs, [device.name for device in cluster.devices]
        )
        expected = dapple_end(forward, backward, count, warm_up, transfer)
        assert simulate_exact(graph, cluster).end == pytest.approx(expected, rel=1e-12)
        assert recurrence_end(graph, cluster) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, EAGER])
def test_default_depths_follow_dapples_recursion(kind: ScheduleKind) -> None:
    """Policy A runs S - s forwards ahead, policy B 2 (S - s) - 1."""
    forward, backward = (0.7, 0.31, 0.9, 0.43), (1.1, 0.8, 1.3, 1.21)
    for count in (1, 2, 5, 11):
        ahead = [4 - s if kind is ScheduleKind.ONE_F_ONE_B else 2 * (4 - s) - 1 for s in range(4)]
        costs = [
            StageCost(forward=f, backward=b, output_bytes=0.4)
            for f, b in zip(forward, backward, strict=True)
        ]
        cluster = full_mesh(4)
        schedule = build_schedule(ScheduleSpec(kind=kind), 4, count)
        graph = pipeline_graph(schedule, costs, [device.name for device in cluster.devices])
        expected = dapple_end(forward, backward, count, ahead, 0.4)
        assert simulate_exact(graph, cluster).end == pytest.approx(expected, rel=1e-12)
