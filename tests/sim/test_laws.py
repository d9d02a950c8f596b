"""Laws of the simulator, for pipelines and whole plans drawn at random."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from sim.critical import critical_shares
from support.strategies import (
    Pipeline,
    Problem,
    chains,
    cluster_files,
    cluster_of,
    exact_traces,
    full_mesh,
    pipelines,
    plans,
    schedules,
    stage_costs,
    star,
)

from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.dtype import Dtype
from argosy.plan.check import check_plan
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import Schedule, ScheduleKind, ScheduleSpec
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import Task, TaskGraph
from argosy.sim.tasks.compile import compile_plan
from argosy.sim.tasks.split import overlaps
from argosy.timeline import SpanKind, Timeline
from argosy.timeline.file import dumps_timeline, loads_timeline
from argosy.workload.chain import Chain, Layer
from benchmarks.bare_pipeline import pipeline_graph

HOST = {"name": "a", "devices": {"kind": "A100-80GB"}}

few = settings(max_examples=40, deadline=None)
more = settings(max_examples=80, deadline=None)


def simulated(problem: Problem, iterations: int = 1) -> Timeline:
    check_plan(problem.plan, problem.chain, problem.cluster)
    graph = compile_plan(problem.plan, problem.chain, problem.cluster)
    return simulate_exact(graph, problem.cluster, iterations=iterations)


# What takes how long


@few
@given(schedules(max_stages=1), st.data())
def test_one_stage_on_one_device_takes_the_sum_of_its_ops(
    schedule: Schedule, data: st.DataObject
) -> None:
    costs = data.draw(stage_costs(1))
    timeline = simulate_exact(pipeline_graph(schedule, costs, ["n0.0"]), full_mesh(1))
    expected = schedule.num_micro_batches * (costs[0].forward + costs[0].backward)
    assert timeline.end == expected
    assert timeline.utilisation() == {"n0.0": 1.0}


@few
@given(chains(), st.integers(1, 5), st.integers(1, 3))
def test_a_plan_on_one_device_takes_the_sum_of_its_tasks(
    chain: Chain, count: int, iterations: int
) -> None:
    cluster = full_mesh(1)
    stage = Stage(first=0, end=len(chain.layers), replicas=(Replica(devices=("n0.0",), samples=2),))
    plan = Plan(
        model=ModelRef(name=chain.name, sequence_length=1, dtype=chain.dtype),
        cluster=ClusterRef(name="mesh", hash="", content=""),
        global_batch=2 * count,
        micro_batch_size=2,
        num_micro_batches=count,
        schedule=ScheduleSpec(),
        stages=(stage,),
    )
    check_plan(plan, chain, cluster)
    graph = compile_plan(plan, chain, cluster)
    timeline = simulate_exact(graph, cluster, iterations=iterations)
    assert timeline.end == pytest.approx(
        iterations * sum(task.seconds for task in graph.tasks), rel=1e-12
    )


@more
@given(pipelines())
def test_doubling_every_bandwidth_never_slows_a_pipeline_on_dedicated_links(
    pipeline: Pipeline,
) -> None:
    links = [replace(link, bandwidth=link.bandwidth.scaled(2)) for link in pipeline.cluster.links]
    faster = replace(pipeline.cluster, links=tuple(links))
    before = simulate_exact(pipeline.graph, pipeline.cluster).end
    assert simulate_exact(pipeline.graph, faster).end <= before * (1 + 1e-12)


@more
@given(st.data())
def test_a_pause_of_the_whole_world_only_stretches_time(data: st.DataObject) -> None:
    """Where all links and devices follow one trace v, what ended at T ends where the integral of v
    reaches T."""
    schedule = data.draw(schedules(max_stages=5, max_micro_batches=6))
    costs = data.draw(stage_costs(schedule.num_stages))
    trace = data.draw(exact_traces())
    times = [0.0, *(time + 0.01373 * index for index, time in enumerate(trace.times[1:], 1))]
    world = Trace(tuple(times), trace.values)
    still = star(schedule.num_workers, per_node=data.draw(st.integers(1, 3)))
    moving = replace(
        still,
        links=tuple(replace(link, bandwidth=world) for link in still.links),
        devices=tuple(replace(device, speed=world) for device in still.devices),
    )
    graph = Pipeline(schedule=schedule, costs=costs, cluster=still).graph
    plain = simulate_exact(graph, still, iterations=2).iteration_ends
    stretched = simulate_exact(graph, moving, iterations=2).iteration_ends
    assert stretched == pytest.approx([world.advance(0.0, end) for end in plain], rel=1e-9)


@few
@given(plans(clusters=cluster_files(uniform=True, changing=False)), st.data())
def test_relabelling_identical_devices_changes_nothing(
    problem: Problem, data: st.DataObject
) -> None:
    nodes = problem.cluster.nodes
    names: dict[str, str] = {}
    for node, other in zip(nodes, data.draw(st.permutations(nodes)), strict=True):
        names |= dict(zip(node.devices, data.draw(st.permutations(other.devices)), strict=True))
    stages = []
    for stage in problem.plan.stages:
        renamed = [
            replace(each, devices=tuple(names[name] for name in each.devices))
            for each in stage.replicas
        ]
        stages.append(replace(stage, replicas=tuple(renamed)))
    relabelled = replace(problem, plan=replace(problem.plan, stages=tuple(stages)))
    before, after = simulated(problem), simulated(relabelled)
    assert after.iteration_ends == pytest.approx(before.iteration_ends, rel=1e-9)
    assert sorted(after.peak_memory().values()) == pytest.approx(
        sorted(before.peak_memory().values()), rel=1e-9
    )


@few
@given(pipelines(changing=False), st.integers(2, 6))
def test_iterations_back_to_back_take_at_most_their_sum_and_at_least_the_busiest_device(
    pipeline: Pipeline, count: int
) -> None:
    first = simulate_exact(pipeline.graph, pipeline.cluster).end
    timeline = simulate_exact(pipeline.graph, pipeline.cluster, iterations=count)
    work: dict[int, float] = defaultdict(float)
    for task in pipeline.graph.tasks:
        if not task.kind.is_communication:
            work[task.device] += task.seconds / pipeline.cluster.devices[task.device].speed.at(0)
    assert len(timeline.iteration_ends) == count
    assert timeline.iteration_ends[0] == pytest.approx(first, rel=1e-12)
    for index, end in enumerate(timeline.iteration_ends, start=1):
        assert index * max(work.values()) * (1 - 1e-12) <= end <= index * first * (1 + 1e-12)


@few
@given(pipelines(), st.integers(1, 4), st.integers(0, 4))
def test_what_is_recorded_does_not_change_what_happens(
    pipeline: Pipeline, count: int, record: int
) -> None:
    whole = simulate_exact(pipeline.graph, pipeline.cluster, iterations=count)
    part = simulate_exact(pipeline.graph, pipeline.cluster, iterations=count, record=record)
    assert part.iteration_ends == whole.iteration_ends
    assert part.busy == whole.busy
    assert part.links == whole.links or record < count
    assert [span.iteration for span in part.spans if span.iteration >= record] == []
    kept = [span._replace(waited_for=None) for span in whole.spans if span.iteration < record]
    assert [span._replace(waited_for=None) for span in part.spans] == kept


@few
@given(pipelines(changing=False), st.floats(0, 4))
def test_exactly_the_iterations_that_begin_by_a_moment_are_played(
    pipeline: Pipeline, share: float
) -> None:
    whole = simulate_exact(pipeline.graph, pipeline.cluster, iterations=6)
    until = share * whole.iteration_ends[0]
    cut = simulate_exact(pipeline.graph, pipeline.cluster, iterations=6, until=until)
    begins = [
        min(span.start for span in whole.spans if span.iteration == index) for index in range(6)
    ]
    assert cut.stalled is None
    assert cut.iteration_ends == whole.iteration_ends[: sum(begin <= until for begin in begins)]


# What is conserved


@few
@given(plans(), st.integers(1, 2))
def test_every_byte_that_crosses_a_link_belongs_to_a_span(
    problem: Problem, iterations: int
) -> None:
    timeline = simulated(problem, iterations)
    crossed: dict[str, float] = defaultdict(float)
    for span in timeline.spans:
        for link in span.via:
            crossed[link] += span.bytes
    carried = {use.link: use.bytes for use in timeline.links}
    assert carried == pytest.approx(
        {link: total for link, total in crossed.items() if total}, rel=1e-9
    )
    assert all(0 < use.utilisation <= 1 + 1e-9 for use in timeline.links)


@few
@given(plans(), st.integers(1, 2))
def test_every_flow_of_the_plan_is_carried_once_per_iteration(
    problem: Problem, iterations: int
) -> None:
    graph = compile_plan(problem.plan, problem.chain, problem.cluster)
    timeline = simulate_exact(graph, problem.cluster, iterations=iterations)
    planned: dict[str, float] = defaultdict(float)
    for flow in (flow for task in graph.tasks for flow in task.flows):
        planned[f"{graph.devices[flow.source]}>{graph.devices[flow.target]}"] += (
            iterations * flow.bytes
        )
    seen: dict[str, float] = defaultdict(float)
    for span in timeline.spans:
        if span.kind.is_communication:
            seen[span.where] += span.bytes
    assert seen == pytest.approx(planned, rel=1e-9)


@few
@given(plans(), st.integers(1, 2))
def test_no_device_does_two_things_at_once(problem: Problem, iterations: int) -> None:
    timeline = simulated(problem, iterations)
    per_device: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        if not span.kind.is_communication:
            per_device[span.where].append((span.start, span.end))
    for spans in per_device.values():
        assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(sorted(spans)))
    busy = {
        device: sum(end - start for start, end in spans) for device, spans in per_device.items()
    }
    assert busy == pytest.approx(dict(zip(timeline.devices, timeline.busy, strict=True)), rel=1e-9)


@few
@given(plans(), st.integers(1, 2))
def test_no_link_carries_more_than_it_can(problem: Problem, iterations: int) -> None:
    """Between any two moments, the bytes of all that began and ended in between fit into the
    bandwidth."""
    links = [replace(link, latency=Trace.constant(0)) for link in problem.cluster.links]
    cluster = replace(problem.cluster, links=tuple(links))
    timeline = simulated(replace(problem, cluster=cluster), iterations)
    on_link: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for span in timeline.spans:
        for name in span.via:
            on_link[name].append((span.start, span.end, span.bytes))
    for link in links:
        spans = on_link[link.name][:40]
        starts, ends = (
            sorted({start for start, _, _ in spans}),
            sorted({end for _, end, _ in spans}),
        )
        for begin, end in itertools.product(starts, ends):
            inside = sum(size for first, last, size in spans if begin <= first and last <= end)
            if begin < end:
                assert (
                    inside <= link.bandwidth.integral(begin, end) * (1 + 1e-9) + 1e-3
                )  # of some GB


@few
@given(plans(), st.integers(1, 3))
def test_memory_is_never_negative_and_ends_at_what_is_resident(
    problem: Problem, iterations: int
) -> None:
    graph = compile_plan(problem.plan, problem.chain, problem.cluster)
    timeline = simulate_exact(graph, problem.cluster, iterations=iterations)
    for (device, steps), resident in zip(timeline.memory, graph.resident, strict=True):
        assert device in timeline.devices
        assert min(held for _, held in steps) >= resident * (1 - 1e-9)
        assert steps[-1][1] == pytest.approx(resident, rel=1e-9)
        assert [time for time, _ in steps] == sorted({time for time, _ in steps})


@few
@given(plans(), st.integers(1, 2))
def test_every_sample_crosses_every_stage_boundary_once_each_way(
    problem: Problem, iterations: int
) -> None:
    timeline = simulated(problem, iterations)
    stages, layers = problem.plan.stages, problem.chain.layers
    assume(len({stage.devices for stage in stages}) > 1)
    sent: dict[int | None, float] = defaultdict(float)
    for span in timeline.spans:
        if span.kind is SpanKind.TRANSFER:
            sent[span.stage] += span.bytes
    samples = iterations * problem.plan.global_batch
    crosses = [
        one.devices != other.devices for one, other in itertools.pairwise(stages)
    ]  # a V turns round in place
    for index, stage in enumerate(stages):
        onward = (
            layers[stage.end - 1].output_bytes
            if index + 1 < len(stages) and crosses[index]
            else 0.0
        )
        back = layers[stage.first - 1].output_bytes if index and crosses[index - 1] else 0.0
        assert sent[index] == pytest.approx(samples * (onward + back), rel=1e-9)


@few
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_replicas_that_hold_the_same_samples_hand_over_each_of_them_once(
    shares: list[int], data: st.DataObject
) -> None:
    total = sum(shares)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, total), max_size=3)) | {total})]
    sources = [Replica(devices=(f"a{index}",), samples=share) for index, share in enumerate(shares)]
    targets = [
        Replica(devices=(f"b{index}",), samples=end - first)
        for index, (first, end) in enumerate(itertools.pairwise(cuts))
    ]
    holder = {
        side: [replica.devices[0] for replica in replicas for _ in range(replica.samples)]
        for side, replicas in (("source", sources), ("target", targets))
    }
    expected = Counter(zip(holder["source"], holder["target"], strict=True))
    handed = {
        (one.devices[0], other.devices[0]): count
        for one, other, count in overlaps(sources, targets)
    }
    assert handed == expected


# What waits for what


@few
@given(plans(), st.integers(1, 2))
def test_nothing_is_computed_before_its_input_has_arrived(
    problem: Problem, iterations: int
) -> None:
    timeline = simulated(problem, iterations)
    teams = len({stage.devices for stage in problem.plan.stages})
    # Between two teams that host several stages each, a span does not say which way it goes.
    assume(teams > 1 and not (teams == 2 < len(problem.plan.stages)))
    arrivals: dict[tuple[object, ...], float] = defaultdict(float)
    for span in timeline.spans:
        if span.kind is SpanKind.TRANSFER:
            key = (span.where.split(">")[1], span.stage, span.micro_batch, span.iteration)
            arrivals[key] = max(arrivals[key], span.end)
    last = len(problem.plan.stages) - 1
    for span in timeline.spans:
        if (
            span.kind.is_communication
            or span.stage is None
            or span.kind is SpanKind.WEIGHT_GRADIENT
        ):
            continue
        before = span.stage - 1 if span.kind is SpanKind.FORWARD else span.stage + 1
        if 0 <= before <= last and span.where not in problem.plan.stages[before].devices:
            assert span.start >= arrivals[span.where, before, span.micro_batch, span.iteration] > 0


@few
@given(plans(), st.integers(1, 2))
def test_gradients_are_summed_after_the_last_backward_and_before_the_update(
    problem: Problem, iterations: int
) -> None:
    timeline = simulated(problem, iterations)
    backwards = (SpanKind.BACKWARD, SpanKind.WEIGHT_GRADIENT)
    for iteration, (index, stage) in itertools.product(
        range(iterations), enumerate(problem.plan.stages)
    ):
        spans = [span for span in timeline.spans if span.iteration == iteration]
        done = max(span.end for span in spans if span.kind in backwards and span.stage == index)
        updates = [s.start for s in spans if s.kind is SpanKind.UPDATE and s.where in stage.devices]
        assert len(updates) == len(stage.devices)
        sums = [
            s
            for s in spans
            if s.kind is SpanKind.COLLECTIVE and s.micro_batch is None and s.stage == index
        ]
        assert bool(sums) >= (len(stage.replicas) > 1)
        for span in sums:
            assert done <= span.start
            assert span.end <= min(updates)


def replicated(cluster: Cluster, replicas: tuple[Replica, ...], layer: Layer) -> Timeline:
    chain = Chain(name="one", layers=(layer,), sequence_length=1, dtype=Dtype.BF16)
    samples = sum(replica.samples for replica in replicas)
    plan = Plan(
        model=ModelRef(name=chain.name, sequence_length=1, dtype=chain.dtype),
        cluster=ClusterRef.of(cluster),
        global_batch=samples,
        micro_batch_size=samples,
        num_micro_batches=1,
        schedule=ScheduleSpec(),
        stages=(Stage(first=0, end=1, replicas=replicas),),
    )
    return simulated(Problem(plan=plan, chain=chain, cluster=cluster))


LAYER = Layer(
    name="only",
    kind="block",
    forward_flop=1e12,
    backward_flop=2e12,
    parameters=3 * 10**8,
    activation_bytes=1e9,
    output_bytes=1e9,
    reduced_bytes=4e8,
    max_tensor_width=4,
)


def test_an_all_reduce_moves_twice_all_parts_but_ones_own_and_pays_as_many_latencies() -> None:
    """3 replicas, 600 MB of gradients: 2 x 2/3 x 0.6 s at 1 GB/s, and 2 x 2 rounds over two NICs of
    10 ms."""
    nic = {"bandwidth": "1 GB/s", "latency": "10 ms"}
    cluster = cluster_of({"name": "three", "nodes": [{**HOST, "count": 3, "nic": nic}]})
    replicas = tuple(Replica(devices=(f"a{index}.0",), samples=1) for index in range(3))
    timeline = replicated(cluster, replicas, LAYER)
    sums = [span for span in timeline.spans if span.kind is SpanKind.COLLECTIVE]
    assert [(span.bytes, round(span.seconds, 9)) for span in sums] == [(8e8, 0.88)] * 3


def test_a_tensor_group_reduces_once_forward_and_once_backward() -> None:
    """4 devices, 800 MB for 2 samples: 2 x 3/4 x 0.8 s at 1 GB/s, and 2 x 3 rounds of 10 ms."""
    media = [{"medium": "nvlink", "bandwidth": "1 GB/s", "latency": "10 ms"}]
    devices = {"kind": "A100-80GB", "count": 4}
    cluster = cluster_of({"name": "four", "nodes": [{**HOST, "devices": devices, "intra": media}]})
    group = Replica(devices=tuple(f"a0.{index}" for index in range(4)), samples=2)
    timeline = replicated(cluster, (group,), LAYER)
    sums = [span for span in timeline.spans if span.kind is SpanKind.COLLECTIVE]
    assert [(span.bytes, round(span.seconds, 9)) for span in sums] == [(1.2e9, 1.26)] * 8


def test_sharded_weights_are_gathered_before_anything_is_computed() -> None:
    """An iteration that begins on the network begins at 0 all the same."""
    cluster = cluster_of(
        {"name": "pair", "nodes": [{**HOST, "count": 2, "nic": {"bandwidth": "1 GB/s"}}]}
    )
    layer = replace(LAYER, parameters=10**9)
    chain = Chain(name="one", layers=(layer,), sequence_length=1, dtype=Dtype.BF16)
    replicas = tuple(Replica(devices=(f"a{index}.0",), samples=1) for index in range(2))
    plan = Plan(
        model=ModelRef(name=chain.name, sequence_length=1, dtype=chain.dtype),
        cluster=ClusterRef.of(cluster),
        global_batch=2,
        micro_batch_size=2,
        num_micro_batches=1,
        schedule=ScheduleSpec(kind=ScheduleKind.GPIPE),
        stages=(Stage(first=0, end=1, replicas=replicas, zero=3),),
    )
    timeline = simulated(Problem(plan=plan, chain=chain, cluster=cluster), iterations=2)
    assert timeline.stalled is None
    first = min(timeline.spans, key=lambda span: span.start)
    assert (first.kind, first.start) == (SpanKind.COLLECTIVE, 0.0)
    assert first.bytes == 1e9  # of the 2 GB of weights, the half that the other device has


# What is written down


@few
@given(plans(), st.integers(1, 2))
def test_the_critical_path_is_contiguous_from_0_to_the_end(
    problem: Problem, iterations: int
) -> None:
    """A span starts when the one it waited for ends; on a channel, when the last byte before it has
    left; where edges conflict, later."""
    timeline = simulated(problem, iterations)
    path = timeline.critical_path()
    assert path[-1].end == timeline.end == timeline.iteration_ends[-1]
    assert path[0].start == 0
    for earlier, later in itertools.pairwise(path):
        if later.start < earlier.end:
            event("behind another on a channel")
            assert earlier.where == later.where
            assert earlier.start <= later.start
        elif later.start > earlier.end:
            event("waited for a conflict")
            assert later.kind.is_communication
            assert problem.cluster.conflicts
    assert sum(critical_shares(timeline).values()) == pytest.approx(timeline.end, rel=1e-9)


@few
@given(pipelines())
def test_the_critical_path_of_a_pipeline_has_no_gap_even_with_empty_messages(
    pipeline: Pipeline,
) -> None:
    timeline = simulate_exact(pipeline.graph, pipeline.cluster, iterations=2)
    path = timeline.critical_path()
    assert path[0].start == 0
    assert path[-1].end == timeline.end
    for earlier, later in itertools.pairwise(path):
        assert later.start == earlier.end or earlier.where == later.where


def test_a_collective_of_one_device_leaves_no_gap_in_the_critical_path() -> None:
    """It has no flows and no span; what follows waited for what came before it."""
    tasks = (
        Task(kind=SpanKind.BACKWARD, device=0, seconds=2),
        Task(kind=SpanKind.COLLECTIVE, after=(0,)),
        Task(kind=SpanKind.UPDATE, device=0, seconds=1, after=(1,)),
    )
    path = simulate_exact(TaskGraph(devices=("n0.0",), tasks=tasks), full_mesh(1)).critical_path()
    assert [(span.start, span.end) for span in path] == [(0, 2), (2, 3)]


@few
@given(plans(), st.integers(1, 2))
def test_the_same_input_gives_the_same_bytes(problem: Problem, iterations: int) -> None:
    again = replace(problem, cluster=replace(problem.cluster))
    assert dumps_timeline(simulated(problem, iterations)) == dumps_timeline(
        simulated(again, iterations)
    )


def test_the_same_input_gives_the_same_bytes_whatever_the_hash_seed() -> None:
    program = """
from argosy.cluster.file import load_cluster
from argosy.schedule import ScheduleSpec, build_schedule
from argosy.sim.engine.exact import simulate_exact
from benchmarks.bare_pipeline import StageCost, pipeline_graph
from argosy.timeline.file import dumps_timeline
cluster = load_cluster("mixed-16")
names = [device.name for device in cluster.devices]
cost = StageCost(forward=1e-3, backward=2e-3, output_bytes=4e6, activation_bytes=1)
graph = pipeline_graph(build_schedule(ScheduleSpec(), 16, 8), [cost] * 16, names[::3] + names[1::3] + names[2::3])
print(dumps_timeline(simulate_exact(graph, cluster, iterations=2)))
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1


@few
@given(plans(), st.integers(1, 2))
def test_a_timeline_reads_back_as_it_was_written(problem: Problem, iterations: int) -> None:
    timeline = simulated(problem, iterations)
    assert loads_timeline(dumps_timeline(timeline)) == timeline
