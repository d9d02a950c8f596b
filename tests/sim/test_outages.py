"""Devices that slow down, are lost and return; links that go down and come up again."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.strategies import (
    Pipeline,
    eighths,
    full_mesh,
    pipelines,
)

from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.schedule import ScheduleSpec, build_schedule
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import Flow, Task, TaskGraph
from argosy.timeline import SpanKind
from benchmarks.bare_pipeline import StageCost, pipeline_graph

few = settings(max_examples=40, deadline=None)


def two_stages(count: int, *, output_bytes: float = 0.0, cluster: Cluster) -> TaskGraph:
    cost = StageCost(forward=1, backward=2, output_bytes=output_bytes, activation_bytes=1)
    schedule = build_schedule(ScheduleSpec(), 2, count)
    return pipeline_graph(schedule, [cost] * 2, [device.name for device in cluster.devices])


@few
@given(eighths, eighths)
def test_a_device_that_slows_to_half_needs_twice_as_long_from_then_on(
    seconds: float, since: float
) -> None:
    cluster = full_mesh(1, speeds=[Trace((0.0, since), (1.0, 0.5))])
    task = Task(kind=SpanKind.UPDATE, device=0, seconds=seconds)
    end = simulate_exact(TaskGraph(devices=("n0.0",), tasks=(task,)), cluster).end
    assert end == (seconds if seconds <= since else since + 2 * (seconds - since))


@few
@given(pipelines(changing=False, latency=False), eighths, st.data())
def test_a_lost_device_stalls_and_finished_iterations_are_kept(
    pipeline: Pipeline, lost: float, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, pipeline.schedule.num_workers - 1))
    devices = list(pipeline.cluster.devices)
    speed = Trace.from_steps([(lost, 0.0)], initial=devices[at].speed.at(0))
    devices[at] = replace(devices[at], speed=speed)
    cluster = replace(pipeline.cluster, devices=tuple(devices))
    plain = simulate_exact(pipeline.graph, pipeline.cluster, iterations=4)
    timeline = simulate_exact(pipeline.graph, cluster, iterations=4)
    ends = timeline.iteration_ends
    assert ends == plain.iteration_ends[: len(ends)]
    assert len(ends) >= sum(end < lost for end in plain.iteration_ends)
    assert all(span in timeline.spans for span in plain.spans if span.end < lost)
    if len(ends) < 4:
        event("stalled")
        assert timeline.stalled is not None
        assert timeline.stalled.startswith(f"{devices[at].name} is lost: ")
        assert timeline.stalled.endswith("never ends")
        assert all(span.end <= lost for span in timeline.spans if span.where == devices[at].name)
    else:
        assert timeline.stalled is None


def test_the_message_of_a_stall_names_the_device_the_task_and_the_moment() -> None:
    cluster = full_mesh(2, speeds=[Trace.constant(1.0), Trace((0.0, 20.5), (1.0, 0.0))])
    timeline = simulate_exact(two_stages(4, cluster=cluster), cluster, iterations=3)
    assert timeline.iteration_ends == (15.0,)
    assert timeline.stalled == "n1.0 is lost: backward 1 of stage 1, begun at 20 s, never ends"


def test_the_message_of_a_stall_names_the_ends_of_a_link_that_is_down() -> None:
    cluster = full_mesh(2, bandwidths=[Trace((0.0, 4.5), (1.0, 0.0)), Trace.constant(1.0)])
    timeline = simulate_exact(
        two_stages(4, output_bytes=1.0, cluster=cluster), cluster, iterations=3
    )
    assert timeline.iteration_ends == ()
    expected = (
        "no link from n0.0 to n1.0 comes back: transfer 2 of stage 0, begun at 9 s, never ends"
    )
    assert timeline.stalled == expected


@few
@given(pipelines(changing=False), eighths, eighths, st.data())
def test_a_device_that_is_lost_and_returns_delays_by_no_more_than_its_pause(
    pipeline: Pipeline, lost: float, pause: float, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, pipeline.schedule.num_workers - 1))
    devices = list(pipeline.cluster.devices)
    usual = devices[at].speed.at(0)
    devices[at] = replace(devices[at], speed=Trace((0.0, lost, lost + pause), (usual, 0.0, usual)))
    before = simulate_exact(pipeline.graph, pipeline.cluster).end
    after = simulate_exact(pipeline.graph, replace(pipeline.cluster, devices=tuple(devices))).end
    assert before <= after <= before + pause + 1e-9
    if pipeline.schedule.num_workers == 1:
        assert after == (before + pause if lost < before else before)


@few
@given(eighths, eighths, eighths)
def test_a_link_that_goes_down_and_up_again_pauses_what_is_on_it(
    size: float, down: float, pause: float
) -> None:
    cluster = full_mesh(2, bandwidths=[Trace((0.0, down, down + pause), (1.0, 0.0, 1.0))])
    task = Task(kind=SpanKind.TRANSFER, flows=(Flow(0, 1, size),))
    end = simulate_exact(TaskGraph(devices=("n0.0", "n1.0"), tasks=(task,)), cluster).end
    assert end == (size if size <= down else size + pause)


def test_a_message_in_flight_at_an_outage_waits_and_the_pipeline_with_it() -> None:
    """Forward 0 leaves at 1 s; 1 of its 4 bytes has crossed when the link goes down from 2 to 5
    s."""
    outage = Trace((0.0, 2.0, 5.0), (1.0, 0.0, 1.0))
    cluster = full_mesh(2, bandwidths=[outage, Trace.constant(4.0)])
    timeline = simulate_exact(two_stages(1, output_bytes=4.0, cluster=cluster), cluster)
    found = [(span.where, span.start, span.end) for span in timeline.spans]
    assert found == [
        ("n0.0", 0.0, 1.0),
        ("n0.0>n1.0", 1.0, 8.0),
        ("n1.0", 8.0, 9.0),
        ("n1.0", 9.0, 11.0),
        ("n1.0>n0.0", 11.0, 12.0),
        ("n0.0", 12.0, 14.0),
    ]
