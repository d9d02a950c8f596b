"""Transfers that keep both ends waiting, against a timetable made by hand and against what must
always hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document
from argosy.errors import InputError
from argosy.schedule import ScheduleKind, ScheduleSpec, build_schedule
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import TaskGraph
from argosy.sim.tasks.blocking import with_blocking_transfers
from benchmarks.bare_pipeline import StageCost, pipeline_graph


def cluster_of(stages: int) -> Cluster:
    node = {"name": "n", "count": stages, "devices": {"kind": "T4"}, "nic": {"bandwidth": "1 GB/s"}}
    return build_cluster(Document("test", {"name": "row", "nodes": [node]}, {}), folder=Path())


def graph_of(spec: ScheduleSpec, costs: list[StageCost], micro_batches: int) -> TaskGraph:
    devices = [f"n{stage}.0" for stage in range(len(costs))]
    return pipeline_graph(build_schedule(spec, len(costs), micro_batches), costs, devices)


def seconds(graph: TaskGraph, stages: int) -> float:
    return simulate_exact(graph, cluster_of(stages), record=0).iteration_ends[0]


def test_two_stages_by_hand() -> None:
    """F = 1, B = 2, a transfer 0.5: the last stage takes 3 of compute and an exchange of 2 x 0.5
    per micro-batch. First input at 1.5, four micro-batches less the last exchange 15, then the last
    gradient 0.5 and backward 2."""
    costs = [StageCost(forward=1, backward=2, output_bytes=0.5e9)] * 2
    graph = graph_of(ScheduleSpec(), costs, 4)
    assert seconds(graph, 2) == pytest.approx(17.0)
    assert seconds(with_blocking_transfers(graph), 2) == pytest.approx(1.5 + 4 * 4 - 1 + 0.5 + 2)


def test_a_middle_stage_pays_for_four_transfers_or_the_share_that_it_waits_for() -> None:
    """With many micro-batches the period of a middle stage is its compute and what it exchanges
    with both sides."""
    costs = [StageCost(forward=1, backward=2, output_bytes=0.25e9)] * 4
    graphs = [graph_of(ScheduleSpec(), costs, count) for count in (24, 32)]
    for share, waits in ((1.0, 4 * 0.25), (0.75, 4 * 0.25 * 0.75)):
        times = [seconds(with_blocking_transfers(graph, share), 4) for graph in graphs]
        assert (times[1] - times[0]) / 8 == pytest.approx(3 + waits, rel=0.05)
    assert with_blocking_transfers(graphs[0], 0.0) is graphs[0]


STAGES = st.lists(
    st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=6
)


@given(stages=STAGES, micro_batches=st.integers(1, 9), share=st.sampled_from((0.3, 1.0)))
@settings(max_examples=40, deadline=None)
def test_waiting_never_helps_and_never_locks_up_1f1b(
    stages: list[tuple[int, int, int]], micro_batches: int, share: float
) -> None:
    costs = [StageCost(forward=f / 4, backward=b / 4, output_bytes=x * 1e8) for f, b, x in stages]
    graph = graph_of(ScheduleSpec(), costs, micro_batches)
    free, blocking = (
        seconds(graph, len(costs)),
        seconds(with_blocking_transfers(graph, share), len(costs)),
    )
    # a wait for a part of a transfer delays others, which may help by chance; a wait for all of it
    # never does
    assert blocking >= free * (1 - 1e-9 if share == 1.0 else 0.95)
    moved = sum(2 * micro_batches * x / 10 for _, _, x in stages[:-1])
    assert blocking <= free + moved + 1e-9


def test_a_schedule_that_would_lock_up_is_refused() -> None:
    costs = [StageCost(forward=1, backward=2, output_bytes=1e8)] * 2
    graph = graph_of(ScheduleSpec(kind=ScheduleKind.KFKB, k=2), costs, 4)
    with pytest.raises(InputError, match="such as 1f1b"):
        with_blocking_transfers(graph)
