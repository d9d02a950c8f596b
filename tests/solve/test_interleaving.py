"""Interleaved variants: valid, played by the exact engine, taken only where they are faster or
asked for alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from argosy.cluster.file import load_cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.check import check_plan
from argosy.plan.file import load_plan
from argosy.plan.plan import Certificate, Predicted
from argosy.planner import SCHEDULES, Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import simulate
from argosy.solve.finalists.interleave import chunked_bound, with_interleaved
from argosy.space.pool import able_pools
from argosy.space.price import Prices
from argosy.workload.load import load_model

WOVEN = tuple(ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=chunks) for chunks in (2, 4))
V_SHAPED = tuple(
    ScheduleSpec(kind=kind) for kind in (ScheduleKind.ZERO_BUBBLE_V, ScheduleKind.DUALPIPE_V)
)


@pytest.mark.parametrize("asked", [WOVEN, V_SHAPED], ids=["interleaved", "v-shaped"])
def test_a_plan_of_several_chunks_is_valid_and_takes_what_it_says(
    asked: tuple[ScheduleSpec, ...],
) -> None:
    chain, cluster = (
        load_model("gpt2-medium", sequence_length=512, dtype="fp16"),
        load_cluster("mixed-8"),
    )
    plan = find_plan(chain, cluster, global_batch=16, settings=Settings(schedules=asked))
    assert plan.schedule in asked and plan.predicted is not None and plan.certificate is not None
    check_plan(plan, chain, cluster)
    timeline = simulate(plan, chain, cluster)
    assert timeline.iteration_ends[0] == pytest.approx(plan.predicted.iteration_seconds, rel=1e-9)
    room = {device.name: device.kind.memory for device in cluster.devices}
    assert all(peak <= room[name] for name, peak in timeline.peak_memory().items())
    assert plan.certificate.lower_bound_seconds <= plan.predicted.iteration_seconds


def test_among_others_the_fastest_wins() -> None:
    chain, cluster = (
        load_model("gpt2-medium", sequence_length=512, dtype="fp16"),
        load_cluster("mixed-8"),
    )

    def seconds(schedules: tuple[ScheduleSpec, ...]) -> float:
        plan = find_plan(chain, cluster, global_batch=16, settings=Settings(schedules=schedules))
        assert plan.predicted is not None
        return plan.predicted.iteration_seconds

    both, alone, plain = seconds((*SCHEDULES, *WOVEN)), seconds(WOVEN), seconds(SCHEDULES)
    assert both <= plain and both <= max(alone, plain)


def test_what_cannot_be_interleaved_is_refused() -> None:
    chain = load_model("gpt2", sequence_length=512, dtype="fp16")
    obstacle = r"no interleaved variant .* works: 1 micro-batch, which 2 stages"
    with pytest.raises(InfeasibleError, match=obstacle):
        find_plan(
            chain,
            load_cluster("two-cards"),
            global_batch=1,
            settings=replace(Settings(), schedules=WOVEN),
        )


@pytest.mark.parametrize("batch", [32, 48])
def test_even_shares_are_kept_by_interleaved_plans(batch: int) -> None:
    """The best even plan has one stage; that of another number of replicas can be interleaved."""
    chain, cluster = (
        load_model("gpt2-medium", sequence_length=512, dtype="fp16"),
        load_cluster("mixed-8"),
    )
    plan = find_plan(
        chain, cluster, global_batch=batch, settings=Settings(schedules=WOVEN, even_shares=True)
    )
    check_plan(plan, chain, cluster)
    assert plan.schedule in WOVEN
    assert len({replica.samples for stage in plan.stages for replica in stage.replicas}) == 1


def test_a_plan_that_no_variant_beats_stays_as_it_is() -> None:
    """One stage has none; among other schedules it is the answer."""
    chain, cluster = (
        load_model("gpt2", sequence_length=512, dtype="fp16"),
        load_cluster("two-cards"),
    )
    asked = Settings(schedules=(ScheduleSpec(), *WOVEN))
    plain = find_plan(
        chain, cluster, global_batch=1, settings=Settings(schedules=(ScheduleSpec(),))
    )
    found = find_plan(chain, cluster, global_batch=1, settings=asked)
    assert (found.stages, found.schedule, found.predicted) == (
        plain.stages,
        plain.schedule,
        plain.predicted,
    )


def test_variants_that_take_too_long_to_play_are_said_to() -> None:
    plan = load_plan("gpt2-xl-on-two-cards")
    chain, cluster = load_model("gpt2-xl", dtype="fp16"), load_cluster("two-cards")
    certificate = Certificate(
        lower_bound_seconds=1.0, gap=0.0, granularity=1, scope="", free_bound_seconds=1.0
    )
    predicted = Predicted(
        iteration_seconds=1.0, samples_per_second=1.0, peak_memory_bytes=(), bottleneck=""
    )
    plan = replace(plan, certificate=certificate, predicted=predicted)
    long = replace(plan, num_micro_batches=5_000)
    with pytest.raises(
        InfeasibleError, match=r"works: too many devices and micro-batches to play \(1\)"
    ):
        with_interleaved(plan, [long], WOVEN[:1], chain, cluster, ComputeModel(), must_be=True)


@pytest.mark.parametrize(
    ("spec", "lost"), [(WOVEN[0], 0.0), (V_SHAPED[0], 0.03)], ids=["interleaved", "v-shaped"]
)
def test_no_cut_of_a_tiny_problem_is_faster_than_the_bound(spec: ScheduleSpec, lost: float) -> None:
    """The exact engine plays every cut of the layers into the pieces of the plan, or 200 of them
    if there are more; single moves end within ``lost`` of the fastest."""
    chain, cluster = (
        load_model("gpt2", sequence_length=128, dtype="fp16"),
        load_cluster("two-cards"),
    )
    plan = find_plan(chain, cluster, global_batch=2, settings=Settings(schedules=(spec,)))
    assert plan.certificate is not None and plan.predicted is not None
    assert f"all plans under {spec!r}" in plan.certificate.scope
    pools = able_pools(chain, cluster, ComputeModel())
    bound = chunked_bound((spec,), 2, Prices(chain, pools, ComputeModel()))
    every = list(itertools.combinations(range(1, len(chain.layers)), len(plan.stages) - 1))
    times = []
    for cuts in every if len(every) < 300 else random.Random(0).sample(every, 200):
        ranges = itertools.pairwise((0, *cuts, len(chain.layers)))
        stages = tuple(
            replace(stage, first=first, end=end)
            for stage, (first, end) in zip(plan.stages, ranges, strict=True)
        )
        timeline = simulate(replace(plan.bare, stages=stages), chain, cluster)
        times.append(timeline.iteration_ends[0])
    assert 0 < bound <= plan.certificate.lower_bound_seconds <= min(times)
    assert plan.predicted.iteration_seconds <= min(times) * (1 + lost + 1e-9)


def test_uneven_chunks_are_found_where_they_are_faster() -> None:
    """Equal chunks of the best plan take 3.5 % longer: the last piece has the output layer."""
    chain, cluster = (
        load_model("gpt2-medium", sequence_length=512, dtype="fp16"),
        load_cluster("mixed-8"),
    )
    plan = find_plan(chain, cluster, global_batch=16, settings=Settings(schedules=WOVEN))
    assert plan.predicted is not None
    workers = len(plan.stages) // plan.schedule.stages_per_worker
    sums = [
        [stage.end - stage.first for stage in plan.stages[worker::workers]]
        for worker in range(workers)
    ]
    assert any(max(lengths) - min(lengths) > 1 for lengths in sums)
