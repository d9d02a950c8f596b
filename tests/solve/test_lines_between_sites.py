"""What the bound of a plan knows about the lines between sites, against the exact engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from support.planning_cases import Case, Recipe, cluster_of, kind_fields, node_fields, random_case

from argosy.cluster.file import load_cluster
from argosy.dtype import Dtype
from argosy.plan.plan import Recompute
from argosy.planner import SCHEDULES
from argosy.sim.simulate import simulate
from argosy.solve.finalists.judge import Complete
from argosy.solve.search.crossings import carried
from argosy.solve.search.kinds import PlanKind
from argosy.solve.search.pipeline import PlanSearch
from argosy.solve.search.shape import Shape
from argosy.space.pool import find_pools, line_between_sites
from argosy.workload.chain import Chain, Layer

LAYER = Layer(
    name="first",
    kind="block",
    forward_flop=1e10,
    backward_flop=2e10,
    parameters=1000,
    output_bytes=20e6,
    activation_bytes=1e6,
)
"""A layer that takes a tenth of the time of its output on a line of 0.1 GB/s."""


def sites_of(names: str, per_node: int, schedule: int) -> Case:
    """One node at each site, and a line between any two."""
    lines = [
        {
            "name": one + other,
            "between": [f"{one}*", f"{other}*"],
            "bandwidth": "0.1 GB/s",
            "latency": "2 ms",
        }
        for one, other in itertools.combinations(names, 2)
    ]
    content: dict[str, Any] = {"name": "sites", "links": lines}
    content["kinds"] = [kind_fields(name, flops=1, memory=1e12) for name in names]
    content["nodes"] = [node_fields(name, nic=10.0, per_node=per_node) for name in names]
    layers = (LAYER, replace(LAYER, name="second"))
    return Case(
        chain=Chain(name="two", layers=layers, sequence_length=1, dtype=Dtype.BF16),
        cluster=cluster_of(content),
        global_batch=16,
        schedules=SCHEDULES[schedule : schedule + 1],
    )


def found(
    case: Case, shape: Shape, *, mixed: bool, most: int = 400
) -> Iterator[tuple[PlanKind, float, Complete]]:
    """Plans of every kind with their bounds, and of all kinds together."""
    options = case.options(
        shape.micro_batch_size, case.scope(mixed=mixed, zero=(0,), recompute=(Recompute.NONE,))
    )
    if not options:
        return
    whole = case.menu(shape, options)
    parts = [part for kind in whole.by_kind() for part in ([*kind.by_last_site()] or [kind])]
    for menu in (whole, *parts):
        search = PlanSearch(
            menu,
            case.counts,
            min(4, sum(case.counts)),
            math.inf,
            slack=None,
            only_kind=menu is not whole,
        )
        plans = iter(lambda search=search: search.next_plan(math.inf), None)
        for bound, plan in itertools.islice(plans, most):
            yield menu.kind, bound, plan


def exact(case: Case, shape: Shape, plan: Complete) -> float:
    placed = case.placed(shape, plan)
    (end,) = simulate(placed, case.chain, case.cluster, model=case.model).iteration_ends
    return end


@pytest.mark.parametrize("schedule", range(len(SCHEDULES)))
def test_gradients_queue_on_a_slow_line_behind_what_the_second_stage_needs_first(
    schedule: int,
) -> None:
    """Under kfkb with k = 4 the line is idle in neither direction: the bound is what is played."""
    case = sites_of("ab", 2, schedule)
    shape = next(shape for shape in case.shapes if shape.num_micro_batches == 8)
    ratios = []
    for kind, bound, plan in found(case, shape, mixed=False):
        sites = [choice.option.parts[0].pool for choice in plan]
        if kind is PlanKind.EVEN and len(set(sites)) == 2 and len(plan) == 2:
            ratios.append(bound / exact(case, shape, plan))
    assert ratios
    assert max(ratios) <= 1 + 1e-9
    assert min(ratios) >= (0.98 if shape.schedules[0].k == 4 else 0.6)


def test_a_stage_at_two_sites_sends_to_a_third_over_two_lines() -> None:
    case = sites_of("abc", 1, 0)
    shape = next(shape for shape in case.shapes if shape.num_micro_batches == 4)
    spread = 0
    for _, bound, plan in found(case, shape, mixed=True):
        spread += any(len(choice.option.parts) > 1 for choice in plan) and len(plan) == 2
        assert bound <= exact(case, shape, plan) * (1 + 1e-9)
    assert spread


@pytest.mark.parametrize("block", range(3))
def test_bounds_hold_where_much_crosses_between_sites(block: int) -> None:
    compared = 0
    for seed in range(7000 + 10 * block, 7010 + 10 * block):
        random = Random(seed)
        recipe = Recipe(
            min_devices=3,
            max_devices=6,
            min_pools=2,
            max_layers=3,
            batches=(4, 6, 8, 12),
            tight=False,
            wide=False,
            per_node=(1, 2, 3),
            line=True,
            outputs=random.choice((1, 5, 20, 60)),
        )
        case = random_case(seed, recipe)
        shape = random.choice([shape for shape in case.shapes if shape.num_micro_batches > 1])
        plans = list(found(case, shape, mixed=seed % 2 == 0, most=200))
        for _, bound, plan in random.sample(plans, min(12, len(plans))):
            assert bound <= exact(case, shape, plan) * (1 + 1e-9)
        compared += bool(plans)
    assert compared >= 6


def _crossings(plan: Complete) -> int:
    """The number of boundaries between stages at different sites."""
    sites = [choice.option.pools[0].site for choice in plan]
    return sum(one != other for one, other in itertools.pairwise(sites))


@pytest.mark.parametrize("schedule", range(len(SCHEDULES)))
def test_a_line_carries_what_all_boundaries_send_over_it(schedule: int) -> None:
    case = sites_of("ab", 2, schedule)
    layers = tuple(replace(LAYER, name=f"layer{number}") for number in range(3))
    case = replace(case, chain=replace(case.chain, layers=layers))
    shape = next(shape for shape in case.shapes if shape.num_micro_batches == 8)
    once = case.global_batch * LAYER.output_bytes / 0.1e9
    ratios = []
    for kind, bound, plan in found(case, shape, mixed=False):
        if kind is PlanKind.EVEN and _crossings(plan) == 2:
            assert bound >= 2 * once
            ratios.append(bound / exact(case, shape, plan))
    assert ratios
    assert max(ratios) <= 1 + 1e-9


def test_a_line_that_waits_for_gradients_is_bounded_by_its_pauses() -> None:
    """Under kfkb with k = 4 and four micro-batches nothing crosses until all forwards are done:
    the bound of a plan that crosses twice is what is played."""
    case = sites_of("ab", 2, 3)
    layers = tuple(replace(LAYER, name=f"layer{number}") for number in range(3))
    case = replace(case, chain=replace(case.chain, layers=layers))
    shape = next(shape for shape in case.shapes if shape.num_micro_batches == 4)
    ratios = [
        bound / exact(case, shape, plan)
        for kind, bound, plan in found(case, shape, mixed=False)
        if kind is PlanKind.EVEN and _crossings(plan) == 2
    ]
    assert ratios
    assert min(ratios) >= 1 - 1e-6
    assert max(ratios) <= 1 + 1e-9


@pytest.mark.parametrize(("schedule", "count"), [(0, 2), (3, 4)])
def test_a_gradient_crosses_before_it_is_back_at_the_last_fixed_stage(
    schedule: int, count: int
) -> None:
    """Two stages of each site, the second site's ones in the middle: behind the second stage it is
    certain that the line is crossed again, but not where."""
    case = sites_of("ab", 2, schedule)
    layers = tuple(replace(LAYER, name=f"layer{number}") for number in range(4))
    case = replace(case, chain=replace(case.chain, layers=layers), global_batch=8)
    shape = next(shape for shape in case.shapes if shape.num_micro_batches == count)
    ratios = [
        bound / exact(case, shape, plan)
        for _, bound, plan in found(case, shape, mixed=False, most=2000)
        if len(plan) == 4 and _crossings(plan) == 2
    ]
    assert 1 - 1e-6 <= max(ratios) <= 1 + 1e-9


def test_no_order_of_transfers_is_done_before_that_of_their_beginnings() -> None:
    for seed in range(60):
        random = Random(seed)
        transfers = [
            (random.choice((0, 1, 2, 5, 9)), random.choice((1, 2, 3)))
            for _ in range(random.randint(1, 6))
        ]
        ends = []
        for order in itertools.permutations(transfers):
            end = 0.0
            for begin, seconds in order:
                end = max(end, begin) + seconds
            ends.append(end)
        assert carried(transfers) == min(ends)


def test_bounds_hold_for_plans_that_cross_a_line_several_times() -> None:
    compared = 0
    for seed in range(8000, 8008):
        random = Random(seed)
        recipe = Recipe(
            min_devices=4,
            max_devices=6,
            min_pools=2,
            max_layers=5,
            batches=(4, 8, 12),
            tight=False,
            wide=False,
            per_node=(1, 2, 3),
            line=True,
            outputs=random.choice((1, 5, 20, 60)),
        )
        case = random_case(seed, recipe)
        shape = random.choice([shape for shape in case.shapes if shape.num_micro_batches > 1])
        plans = list(found(case, shape, mixed=False, most=400))
        crossing = [(bound, plan) for _, bound, plan in plans if _crossings(plan) > 1]
        for bound, plan in random.sample(crossing, min(10, len(crossing))):
            assert bound <= exact(case, shape, plan) * (1 + 1e-9)
            compared += 1
    assert compared >= 20


def test_a_ring_over_three_sites_may_avoid_their_slowest_line() -> None:
    """The lines are 0-1 (9 bytes/s, 1 s), 1-2 (5, 3 s) and 0-2 (2, 8 s); two sites use both
    directions of theirs."""
    pool = find_pools(load_cluster("two-cards"))[0]
    here = (math.inf, 0.0)
    first, second, third = (
        replace(pool, index=site, site=site, far=far)
        for site, far in enumerate(
            (
                (here, (9.0, 1.0), (2.0, 8.0)),
                ((7.0, 1.0), here, (5.0, 3.0)),
                ((2.0, 8.0), (5.0, 3.0), here),
            )
        )
    )
    assert line_between_sites([first]) == here
    assert line_between_sites([first, second]) == (7.0, 1.0)
    assert line_between_sites([first, third]) == (2.0, 8.0)
    assert line_between_sites([first, second, third]) == (5.0, 3.0)
