"""What a value shows of itself where somebody prints it: a sentence that says what it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.cluster.file import load_cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InputError
from argosy.plan.plan import Recompute
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.schedule.generate import build_schedule, family
from argosy.solve.programs.stagecut import StageCut
from argosy.space.option import Option, PoolPart
from argosy.space.pool import find_pools
from argosy.space.price import Prices
from argosy.timeline import Span, SpanKind, Timeline
from argosy.workload.graph import Graph, GraphNode, Phase, Role, Value
from argosy.workload.load import load_model


def test_devices_pools_and_layers() -> None:
    cluster = load_cluster("mixed-16")
    assert repr(cluster.devices[0]) == "a0.0 (A100-80GB)"
    fast, slow = find_pools(cluster)
    assert (repr(fast), repr(slow)) == ("8x A100-80GB in 2 nodes", "8x V100-32GB in 2 nodes")
    assert (
        repr(load_model("gpt2", sequence_length=1024).layers[1])
        == "block.0: 7.088 M parameters, 17.72 GFLOP forward"
    )


def test_ways_to_run_a_stage() -> None:
    prices = Prices(load_model("llama-3-8b"), find_pools(load_cluster("mixed-16")), ComputeModel())
    parts = (
        PoolPart(pool=0, width=2, replicas=3, samples=2),
        PoolPart(pool=1, width=1, replicas=2, samples=1),
    )
    option = Option(
        prices=prices, vector=(6, 2), parts=parts, recompute=Recompute.SELECTIVE, zero=1
    )
    assert repr(option) == "3x2 A100-80GB n=2 + 2x1 V100-32GB n=1, zero 1, recompute selective"
    cut = PoolPart(pool=0, width=4, replicas=1, samples=1, context=2, expert=2)
    option = Option(prices=prices, vector=(4, 0), parts=(cut,), recompute=Recompute.NONE, zero=0)
    assert repr(option) == "1x4 A100-80GB n=1, context 2, expert 2, zero 0, recompute none"


def test_schedules() -> None:
    assert repr(build_schedule(ScheduleSpec(), 3, 1)) == "1f1b: 3 stages, 1 micro-batch"
    with pytest.raises(InputError, match=r"schedule.k: found 0, expected k of at least 1"):
        family(ScheduleKind.KFKB, (2, 1), 0, 4)


def test_timelines_and_spans() -> None:
    span = Span("a0.0", SpanKind.FORWARD, 0.25, 1.5, 0, 3)
    assert repr(span) == "forward 3 on a0.0, 0.25..1.5 s"
    timeline = Timeline(
        clock="simulated",
        devices=("a0.0", "a0.1"),
        spans=(span,),
        iteration_ends=(2.0, 4.0),
        busy=(2.0, 1.0),
    )
    assert repr(timeline) == "Timeline (simulated): 2 iterations of 2 s on 2 devices"
    stalled = replace(timeline, iteration_ends=(), stalled="a0.0 is lost")
    assert repr(stalled) == "Timeline (simulated): 0 iterations on 2 devices, stalled: a0.0 is lost"


def test_graphs_and_cuts() -> None:
    cut = StageCut(
        stages=(0, 0, 1), flop=(3e9, 1e9), crossing_bytes=(2048.0,), forwarded=(), tolerance=0.1
    )
    assert repr(cut) == "2 stages with 75 % | 25 % of the FLOP, 2,048 bytes across"
    values = (
        Value(name="w", role=Role.PARAMETER, shape=(40, 30), dtype="float32"),
        Value(name="y", role=Role.RESULT, shape=(40,), dtype="float32"),
    )
    ahead = GraphNode(
        name="sum", op="aten.sum.default", arguments=(), outputs=(1,), phase=Phase.FORWARD
    )
    graph = Graph(name="small", values=values, nodes=(ahead,), loss=None, gradients=())
    assert repr(graph) == "small: 1 forward and 0 backward operations, 1,200 parameters"
