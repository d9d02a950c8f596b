"""GPipe's cuts against brute force; the rules of the Metis-like search, one by one."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from argosy.baselines import BASELINES, NoPlan, PlanningJob
from argosy.baselines.assemble import even_cuts, played
from argosy.baselines.metis import climbed, group_sizes, proportional_ends
from argosy.baselines.placement import placements
from argosy.cluster.file import load_cluster
from argosy.cluster.lasting import at_time_zero
from argosy.cost.compute import ComputeModel
from argosy.plan.plan import Plan, Recompute
from argosy.schedule import ScheduleKind
from argosy.workload.load import load_model


def job_of(cluster: str, model: str = "gpt2-medium", batch: int = 32) -> PlanningJob:
    chain = load_model(model, sequence_length=512, dtype="fp16")
    return PlanningJob(
        chain=chain,
        cluster=at_time_zero(load_cluster(cluster)),
        global_batch=batch,
        model=ComputeModel(),
    )


def test_gpipe_cuts_equal_work_and_runs_all_forwards_first() -> None:
    job = job_of("mixed-8")
    plan = BASELINES["gpipe"](job)
    assert isinstance(plan, Plan)
    assert plan.schedule.kind is ScheduleKind.GPIPE
    times = [sum(pair) for pair in job.layer_times(job.usual, job.typical_samples)]
    if len(plan.stages) <= 4:
        cuts = itertools.combinations(range(1, len(times)), len(plan.stages) - 1)
        best = min(
            max(sum(times[a:b]) for a, b in itertools.pairwise((0, *cut, len(times))))
            for cut in cuts
        )
        assert max(sum(times[s.first : s.end]) for s in plan.stages) == pytest.approx(best)


def test_gpipe_recomputes_where_memory_asks_for_it() -> None:
    plan = BASELINES["gpipe"](job_of("two-cards", "gpt2-xl"))
    assert isinstance(plan, Plan)
    assert all(stage.recompute is Recompute.FULL for stage in plan.stages)


def test_group_sizes_are_powers_of_two_that_sum_up() -> None:
    for count in (1, 4, 6, 16, 48):
        found = list(group_sizes(count, 8))
        assert len(found) == len(set(found))
        for sizes in found:
            assert sum(sizes) == count and len(sizes) <= 8
            assert all(
                size & (size - 1) == 0 and size >= 0.5 * count / len(sizes) for size in sizes
            )


@pytest.mark.parametrize("seed", range(20))
def test_climbing_ends_where_no_single_move_helps(seed: int) -> None:
    rng = random.Random(seed)
    work = [rng.uniform(0.5, 2) for _ in range(rng.randrange(6, 14))]
    capacity = [rng.uniform(0.5, 3) for _ in range(rng.randrange(1, 6))]

    def slowest(ends: list[int]) -> float:
        pairs = zip(itertools.pairwise((0, *ends)), capacity, strict=True)
        return max(sum(work[first:end]) / share for (first, end), share in pairs)

    start = proportional_ends(work, capacity)
    assert start[-1] == len(work) and sorted(set(start)) == start
    ends = climbed([*start], work, capacity)
    assert slowest(ends) <= slowest(start)
    for at, step in itertools.product(range(len(ends) - 1), (-1, 1)):
        other = [*ends]
        other[at] += step
        if sorted({0, *other}) == [0, *other]:
            assert slowest(other) >= slowest(ends) * (1 - 1e-9)


def test_metis_like_gives_fast_devices_more_and_beats_the_even_plan() -> None:
    job = job_of("mixed-8", "gpt2-xl")
    uneven, even = BASELINES["metis-like"](job), BASELINES["megatron"](job)
    assert isinstance(uneven, Plan) and isinstance(even, Plan)
    assert played(job, uneven) < 0.9 * played(job, even)
    layers = {"RTX-A6000": 0, "RTX-2080Ti": 0}
    for stage in uneven.stages:
        for name in stage.devices:
            layers[job.device(name).kind.name] += (stage.end - stage.first) / len(stage.devices)
    assert layers["RTX-A6000"] > layers["RTX-2080Ti"]


def test_metis_like_groups_are_equal_devices_of_one_node() -> None:
    plan = BASELINES["metis-like"](job_of("mixed-16", "gpt2-xl"))
    assert isinstance(plan, Plan)
    for stage in plan.stages:
        assert len(stage.devices) & (len(stage.devices) - 1) == 0
        for replica in stage.replicas:
            assert len({name.partition(".")[0] for name in replica.devices}) == 1


def test_even_cuts_survive_more_stages_than_blocks() -> None:
    job = job_of("mixed-8", "gpt2")  # 12 blocks
    assert [end - first for first, end in even_cuts(job, 14)] == [1] * 14


@pytest.mark.parametrize("name", ["dapple", "pipedream", "gpipe"])
def test_a_sample_that_cannot_be_shared_out_by_so_many_devices_is_no_plan(name: str) -> None:
    found = BASELINES[name](job_of("mixed-16", "gpt2", batch=1))
    assert isinstance(found, NoPlan) and re.fullmatch(
        r"no way to cut 1 sample over (its )?16 devices", found.reason
    )


def test_placements_of_more_devices_than_are_left_are_none() -> None:
    assert placements((2, 2), (1, 2), 2) == []
