"""A search that keeps to what the runtime executes finds only such plans, and never a faster one
than without."""

from __future__ import annotations

import pytest
from support.planning_cases import Recipe, random_case

from argosy.cluster.file import load_cluster
from argosy.errors import InfeasibleError
from argosy.plan.runnable import unsupported
from argosy.planner import Settings, find_plan
from argosy.workload.load import load_model


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("cluster", ["two-cards", "mixed-16"])
def test_runnable_plans_run(cluster: str, level: int) -> None:
    settings = Settings(level=level, runnable=True, time_budget=2.0)
    chain = load_model("gpt2-xl", sequence_length=1024, dtype="fp16")
    plan = find_plan(chain, load_cluster(cluster), global_batch=64, settings=settings)
    assert unsupported(plan) == ()


def test_what_is_left_out_of_the_space_is_no_faster_without_it() -> None:
    """Exhaustive search of small cases: what a run can be moved to is at best as fast as the best,
    sometimes slower."""
    slower = 0
    for seed in range(24):
        case = random_case(seed, Recipe(max_devices=6, max_layers=4))
        free = Settings(level=2, gap=0, units=case.ones, schedules=case.schedules)
        kept = Settings(
            level=2, gap=0, units=case.ones, schedules=case.schedules, runnable=True, max_width=1
        )
        try:
            limited = find_plan(
                case.chain, case.cluster, global_batch=case.global_batch, settings=kept
            )
        except InfeasibleError:
            continue
        best = find_plan(case.chain, case.cluster, global_batch=case.global_batch, settings=free)
        assert unsupported(limited) == ()
        assert limited.predicted is not None and best.predicted is not None
        assert limited.certificate is not None and best.certificate is not None
        assert limited.certificate.lower_bound_seconds >= best.certificate.lower_bound_seconds * (
            1 - 1e-9
        )
        slower += limited.predicted.iteration_seconds > best.predicted.iteration_seconds * 1.01
    assert slower > 0
