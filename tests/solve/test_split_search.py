"""Sequences in parts and experts over holders in the search: every plan, bounds that hold, and the
best of all."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
from support.planning_cases import (
    FOLDED,
    Case,
    Options,
    Recipe,
    best_of_all,
    complete_plans,
    found_best,
    random_case,
)

from argosy.plan.check import check_plan
from argosy.plan.plan import Recompute
from argosy.planner import Settings
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.fold import fold_plan
from argosy.sim.simulate import simulate
from argosy.solve.finalists.judge import Complete
from argosy.solve.search.shape import Shape
from argosy.space.rate import throughput_bound

MOST_PLANS = 3000
SOME = {"recompute": (Recompute.NONE, Recompute.FULL), "zero": (1, 3)}
PARTS = Recipe(max_devices=8, max_pools=2, max_layers=3, batches=(1, 2, 4), parts=True)
EXPERTS = Recipe(max_devices=8, max_pools=2, max_layers=3, batches=(2, 4), experts=True)
BOTH = Recipe(max_devices=4, max_pools=1, max_layers=3, batches=(1, 2, 4), parts=True, experts=True)
RECIPES = (PARTS, EXPERTS, BOTH)


def drawn(seed: int) -> tuple[Case, Shape, Options, list[Complete]] | None:
    random = Random(seed)
    case = random_case(seed, RECIPES[seed % len(RECIPES)])
    shape = random.choice(case.shapes)
    options = case.options(shape.micro_batch_size, case.scope(prune=False, **SOME))
    plans = list(itertools.islice(complete_plans(case, shape, options), MOST_PLANS + 1))
    return (case, shape, options, plans) if 0 < len(plans) <= MOST_PLANS else None


def splits(plan: Complete) -> set[tuple[int, int]]:
    return {(choice.option.context, choice.option.expert) for choice in plan}


@pytest.mark.parametrize("block", range(3))
def test_bounds_hold_for_every_plan_judged_and_played(block: int) -> None:
    compared = played = 0
    seen: set[tuple[int, int]] = set()
    for seed in range(block * 25, block * 25 + 25):
        case_of = drawn(seed)
        if case_of is None:
            continue
        case, shape, options, plans = case_of
        least = shape.num_micro_batches * throughput_bound(case.prices, shape.micro_batch_size)
        search = case.search(shape, options)
        found = list(iter(lambda search=search: search.next_plan(math.inf), None))
        judged = case.seconds(shape, [plan for _, plan in found])
        assert sum(seconds < math.inf for seconds in judged) == len(plans)
        compared += 1
        for (bound, _), seconds in zip(found, judged, strict=True):
            assert bound <= seconds * (1 + 1e-9), seed
        for (bound, plan), seconds in list(zip(found, judged, strict=True))[
            :: max(1, len(found) // 12)
        ]:
            if math.isinf(seconds):
                continue
            seen |= splits(plan)
            placed = case.placed(shape, plan)
            check_plan(placed, case.chain, case.cluster)
            (end,) = simulate(placed, case.chain, case.cluster, model=case.model).iteration_ends
            assert least <= end * (1 + 1e-9), seed
            assert bound <= end * (1 + 1e-9), (seed, plan)
            played += 1
    assert compared >= 8
    assert played >= 40
    assert {context for context, _ in seen} >= {1, 2}
    assert {expert for _, expert in seen} >= {1, 2}


@pytest.mark.parametrize("block", range(3))
def test_the_planner_finds_the_best_of_all(block: int) -> None:
    compared = split = 0
    for seed in range(500 + block * 20, 520 + block * 20):
        case = random_case(seed, RECIPES[seed % len(RECIPES)])
        everything = best_of_all(case, case.scope(prune=False), 2 * MOST_PLANS)
        if everything is None or math.isinf(everything[0]):
            continue
        settings = Settings(level=2, gap=0, units=case.ones, schedules=case.schedules)
        plan, ours = found_best(case, settings)
        assert plan is not None, seed
        check_plan(plan, case.chain, case.cluster)
        assert ours == pytest.approx(everything[0], rel=FOLDED), seed
        assert plan.certificate is not None
        assert plan.certificate.lower_bound_seconds <= everything[0] * (1 + 1e-8), seed
        split += any(stage.context > 1 or stage.expert > 1 for stage in plan.stages)
        compared += 1
    assert compared >= 6
    assert split >= 2


def test_whole_and_folded_plans_of_a_search_agree_within_a_few_percent() -> None:
    ratios = []
    for seed in range(40):
        case_of = drawn(seed)
        if case_of is None:
            continue
        case, shape, _, plans = case_of
        for plan in plans[:: max(1, len(plans) // 4)]:
            placed = case.placed(shape, plan)
            (whole,) = simulate(placed, case.chain, case.cluster, model=case.model).iteration_ends
            (folded,) = simulate_exact(
                *fold_plan(placed, case.chain, case.cluster, case.model)
            ).iteration_ends
            ratios.append(folded / whole)
    assert len(ratios) >= 100
    assert min(ratios) >= 0.95 and max(ratios) <= 1.01
