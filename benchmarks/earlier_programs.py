"""Plans for programs that the planner before decision 44 made, beside today's, in one engine.

    python -m benchmarks earlier-programs

``earlier_plans.json`` has the plans of that planner (commit 7dbca6c, level 1) for the ten programs
of ``benchmarks.programs`` on its five clusters: the forward operations of every stage, the samples
of every replica, the ratios of every group. Here they are priced as today's plans are:

    (1)  Forward operations are sorted by their stages, which is an order in which they can run.
         Segments are those of today, cut at the ends of the stages, too.
    (2)  A group that shares no segment today (``max_tensor_width``) becomes replicas, with samples
         in proportion to its ratios; if it has fewer samples than devices, it stays a group whose
         collectives cost nothing, which favours the earlier plan.
    (3)  Where capturing makes other operations than it did then, stages end at the same share of
         the operations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from argosy.cluster.file import load_cluster
from argosy.cluster.lasting import at_time_zero, within_reach
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.planner import CapturedProgram, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.prediction import play_once
from argosy.solve.programs.tensor_segments import with_tensor_groups
from argosy.space.operations.segments import _Step
from argosy.space.operations.sharding import unit_counts
from argosy.workload.chain import Chain, captured_chain
from argosy.workload.graph import Graph
from argosy.workload.part import forward_order
from benchmarks.programs import programs
from benchmarks.registry import Benchmark, Row

_PLANS = Path(__file__).with_name("earlier_plans.json")


def stage_of_operations(stages: Sequence[Any], then: int, now: int) -> list[int]:
    """Return the stage of every forward operation, by (3)."""
    parts = [0] * then
    for index, stage in enumerate(stages):
        for first, end in stage["operations"]:
            parts[first:end] = [index] * (end - first)
    return [parts[min(then - 1, round(at * then / now))] for at in range(now)]


def _sorted(graph: Graph, parts: Sequence[int]) -> Graph:
    """Return the graph with forward operations in the order of their stages (1)."""
    ahead = forward_order(graph)
    order = sorted(range(len(ahead)), key=lambda at: (parts[at], at))
    nodes = list(graph.nodes)
    for place, source in zip(ahead, order, strict=True):
        nodes[place] = graph.nodes[ahead[source]]
    return replace(graph, nodes=tuple(nodes))


def _replicas(rows: Sequence[Any], widest: int) -> Iterator[Replica]:
    """Yield the replicas of a stage by (2)."""
    for devices, samples, ratios in rows:
        if 1 < len(devices) <= samples and widest < len(devices):
            counts = unit_counts(samples, ratios)
            for name, count in zip(devices, counts, strict=True):
                yield Replica(devices=(name,), samples=count)
        elif samples:
            shares = tuple(ratio / math.fsum(ratios) for ratio in ratios)
            yield Replica(devices=tuple(devices), samples=samples, ratios=shares)


def earlier_plan(
    program: CapturedProgram, cluster: Cluster, then: int, content: Any
) -> tuple[Plan, Chain]:
    """Return a plan of that planner, and the chain that it is a plan for."""
    stages, samples = content["stages"], program.samples
    parts = stage_of_operations(stages, then, len(forward_order(program.graph)))
    graph = program.graph if len(stages) == 1 else _sorted(program.graph, parts)
    last = [sum(part <= index for part in parts) for index in range(len(stages))]
    step = _Step(graph, forward_order(graph))
    ends = sorted({*step.ends(), *last})
    layers = tuple(step.layers(ends, samples))
    chain = captured_chain(graph.name, layers, program.chain.dtype, program.chain.optimizer, 0)
    widest = max(len(row[0]) for stage in stages for row in stage["replicas"])
    if widest > 1:
        chain = with_tensor_groups(chain, graph, samples, widest)
    bounds = [0, *(ends.index(end) + 1 for end in last)]
    planned = []
    for index, stage in enumerate(stages):
        first, end = bounds[index], bounds[index + 1]
        allowed = min(layer.max_tensor_width for layer in chain.layers[first:end])
        replicas = tuple(_replicas(stage["replicas"], allowed))
        planned.append(Stage(first=first, end=end, replicas=replicas))
    count = content["micro_batches"]
    plan = Plan(
        model=ModelRef.of(chain),
        cluster=ClusterRef.of(cluster),
        global_batch=samples,
        micro_batch_size=samples // count,
        num_micro_batches=count,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=tuple(planned),
    )
    return plan, chain


def measure() -> list[Row]:
    from argosy.runtime.sources.operations import capture_program

    rows, ratios = [], []
    for name, content in json.loads(_PLANS.read_text(encoding="utf-8")).items():
        program = capture_program(programs()[name], name=name)
        for cluster_name, stored in content["plans"].items():
            cluster = load_cluster(cluster_name)
            plan, chain = earlier_plan(program, cluster, content["operations"], stored)
            still = at_time_zero(within_reach(cluster))
            before = play_once(plan, chain, still, ComputeModel(), whole=True).seconds
            found = find_plan(program, cluster).predicted
            assert found is not None
            ratios.append(before / found.iteration_seconds)
            what = f"{name} on {cluster_name}"
            rows.append(Row(what=f"{what}: earlier plan", value=1e3 * before, unit="ms"))
            rows.append(
                Row(what=f"{what}: earlier over new", value=ratios[-1], unit="x", target=">= 1")
            )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    rows.append(Row(what="geometric mean", value=mean, unit="x", target=">= 1.15"))
    return rows


BENCHMARK = Benchmark(
    name="earlier-programs",
    shows="plans for programs beside those of the planner before",
    measure=measure,
)
