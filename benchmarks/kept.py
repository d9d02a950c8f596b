"""What ranking kept plans again costs after an edge has changed."""

from __future__ import annotations

from dataclasses import replace

from argosy.choose.kept import keep
from argosy.cluster.file import load_cluster, with_changes
from argosy.cost.compute import ComputeModel
from argosy.plan.plan import Plan
from argosy.planner import SCHEDULES, Settings, kept_plans
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import iteration_seconds
from argosy.workload.load import load_model
from benchmarks.registry import Benchmark, Row, cpu_seconds

PLANS = 300
EDGE = "new0.nic"
VARIANTS = (*SCHEDULES, *(ScheduleSpec(kind=ScheduleKind.KFKB, k=k) for k in (3, 5, 6, 8)))


def measure() -> list[Row]:
    chain = load_model("gpt2-medium", sequence_length=512, dtype="fp16")
    cluster = with_changes(load_cluster("mixed-8"), [])
    found: list[Plan] = []
    for batch in (16, 24, 32, 48, 64, 96):
        found += kept_plans(
            chain, cluster, global_batch=batch, settings=Settings(level=1), model=ComputeModel()
        )
    plans = [replace(plan, schedule=schedule) for plan in found for schedule in VARIANTS]
    plans = [plan for plan in plans if plan.schedule.k <= plan.num_micro_batches][:PLANS]
    kept = keep(plans, chain, cluster, EDGE)
    bandwidth = kept.high / 20
    seconds = cpu_seconds(lambda: kept.ranking(bandwidth), repeats=50)
    slow = cpu_seconds(lambda: iteration_seconds(plans[0], chain, cluster), repeats=3)
    return [
        Row(what="kept plans", value=len(plans), unit="plans", target=">= 300"),
        Row(what="lines per plan", value=kept.slopes.shape[1], unit="lines"),
        Row(
            what="ranking all again after a change", value=1e3 * seconds, unit="ms", target="<= 10"
        ),
        Row(
            what="exact engine, one plan at a time, over that",
            value=len(plans) * slow / seconds,
            unit="x",
        ),
    ]


BENCHMARK = Benchmark(
    name="kept", shows="re-ranking of kept plans when an edge changes", measure=measure
)
