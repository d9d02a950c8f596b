"""Plans whose first stages are frozen: no backward, no gradients sent back, and the same time in
every engine."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.document import Document
from argosy.plan.check import check_plan
from argosy.plan.file import dumps_plan, loads_plan
from argosy.plan.model import planned_chain
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.fold import fold_plan
from argosy.sim.folded import folded_seconds
from argosy.sim.tasks.compile import compile_plan
from argosy.timeline import Span, SpanKind
from argosy.workload.chain import Chain
from argosy.workload.load import load_model
from argosy.workload.tuning import parse_tuning

KINDS = ("RTX-3090", "RTX-4070", "RTX-3060")


def cluster_of(count: int = 3, bandwidth: str = "1 Gbit/s") -> Cluster:
    nodes = [
        {
            "name": f"n{at}",
            "devices": [{"kind": kind}],
            "nic": {"bandwidth": bandwidth, "latency": "0.2 ms"},
        }
        for at, kind in enumerate(KINDS[:count])
    ]
    return build_cluster(Document("home", {"name": "home", "nodes": nodes}, {}), folder=Path())


def chain_of(*freeze: str) -> Chain:
    return load_model("gpt2", sequence_length=256, dtype="fp16", tuning=parse_tuning(freeze=freeze))


def plan_of(
    chain: Chain, cluster: Cluster, ends: tuple[int, ...], spec: ScheduleSpec, count: int = 6
) -> Plan:
    names = [device.name for device in cluster.devices]
    bounds = itertools.pairwise((0, *ends))
    return Plan(
        model=ModelRef.of(chain),
        cluster=ClusterRef.of(cluster),
        global_batch=2 * count,
        micro_batch_size=2,
        num_micro_batches=count,
        schedule=spec,
        stages=tuple(
            Stage(first=first, end=end, replicas=(Replica(devices=(names[at],), samples=2),))
            for at, (first, end) in enumerate(bounds)
        ),
    )


SPECS = [
    ScheduleSpec(),
    ScheduleSpec(kind=ScheduleKind.EAGER),
    ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
    ScheduleSpec(kind=ScheduleKind.GPIPE),
    ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE),
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("ends", [(5, 10, 14), (3, 6, 14), (2, 11, 14)])
def test_frozen_stages_send_nothing_back_in_any_engine(
    spec: ScheduleSpec, ends: tuple[int, ...]
) -> None:
    """The first seven layers are frozen: stages that end there have no backward, and the next one
    sends nothing."""
    chain, cluster = chain_of("embedding", "block.[0-5]"), cluster_of()
    assert chain.first_backward == 7
    plan = plan_of(chain, cluster, ends, spec)
    check_plan(plan, chain, cluster)
    timeline = simulate_exact(compile_plan(plan, chain, cluster), cluster)
    kinds = (SpanKind.BACKWARD, SpanKind.INPUT_GRADIENT, SpanKind.WEIGHT_GRADIENT)
    with_backward = {span.stage for span in timeline.spans if span.kind in kinds}
    assert with_backward == {at for at, end in enumerate(ends) if end > 7}
    back = {
        span.stage
        for span in timeline.spans
        if span.kind is SpanKind.TRANSFER and _goes_back(span, plan)
    }
    assert back == {at for at in (1, 2) if ends[at - 1] > 7}
    seconds = timeline.iteration_seconds[0]
    graph, folded = fold_plan(plan, chain, cluster)
    assert simulate_exact(graph, folded).iteration_seconds[0] == pytest.approx(seconds, rel=1e-9)
    assert folded_seconds(plan, chain, cluster) == pytest.approx(seconds, rel=1e-9)
    trained = load_model("gpt2", sequence_length=256, dtype="fp16")
    whole = simulate_exact(
        compile_plan(replace(plan, model=ModelRef.of(trained)), trained, cluster), cluster
    )
    assert seconds < whole.iteration_seconds[0]


def _goes_back(span: Span, plan: Plan) -> bool:
    """Whether a transfer leads to the stage before the one that sends it."""
    target = span.where.partition(">")[2]
    return bool(span.stage) and target in plan.stages[(span.stage or 0) - 1].devices


@pytest.mark.parametrize("bandwidth", ["100 Mbit/s", "10 Gbit/s"])
def test_the_planner_finds_the_best_cut_and_its_bound_holds(bandwidth: str) -> None:
    """Against all cuts in two stages, both ways round, in the exact engine."""
    chain, cluster = chain_of("embedding", "block.[0-5]"), cluster_of(2, bandwidth)
    settings = Settings(level=2, gap=0.0, schedules=(ScheduleSpec(),), time_budget=20)
    plan = find_plan(chain, cluster, global_batch=8, settings=settings)
    assert plan.predicted is not None and plan.certificate is not None
    turned = replace(cluster, devices=cluster.devices[::-1])
    plans = [
        plan_of(chain, where, (cut, 14), ScheduleSpec(), 4)
        for cut in range(1, 14)
        for where in (cluster, turned)
    ]
    best = min(
        simulate_exact(compile_plan(one, chain, cluster), cluster).iteration_seconds[0]
        for one in plans
    )
    assert plan.predicted.iteration_seconds <= best * (1 + 1e-9)
    assert plan.certificate.lower_bound_seconds <= plan.predicted.iteration_seconds * (1 + 1e-9)


def test_a_plan_carries_what_is_trained() -> None:
    chain = load_model(
        "gpt2", tuning=parse_tuning(lora="rank=8,targets=q,o", freeze=["block.0"], base="nf4")
    )
    plan = plan_of(chain, cluster_of(1), (14,), ScheduleSpec())
    again = loads_plan(dumps_plan(plan))
    assert again == plan
    assert planned_chain(again.model).layers == chain.layers
    assert "tuning" not in dumps_plan(replace(plan, model=ModelRef.of(load_model("gpt2"))))


def test_frozen_weights_are_neither_summed_nor_updated() -> None:
    """Two replicas of a LoRA model exchange adapters only; 4-bit weights cost time and save
    memory."""
    cluster, model = cluster_of(2), ComputeModel()
    options = ({}, {"lora": ""}, {"lora": "", "base": "nf4"})
    sums, seconds, memory = [], [], []
    for option in options:
        chain = load_model("gpt2", sequence_length=256, dtype="fp16", tuning=parse_tuning(**option))  # type: ignore[arg-type]
        plan = plan_of(chain, cluster, (14,), ScheduleSpec())
        both = tuple(Replica(devices=(device.name,), samples=1) for device in cluster.devices)
        plan = replace(plan, stages=(replace(plan.stages[0], replicas=both),))
        timeline = simulate_exact(compile_plan(plan, chain, cluster, model), cluster)
        carried = [span for span in timeline.spans if span.kind is SpanKind.COLLECTIVE]
        sums.append(sum(span.end - span.start for span in carried))
        seconds.append(timeline.iteration_seconds[0])
        memory.append(max(peak for _, steps in timeline.memory for _, peak in steps))
    assert sums[1] < 0.02 * sums[0]
    assert seconds[1] < seconds[0] and seconds[1] < seconds[2]
    assert memory[2] < memory[1] < memory[0]
