"""Measured traces, end to end: throughput of a real network and preemptions of real spot
machines."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from support.oracles import recurrence_end
from support.strategies import cluster_of

from argosy.cluster.changes import device_steps, link_steps
from argosy.cluster.file import with_changes
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.cluster.tracefile import read_bamboo, read_oboe, rescaled
from argosy.schedule import ScheduleKind, ScheduleSpec, build_schedule
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import TaskGraph
from argosy.timeline import Timeline
from benchmarks.bare_pipeline import StageCost, pipeline_graph

DATA = Path(__file__).parents[2].parent / "shared" / "data"
OBOE = ["oboe_0.txt", "oboe_17.txt", "oboe_42.txt", "oboe_101.txt", "oboe_200.txt"]
CAPACITY = 25e9 / 8
"""25 Gbit/s in bytes/s."""


def found(*parts: str) -> Path:
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no measured traces: {'/'.join(parts)} is absent from the data folder")
    return path


def two_hosts() -> Cluster:
    nodes = [
        {"name": name, "devices": {"kind": "A100-80GB"}, "nic": {"bandwidth": "25 Gbit/s"}}
        for name in "ab"
    ]
    return cluster_of({"name": "two", "nodes": nodes})


def oboe_cluster(name: str) -> tuple[Cluster, Trace]:
    trace = rescaled(read_oboe(found("bandwidth", name)), capacity=CAPACITY)
    cluster = with_changes(two_hosts(), [link_steps("a0.nic", trace)])
    assert cluster.links[0].bandwidth == trace
    return cluster, trace


def pipeline(k: int) -> TaskGraph:
    """Two stages, eight micro-batches; a message takes 16 ms at full bandwidth, a forward 20 ms."""
    schedule = build_schedule(ScheduleSpec(kind=ScheduleKind.KFKB, k=k), 2, 8)
    cost = StageCost(forward=0.02, backward=0.04, output_bytes=5e7, activation_bytes=1e9)
    return pipeline_graph(schedule, [cost] * 2, ["a0.0", "b0.0"])


def seconds_at(graph: TaskGraph, bandwidth: Trace) -> float:
    """One iteration from time 0 under a bandwidth."""
    cluster = with_changes(two_hosts(), [link_steps("a0.nic", bandwidth)])
    return recurrence_end(graph, cluster)


def held(trace: Trace, start: float, end: float) -> list[float]:
    """Values that the trace takes in an interval."""
    inside = [
        value for time, value in zip(trace.times, trace.values, strict=True) if start < time < end
    ]
    return [trace.at(start), *inside]


def later(trace: Trace, by: float) -> Trace:
    """The trace as seen from a clock that starts at ``by``."""
    steps = [
        (time - by, value)
        for time, value in zip(trace.times, trace.values, strict=True)
        if time > by
    ]
    return Trace.from_steps(steps, initial=trace.at(by))


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("name", OBOE)
def test_iteration_times_follow_the_measured_bandwidth(name: str, k: int) -> None:
    """Each lies between those at the lowest and highest bandwidth that held while it ran: the last
    thing to end is the first stage's, so the next iteration meets an empty pipeline."""
    cluster, trace = oboe_cluster(name)
    graph = pipeline(k)
    timeline = simulate_exact(graph, cluster, iterations=10_000, record=0, until=trace.times[-1])
    assert timeline.stalled is None
    assert timeline.end >= trace.times[-1]
    assert len(timeline.iteration_ends) > 50
    fastest, slowest = (
        seconds_at(graph, Trace.constant(pick(trace.values))) for pick in (max, min)
    )
    assert fastest < slowest
    ends = (0.0, *timeline.iteration_ends)
    at_constant: dict[float, float] = {}
    for start, end in itertools.pairwise(ends):
        values = held(trace, start, end)
        for value in {min(values), max(values)} - at_constant.keys():
            at_constant[value] = seconds_at(graph, Trace.constant(value))
        low, high = at_constant[max(values)], at_constant[min(values)]
        assert (
            fastest * (1 - 1e-9)
            <= low * (1 - 1e-9)
            <= end - start
            <= high * (1 + 1e-9)
            <= slowest * (1 + 1e-9)
        )


def test_any_iteration_of_a_long_run_is_what_the_batch_engine_says_from_there() -> None:
    cluster, trace = oboe_cluster(OBOE[0])
    graph = pipeline(2)
    ends = (
        0.0,
        *simulate_exact(graph, cluster, iterations=10_000, record=0, until=60).iteration_ends,
    )
    for start, end in list(itertools.pairwise(ends))[::5]:
        assert seconds_at(graph, later(trace, start)) == pytest.approx(end - start, rel=1e-9)


