"""On every bundled cluster a plan comes out that makes sense, fits, and is no slower than the best
even split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from argosy.cluster.file import bundled_clusters, load_cluster
from argosy.cluster.lasting import at_time_zero
from argosy.cluster.topology import Cluster
from argosy.cost.planned import planned_memory
from argosy.errors import InputError
from argosy.plan.check import check_plan
from argosy.plan.plan import Plan, Replica, Stage
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.fold import fold_plan
from argosy.sim.simulate import simulate
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

BATCH = 32
LARGE = 48
"""Devices; beyond, a plan is played folded only, and its memory is taken in closed form."""
CLUSTERS = [
    pytest.param(
        name, marks=pytest.mark.exhaustive if len(load_cluster(name).devices) > 128 else ()
    )
    for name in bundled_clusters()
]


@pytest.fixture(scope="module")
def chain() -> Chain:
    return load_model("gpt2-medium", sequence_length=512, dtype="fp16")


def even_plans(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Plan]:
    """What somebody who takes all devices for equal would try: equal stages of equal replicas of
    one width."""
    devices = [device.name for device in cluster.devices]
    layers = len(chain.layers)
    for stages, width in itertools.product((1, 2, 4, 8), (1, 2, 4)):
        per_stage = len(devices) // stages
        if len(devices) % stages or per_stage % width or stages > layers:
            continue
        replicas = per_stage // width
        for count in (1, 2, 4, 8, 16):
            size = plan.global_batch // count
            if size % replicas:
                continue
            cuts = [round(layers * stage / stages) for stage in range(stages + 1)]
            groups = [
                tuple(
                    Replica(devices=tuple(devices[at : at + width]), samples=size // replicas)
                    for at in range(stage * per_stage, (stage + 1) * per_stage, width)
                )
                for stage in range(stages)
            ]
            yield Plan(
                model=plan.model,
                cluster=plan.cluster,
                global_batch=plan.global_batch,
                micro_batch_size=size,
                num_micro_batches=count,
                schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
                stages=tuple(
                    Stage(first=first, end=end, replicas=group, zero=1 if replicas > 1 else 0)
                    for (first, end), group in zip(itertools.pairwise(cuts), groups, strict=True)
                ),
            )


def folded_seconds(plan: Plan, chain: Chain, cluster: Cluster) -> float:
    graph, folded = fold_plan(plan, chain, cluster)
    return simulate_exact(graph, folded, record=0).iteration_ends[0]


@pytest.mark.parametrize("name", CLUSTERS)
def test_plans_make_sense_fit_and_beat_the_even_split(name: str, chain: Chain) -> None:
    cluster = at_time_zero(load_cluster(name))
    plan = find_plan(chain, cluster, global_batch=max(BATCH, len(cluster.devices)))
    check_plan(plan, chain, cluster)
    is_large = len(cluster.devices) > LARGE
    peaks = (
        planned_memory(plan, chain) if is_large else simulate(plan, chain, cluster).peak_memory()
    )
    assert all(held <= cluster.device(device).kind.memory for device, held in peaks.items())
    best = float("inf")
    for even in even_plans(plan, chain, cluster):
        try:
            check_plan(even, chain, cluster)
        except InputError:
            continue
        best = min(best, folded_seconds(even, chain, cluster))
    assert folded_seconds(plan, chain, cluster) <= best * 1.001 < float("inf")


def test_any_number_of_workers_finds_the_same_plan(chain: Chain) -> None:
    cluster, settings = load_cluster("mixed-16"), Settings(level=2, units=(4, 4), gap=0.3)
    alone = find_plan(chain, cluster, global_batch=BATCH, settings=settings)
    with ProcessPoolExecutor(2) as executor:
        together = find_plan(
            chain, cluster, global_batch=BATCH, settings=replace(settings, executor=executor)
        )
    assert replace(together, search=None) == replace(alone, search=None)
