"""Chains of which two or three layers share a table of weights, in one stage or several: judged,
bounded and searched as the exact engine plays them, which sums the table's gradients once."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from support.planning_cases import (
    FOLDED,
    Case,
    Recipe,
    best_of_all,
    cluster_of,
    complete_plans,
    found_best,
    kind_fields,
    node_fields,
    random_case,
)

from argosy.dtype import Dtype
from argosy.plan.plan import Recompute
from argosy.planner import SCHEDULES, Settings
from argosy.sim.simulate import simulate
from argosy.sim.tasks.compile import compile_plan
from argosy.solve.finalists.judge import Complete
from argosy.solve.search.pipeline import PlanSearch
from argosy.solve.search.shape import Shape
from argosy.timeline.timeline import SpanKind
from argosy.workload.chain import Chain, Layer

ALONE = Recipe(max_devices=3, max_layers=5, wide=False, per_node=(1,), tight=False)
SEVERAL = Recipe(max_devices=4, max_layers=5)


def tied_case(seed: int, recipe: Recipe, most_users: int = 3) -> Case | None:
    """The last layer uses half of the first one's weights, and one or two between them may; None
    for short chains."""
    case, random = random_case(seed, recipe), Random(seed)
    first, *others = case.chain.layers
    if len(others) < 2:
        return None
    users = (
        {len(others) - 1, *random.sample(range(len(others)), 2)}
        if most_users > 1
        else {len(others) - 1}
    )
    shared = {"tied_to": 0, "tied_parameters": first.parameters // 2}
    layers = (
        first,
        *(replace(layer, **shared) if at in users else layer for at, layer in enumerate(others)),
    )
    return replace(case, chain=replace(case.chain, layers=layers))


def exact(case: Case, shape: Shape, plan: Complete) -> float:
    (end,) = simulate(
        case.placed(shape, plan), case.chain, case.cluster, model=case.model
    ).iteration_ends
    return end


def homes(case: Case, plan: Complete) -> set[int]:
    """The stages that hold the table."""
    layers = [0, *(at for at, layer in enumerate(case.chain.layers) if layer.tied_to == 0)]
    return {
        at
        for at, choice in enumerate(plan)
        for layer in layers
        if choice.first <= layer < choice.end
    }


@pytest.mark.parametrize("seed", range(60))
def test_plans_of_single_devices_sum_a_table_once_and_up_to_two_stages_are_judged_so(
    seed: int,
) -> None:
    """To 0.3 %: between two kinds of nodes the judge knows the longer latency only."""
    case = tied_case(seed, ALONE)
    if case is None:
        return
    shape = Random(seed).choice(case.shapes)
    options = case.options(shape.micro_batch_size, case.scope(zero=(0,)))
    for plan in itertools.islice(complete_plans(case, shape, options), 40):
        if any(choice.option.replicas > 1 for choice in plan):
            continue
        tasks = compile_plan(
            case.placed(shape, plan), case.chain, case.cluster, model=case.model
        ).tasks
        assert sum(task.kind is SpanKind.COLLECTIVE for task in tasks) == (
            len(homes(case, plan)) > 1
        )
        if len(plan) < 3:
            assert case.seconds(shape, [plan])[0] == pytest.approx(
                exact(case, shape, plan), rel=0.003
            )


@pytest.mark.parametrize("block", range(3))
def test_search_meets_every_plan_that_fits_and_its_bounds_hold(block: int) -> None:
    compared = 0
    for seed in range(block * 20, block * 20 + 20):
        case = tied_case(seed, SEVERAL)
        if case is None:
            continue
        shape = Random(seed).choice(case.shapes)
        options = case.options(shape.micro_batch_size, case.scope())
        plans = list(itertools.islice(complete_plans(case, shape, options), 3000))
        if not 0 < len(plans) < 3000:
            continue
        found = found_by(case.search(shape, options))
        judged = case.seconds(shape, [plan for _, plan in found])
        assert sum(seconds < math.inf for seconds in judged) == len(plans)
        assert all(
            bound <= seconds * (1 + 1e-9) for (bound, _), seconds in zip(found, judged, strict=True)
        )
        fitting = [one for one, seconds in zip(found, judged, strict=True) if seconds < math.inf]
        for bound, plan in Random(seed).sample(fitting, min(8, len(fitting))):
            assert bound <= exact(case, shape, plan) * (1 + 1e-9)
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("block", range(2))
def test_plans_divided_by_kind_and_by_the_site_of_their_last_stage_come_out_once_and_their_bounds_hold(
    block: int,
) -> None:
    """On two sites, where the ring of the table's holders passes the line between them."""
    recipe = Recipe(
        min_devices=4, max_devices=4, min_pools=2, max_pools=2, max_layers=4, tight=False, line=True
    )
    compared = 0
    for seed in range(100 + block * 12, 112 + block * 12):
        case = tied_case(seed, recipe, most_users=1)
        if case is None:
            continue
        shape = Random(seed).choice(case.shapes)
        options = case.options(
            shape.micro_batch_size, case.scope(zero=(0,), recompute=(Recompute.NONE,))
        )
        plans = list(itertools.islice(complete_plans(case, shape, options), 1500))
        if not 0 < len(plans) < 1500:
            continue
        found = []
        for menu in case.menu(shape, options).by_kind():
            for part in [*menu.by_last_site()] or [menu]:
                found += found_by(
                    PlanSearch(part, case.counts, sum(case.counts), math.inf, slack=None)
                )
        judged = case.seconds(shape, [plan for _, plan in found])
        fitting = [one for one, seconds in zip(found, judged, strict=True) if seconds < math.inf]
        assert len(fitting) == len(plans)
        for bound, plan in Random(seed).sample(fitting, min(10, len(fitting))):
            assert bound <= exact(case, shape, plan) * (1 + 1e-9)
        compared += 1
    assert compared >= 3


