"""The exact engine and independent models agree to 1e-9: if nothing is shared, it equals SimPy and
a recurrence over the tasks; if links are shared, the recurrence is a lower bound, and rates are
max-min fair."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.oracles import SimpyPipeline, is_max_min_fair, recurrence_end
from support.strategies import (
    Pipeline,
    disturbed_schedules,
    exact_traces,
    full_mesh,
    pipelines,
    schedules,
    star,
)

from argosy.cluster.trace import Trace
from argosy.errors import InputError
from argosy.schedule import ScheduleKind, ScheduleSpec, build_schedule, check_schedule
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.fairshare import max_min_rates
from argosy.sim.engine.graph import Flow, Task, TaskGraph
from argosy.timeline import SpanKind, Timeline
from benchmarks.bare_pipeline import StageCost


def close(value: float | tuple[float, ...] | list[float]) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def end(timeline: Timeline) -> float:
    """Of the only iteration; infinity if it never ends."""
    return timeline.iteration_ends[0] if timeline.iteration_ends else math.inf


def assert_equal_to_simpy(pipeline: Pipeline) -> None:
    """Every computation at the same moments, every message at the same arrival."""
    oracle = SimpyPipeline(pipeline.schedule, pipeline.costs, pipeline.cluster)
    timeline = simulate_exact(pipeline.graph, pipeline.cluster)
    assert end(timeline) == close(oracle.end)
    computed = {
        (span.kind, span.stage, span.micro_batch): (span.start, span.end)
        for span in timeline.spans
        if not span.kind.is_communication
    }
    names = {"F": "forward", "B": "backward", "I": "input-gradient", "W": "weight-gradient"}
    expected = {
        (SpanKind(names[a.kind]), a.stage, a.micro_batch): times
        for a, times in oracle.times.items()
    }
    assert computed.keys() == expected.keys()
    for key, times in expected.items():
        assert computed[key] == close(times)
    arrived = sorted(span.end for span in timeline.spans if span.kind.is_communication)
    assert arrived == close(sorted(oracle.arrivals.values()))


def random_pipeline(seed: int) -> Pipeline:
    """Generic numbers, no two alike: every kind of schedule, changing bandwidths, latencies and
    speeds, outages."""
    dice = random.Random(seed)

    def trace(low: float, high: float, *, may_stop: bool = True) -> Trace:
        times = [0.0, *sorted(dice.uniform(0.1, 60) for _ in range(dice.randint(0, 6)))]
        held = [0.0 if may_stop and dice.random() < 0.2 else dice.uniform(low, high) for _ in times]
        held[-1] = held[-1] or high
        return Trace(tuple(times), tuple(held))

    kind = dice.choice(list(ScheduleKind))
    if kind is ScheduleKind.INTERLEAVED:
        workers, chunks = dice.choice([(3, 2), (1, 4), (3, 1)])
        schedule = build_schedule(
            ScheduleSpec(kind=kind, chunks=chunks), workers * chunks, workers * dice.randint(1, 4)
        )
    elif kind.is_v:  # on more workers two channels would share a link
        schedule = build_schedule(ScheduleSpec(kind=kind), 2, dice.randint(2, 12))
    else:
        spec = ScheduleSpec(kind=kind, k=dice.randint(1, 4))
        schedule = build_schedule(spec, dice.randint(1, 6), dice.randint(1, 12))
    costs = [
        StageCost(
            forward=dice.uniform(0.1, 2),
            backward=dice.uniform(0.1, 3),
            output_bytes=dice.uniform(0, 2),
        )
        for _ in range(schedule.num_stages)
    ]
    cluster = full_mesh(
        schedule.num_workers,
        bandwidths=[trace(0.3, 5) for _ in range(7)],
        latencies=[trace(0.01, 0.8) for _ in range(3)],
        speeds=[trace(0.3, 1.5) for _ in range(5)],
    )
    return Pipeline(schedule=schedule, costs=tuple(costs), cluster=cluster)


@pytest.mark.parametrize("seed", range(150))
def test_three_models_agree_on_generic_numbers(seed: int) -> None:
    pipeline = random_pipeline(seed)
    assert_equal_to_simpy(pipeline)
    expected = end(simulate_exact(pipeline.graph, pipeline.cluster))
    assert recurrence_end(pipeline.graph, pipeline.cluster) == close(expected)


@settings(max_examples=150, deadline=None)
@given(pipelines(may_end=True))
def test_the_recurrence_equals_exact_where_nothing_is_shared(pipeline: Pipeline) -> None:
    """Also when something is lost for ever: then both never end."""
    expected = end(simulate_exact(pipeline.graph, pipeline.cluster))
    assert recurrence_end(pipeline.graph, pipeline.cluster) == close(expected)


@settings(max_examples=150, deadline=None)
@given(pipelines(may_end=True))
def test_exact_equals_simpy_where_nothing_is_shared(pipeline: Pipeline) -> None:
    assert_equal_to_simpy(pipeline)


@settings(max_examples=100, deadline=None)
@given(pipelines(of=disturbed_schedules()))
def test_exact_and_recurrence_equal_simpy_on_any_order_that_the_checker_passes(
    pipeline: Pipeline,
) -> None:
    """Backwards whole at one stage and in halves at the next, messages that are used out of
    order."""
    try:
        check_schedule(pipeline.schedule)
    except InputError:
        return
    # Between two workers that host several stages each, activations and gradients share a wire.
    assume(pipeline.schedule.num_workers != 2 or pipeline.schedule.num_stages == 2)
    assert_equal_to_simpy(pipeline)
    expected = end(simulate_exact(pipeline.graph, pipeline.cluster))
    assert recurrence_end(pipeline.graph, pipeline.cluster) == close(expected)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_collectives_with_unequal_flows_and_latencies_agree(data: st.DataObject) -> None:
    """A ring on wires of its own: each flow arrives after its own latency, paid once per round."""
    count = data.draw(st.integers(2, 4))
    traces = st.lists(exact_traces(), min_size=1, max_size=4)
    cluster = full_mesh(count, bandwidths=data.draw(traces), latencies=data.draw(traces))
    sizes = st.sampled_from((0.0, 0.125, 1.0, 4.0))
    rings: list[Task] = []
    for index in range(3):
        flows = tuple(Flow(at, (at + 1) % count, data.draw(sizes)) for at in range(count))
        before = (len(rings) - 1,) if rings else ()
        rounds = data.draw(st.integers(1, 3))
        rings.append(
            Task(kind=SpanKind.COLLECTIVE, flows=flows, rounds=rounds, after=before, stage=index)
        )
        after = (len(rings) - 1,)
        rings.append(Task(kind=SpanKind.UPDATE, device=0, seconds=data.draw(sizes), after=after))
    graph = TaskGraph(devices=tuple(device.name for device in cluster.devices), tasks=tuple(rings))
    timeline = simulate_exact(graph, cluster)
    assert recurrence_end(graph, cluster) == close(end(timeline))
    assert timeline.end == end(timeline)
    path = timeline.critical_path()
    assert path[-1].end == timeline.end
    assert all(later.start == earlier.end for earlier, later in itertools.pairwise(path))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_recurrence_never_exceeds_exact_where_links_are_shared(data: st.DataObject) -> None:
    schedule = data.draw(schedules(max_stages=5, max_micro_batches=8))
    per_node = data.draw(st.integers(1, 2)) if schedule.num_workers > 2 else 1
    traces = data.draw(st.lists(exact_traces(), min_size=1, max_size=4))
    cluster = star(schedule.num_workers, bandwidths=traces, per_node=per_node)
    costs = tuple(
        StageCost(forward=1, backward=2, output_bytes=data.draw(st.sampled_from((0.5, 1.0, 3.0))))
        for _ in range(schedule.num_stages)
    )
    pipeline = Pipeline(schedule=schedule, costs=costs, cluster=cluster)
    bound = recurrence_end(pipeline.graph, cluster)
    assert bound <= end(simulate_exact(pipeline.graph, cluster)) * (1 + 1e-9)


def test_the_bound_sees_a_nic_that_two_producers_share() -> None:
    """Two devices of one host send 6 bytes each through a NIC of 1 byte/s: the load alone takes 12
    s."""
    cluster = star(4, per_node=2)
    flows = [Flow(0, 2, 6.0), Flow(1, 3, 6.0)]
    tasks = tuple(Task(kind=SpanKind.TRANSFER, flows=(flow,)) for flow in flows)
    graph = TaskGraph(devices=tuple(device.name for device in cluster.devices), tasks=tasks)
    assert recurrence_end(graph, cluster) == 12
    assert simulate_exact(graph, cluster).iteration_ends == (12.0,)


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], dict[int, float]]:
    """Routes of flows over up to six links, and the links' capacities, some of them 0."""
    count = draw(st.integers(1, 6))
    capacity = st.one_of(st.just(0.0), st.integers(1, 9).map(float), st.floats(1e-3, 1e12))
    route = st.lists(st.integers(0, count - 1), min_size=1, max_size=4, unique=True).map(tuple)
    flows = draw(st.lists(route, min_size=1, max_size=10))
    return flows, {link: draw(capacity) for link in range(count)}


