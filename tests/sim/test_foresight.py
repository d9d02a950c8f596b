"""Rates over many changes at once are those of one change after the other."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
from support.strategies import cluster_of

from argosy.cluster.changes import link_steps
from argosy.cluster.file import with_changes
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.schedule import ScheduleKind, ScheduleSpec, build_schedule
from argosy.sim.engine import network
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.foresight import foresee
from argosy.sim.engine.graph import TaskGraph
from argosy.timeline import Timeline
from benchmarks.bare_pipeline import StageCost, pipeline_graph


def random_trace(seed: int, *, knots: int, spacing: float) -> Trace:
    """A bandwidth that is sometimes 0 and otherwise up to 1 GB/s."""
    chance = random.Random(seed)
    steps = [
        (
            at * spacing * chance.uniform(0.9, 1.1),
            chance.choice((0.0, *[chance.uniform(1e7, 1e9)] * 4)),
        )
        for at in range(1, knots)
    ]
    return Trace.from_steps(sorted(steps), initial=1e9)


def hosts(count: int) -> Cluster:
    node = {
        "name": "h",
        "count": count,
        "devices": {"kind": "A100-80GB"},
        "nic": {"bandwidth": "1 GB/s"},
    }
    return cluster_of({"name": "hosts", "nodes": [node]})


def pipeline(stages: int, output_bytes: float) -> TaskGraph:
    schedule = build_schedule(ScheduleSpec(kind=ScheduleKind.GPIPE), stages, 6)
    cost = StageCost(forward=0.02, backward=0.04, output_bytes=output_bytes, activation_bytes=1e9)
    return pipeline_graph(schedule, [cost] * stages, [f"h{at}.0" for at in range(stages)])


def spans(timeline: Timeline) -> list[tuple[str, str, int | None, float]]:
    return sorted(
        (span.where, str(span.kind), span.micro_batch, round(span.end, 9))
        for span in timeline.spans
    )


@pytest.mark.parametrize("spacing", [0.0004, 0.01])
def test_many_changes_at_once_are_the_same_as_one_by_one(spacing: float) -> None:
    traces = [random_trace(seed, knots=1500, spacing=spacing) for seed in range(3)]
    cluster = with_changes(
        hosts(3), [link_steps(f"h{at}.nic", trace) for at, trace in enumerate(traces)]
    )
    graph = pipeline(3, 5e7)
    windows = []

    def watched(*arguments: object) -> object:
        windows.append(foresee(*arguments))  # type: ignore[arg-type]
        return windows[-1]

    with patch.object(network, "foresee", watched):
        together = simulate_exact(graph, cluster, iterations=2)
    with patch.object(network, "foresee", lambda *_: None):
        singly = simulate_exact(graph, cluster, iterations=2)
    assert spans(together) == spans(singly)
    for one, other in zip(together.links, singly.links, strict=True):
        assert one.bytes == pytest.approx(other.bytes, rel=1e-9)
    assert any(windows)


def test_one_flow_ends_where_its_trace_says() -> None:
    trace = random_trace(7, knots=20_000, spacing=0.001)
    cluster = with_changes(hosts(2), [link_steps("h0.nic", trace)])
    schedule = build_schedule(ScheduleSpec(kind=ScheduleKind.GPIPE), 2, 1)
    cost = StageCost(forward=0.02, backward=0.04, output_bytes=3e9, activation_bytes=0.0)
    timeline = simulate_exact(pipeline_graph(schedule, [cost] * 2, ["h0.0", "h1.0"]), cluster)
    latency = sum(
        cluster.links[link].latency.at(0) for link in cluster.routes("h0.0", "h1.0")[0].links
    )
    sent = [span for span in timeline.spans if span.kind.is_communication]
    assert sent[0].end == pytest.approx(trace.advance(0.02, 3e9) + latency, rel=1e-9)
    assert sent[1].end == pytest.approx(trace.advance(sent[1].start, 3e9) + latency, rel=1e-9)