def test_grouping_pays_where_the_measured_network_is_slow() -> None:
    """Over the whole trace, k = 4 finishes at least as many iterations as k = 1."""
    cluster, trace = oboe_cluster(OBOE[0])
    counts = [
        len(
            simulate_exact(
                pipeline(k), cluster, iterations=10_000, record=0, until=trace.times[-1]
            ).iteration_ends
        )
        for k in (1, 4)
    ]
    assert counts[0] < counts[1]


# Preemptions

ITERATION = 30.0
"""Seconds: 2 micro-batches of 5 + 10."""


def on_spot(nodes: list[Trace]) -> tuple[TaskGraph, Cluster]:
    """A pipeline with one stage per spot machine; a machine that is gone has speed 0."""
    names = [f"s{index}.0" for index in range(len(nodes))]
    group = {
        "name": "s",
        "count": len(nodes),
        "devices": {"kind": "V100-16GB"},
        "nic": {"bandwidth": "10 Gbit/s"},
    }
    changes = [device_steps(name, trace) for name, trace in zip(names, nodes, strict=True)]
    cluster = with_changes(cluster_of({"name": "spot", "nodes": [group]}), changes)
    assert [device.speed for device in cluster.devices] == nodes
    schedule = build_schedule(ScheduleSpec(), len(nodes), 2)
    return pipeline_graph(
        schedule, [StageCost(forward=5, backward=10)] * len(nodes), names
    ), cluster


def machines(name: str) -> dict[str, Trace]:
    return read_bamboo(found("preemption", name))


def removed(trace: Trace) -> float:
    """When a machine is taken away."""
    gone = [
        time for time, value in zip(trace.times, trace.values, strict=True) if time and not value
    ]
    return gone[0] if gone else math.inf


def played(nodes: list[Trace], seconds: float = 1e5) -> Timeline:
    graph, cluster = on_spot(nodes)
    return simulate_exact(graph, cluster, iterations=10_000, until=seconds)


def test_a_preempted_machine_stalls_the_pipeline_at_that_moment() -> None:
    """The machine in the middle is the first of the three to go."""
    present = [trace for trace in machines("bamboo-p3.csv").values() if trace.at(0)]
    lost = min(removed(trace) for trace in present)
    middle = next(trace for trace in present if removed(trace) == lost)
    stays = [trace for trace in present if removed(trace) > lost + 600]
    timeline = played([stays[0], middle, stays[1]])
    graph, cluster = on_spot([Trace.constant(1.0)] * 3)
    calm = simulate_exact(graph, cluster, iterations=len(timeline.iteration_ends) + 1)
    assert timeline.stalled is not None
    assert timeline.stalled.startswith("s1.0 is lost: ")
    assert timeline.iteration_ends == calm.iteration_ends[:-1]
    assert calm.iteration_ends[-1] > lost
    assert max(span.end for span in timeline.spans if span.where == "s1.0") <= lost


@pytest.mark.parametrize("name", ["bamboo-p3.csv", "bamboo-g4dn.csv"])
def test_a_machine_that_comes_late_starts_the_work_late(name: str) -> None:
    late = next(
        trace
        for trace in machines(name).values()
        if not trace.at(0) and math.isfinite(removed(trace))
    )
    begin, lost = late.times[1], removed(late)
    timeline = played([late])
    count = int((lost - begin) // ITERATION)
    assert count > 3
    assert timeline.iteration_ends == tuple(
        begin + ITERATION * index for index in range(1, count + 1)
    )
    assert timeline.stalled is not None


def test_a_machine_that_is_replaced_pauses_the_work_until_its_successor_comes() -> None:
    """A slot that is filled by the first machine to be added after the loss."""
    fleet = list(machines("bamboo-p3.csv").values())
    gone = min((trace for trace in fleet if trace.at(0)), key=removed)
    lost = removed(gone)
    new = [trace for trace in fleet if not trace.at(0) and trace.times[1] > lost]
    successor = min(new, key=lambda trace: trace.times[1])
    back, until = successor.times[1], min(removed(successor), successor.times[1] + 3600)
    slot = Trace.from_steps([(lost, 0.0), (back, 1.0)], initial=1.0)
    ends = played([slot], until).iteration_ends
    work = [end if end <= lost else end - (back - lost) for end in ends]
    assert work == pytest.approx([ITERATION * index for index in range(1, len(ends) + 1)])
    assert ends[-1] >= until
    assert not any(lost < end <= back for end in ends)