@settings(max_examples=500, deadline=None)
@given(networks())
def test_every_flow_has_a_bottleneck_on_which_nobody_gets_more(
    network: tuple[list[tuple[int, ...]], dict[int, float]],
) -> None:
    flows, capacity = network
    assert is_max_min_fair(flows, capacity, max_min_rates(flows, capacity))


def test_the_fairness_oracle_refuses_other_allocations() -> None:
    flows, capacity = [(0,), (0, 1), (1,)], {0: 10.0, 1: 30.0}
    assert is_max_min_fair(flows, capacity, [5.0, 5.0, 25.0])
    assert not is_max_min_fair(flows, capacity, [6.0, 4.0, 26.0])
    assert not is_max_min_fair(flows, capacity, [5.0, 5.0, 24.0])
    assert not is_max_min_fair(flows, capacity, [5.0, 6.0, 25.0])


@pytest.mark.parametrize("bandwidth", [(2e10, 1e10), (2e10, 0.0, 1e10), (1e10,)])
def test_what_waits_for_a_lost_device_never_ends_at_real_bandwidths_either(
    bandwidth: tuple[float, ...],
) -> None:
    """A message of 1 MB is nothing beside what a link carries until the end of time."""
    links = Trace(tuple(float(index) for index in range(len(bandwidth))), bandwidth)
    cluster = full_mesh(2, bandwidths=[links], speeds=[Trace((0.0, 3.0), (1.0, 0.0))])
    tasks = (
        Task(kind=SpanKind.FORWARD, device=0, seconds=4),
        Task(kind=SpanKind.TRANSFER, flows=(Flow(0, 1, 1e6),), after=(0,)),
    )
    graph = TaskGraph(devices=("n0.0", "n1.0"), tasks=tasks)
    assert recurrence_end(graph, cluster) == math.inf
    assert simulate_exact(graph, cluster).stalled is not None