def test_a_table_shared_across_a_slow_line_is_part_of_the_bound() -> None:
    """One stage at each of two sites: the bound is what the exact engine plays."""
    kinds = [kind_fields(name, flops=1, memory=1e12) for name in "ab"]
    nodes = [node_fields(name, nic=1.0) for name in "ab"]
    line = {"name": "line", "between": ["a*", "b*"], "bandwidth": "0.1 GB/s", "latency": "50 ms"}
    layer = Layer(
        name="layer",
        kind="block",
        forward_flop=1e11,
        backward_flop=2e11,
        parameters=10**8,
        output_bytes=1e6,
        activation_bytes=1e6,
    )
    last = replace(layer, name="last", parameters=0, tied_to=0, tied_parameters=layer.parameters)
    case = Case(
        chain=Chain(name="tied", layers=(layer, last), sequence_length=1, dtype=Dtype.BF16),
        cluster=cluster_of({"name": "sites", "kinds": kinds, "nodes": nodes, "links": [line]}),
        global_batch=2,
        schedules=SCHEDULES[:1],
    )
    shape = case.shapes[-1]
    search = case.search(shape, case.options(shape.micro_batch_size, case.scope()))
    pairs = [
        (bound, exact(case, shape, plan)) for bound, plan in found_by(search) if len(plan) == 2
    ]
    assert pairs
    assert all(0.99 * end <= bound <= end * (1 + 1e-9) for bound, end in pairs)


def found_by(search: PlanSearch) -> list[tuple[float, Complete]]:
    return list(iter(lambda: search.next_plan(math.inf), None))


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_is_faster_than_the_planner_says(seed: int) -> None:
    case = tied_case(seed, SEVERAL)
    everything = None if case is None else best_of_all(case, case.scope(prune=False), 20_000)
    if case is None or everything is None:
        return
    settings = Settings(level=2, gap=0, units=case.ones, schedules=case.schedules)
    plan, ours = found_best(case, settings)
    assert ours == pytest.approx(everything[0], rel=FOLDED)
    if plan is not None:
        assert plan.certificate is not None
        assert plan.certificate.lower_bound_seconds <= everything[0] * (1 + 1e-8)
