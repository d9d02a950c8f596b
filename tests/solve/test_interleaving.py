"""Interleaved variants: valid, played by the exact engine, taken only where they are faster or
asked for alone."""

from __future__ import annotations

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
from argosy.solve.finalists.interleave import with_interleaved
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
    with pytest.raises(InfeasibleError, match=r"no interleaved variant .* works: one stage \(\d"):
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
