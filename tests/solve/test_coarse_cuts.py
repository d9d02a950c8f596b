"""Coarse cuts of long chains: what they are, and that bounds on them hold for plans with any
cuts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from support.planning_cases import Case, Options, Recipe, complete_plans, plan_of, random_case

from argosy.planner import Settings
from argosy.solve.finalists.incumbents import Incumbents
from argosy.solve.finalists.verdict import ExactTrial
from argosy.solve.search.grid import CutGrid, all_cuts, coarse_cuts
from argosy.solve.search.kinds import ground_of
from argosy.solve.search.menu import Menu
from argosy.solve.search.pipeline import PlanSearch
from argosy.solve.search.shape import Shape
from argosy.space.price import Prices
from argosy.workload.chain import Chain, Layer

MOST_PLANS = 20_000
SMALL = Recipe(max_devices=4, max_pools=2, max_layers=3, batches=(2, 3, 4))


def smaller(layer: Layer, times: int) -> Layer:
    return replace(
        layer,
        parameters=layer.parameters // times,
        activation_bytes=layer.activation_bytes / times,
        selective_bytes=layer.selective_bytes / times,
    )


def stretched(case: Case, seed: int, *, alike: bool) -> Case:
    """The chain with a run of 3 to 5 layers in its middle: equal ones, or some whose outputs alone
    are equal; sometimes its first and last layers have the same weights."""
    random = Random(seed)
    first, last = (smaller(case.chain.layers[at], 3) for at in (0, -1))
    run = random.randint(3, 5)
    cheaper = [random.uniform(0.3, 1.0) for _ in range(run)]
    middle = [
        replace(
            first,
            name=f"middle{at}",
            forward_flop=first.forward_flop * (1 if alike else cheaper[at]),
            parameters=int(first.parameters * (1 if alike else cheaper[-at])),
        )
        for at in range(run)
    ]
    last = replace(
        last,
        name="last",
        **({"tied_to": 0, "tied_parameters": 10**8} if random.random() < 0.4 else {}),
    )
    last = random.choice((last, last, middle[0]))
    return replace(case, chain=replace(case.chain, layers=(first, *middle, last)))


def cuts_of(prices: Prices, most: int) -> list[int]:
    return [int(cut) for cut in coarse_cuts(prices, most).cuts]


def chain_of(*layers: Layer) -> Chain:
    return replace(random_case(0).chain, layers=layers)


def test_bundles_are_runs_of_equal_layers_and_tied_ones_and_the_last_stay_alone() -> None:
    case = random_case(5, Recipe(max_layers=1))
    (one,) = case.chain.layers
    head = replace(one, parameters=7, tied_to=0, tied_parameters=7)
    prices = Prices(chain_of(replace(one, parameters=7), *[one] * 9, head), case.pools, case.model)
    assert cuts_of(prices, 5) == [0, 1, 4, 7, 10, 11]
    assert cuts_of(prices, 6) == [0, 1, 4, 7, 10, 11]
    assert cuts_of(prices, 7) == [0, 1, 3, 5, 7, 9, 10, 11]
    assert cuts_of(prices, 11) == list(range(12))
    assert coarse_cuts(prices, 11).loose is None
    prices = Prices(chain_of(*[one] * 10), case.pools, case.model)
    assert cuts_of(prices, 5) == [0, 3, 6, 9, 10], "the last layer stays alone, too"


def test_layers_of_equal_outputs_share_bundles_where_equal_ones_are_rare() -> None:
    case = random_case(5, Recipe(max_layers=1))
    (one,) = case.chain.layers
    other = replace(one, parameters=one.parameters + 1)
    odd = replace(one, output_bytes=one.output_bytes + 1)
    prices = Prices(chain_of(*[one, other] * 4, odd), case.pools, case.model)
    assert cuts_of(prices, 5) == [0, 2, 4, 6, 8, 9]
    unlike = [replace(one, output_bytes=one.output_bytes + at) for at in range(8)]
    prices = Prices(chain_of(*unlike), case.pools, case.model)
    assert cuts_of(prices, 5) == list(range(9))


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_a_stage_has_the_layers_that_its_place_on_the_grid_says(seed: int, *, alike: bool) -> None:
    """(2) and (3) for every range of layers."""
    case = stretched(random_case(seed, SMALL), seed, alike=alike)
    prices, size = case.prices, len(case.chain.layers)
    cuts = coarse_cuts(prices, 3 + seed % 3)
    if cuts.loose is None:
        return
    for first, end in itertools.combinations(range(size + 1), 2):
        place = tuple(np.searchsorted(cuts.cuts, (first, end)))
        certain = range(cuts.loose.first[place], cuts.loose.end[place])
        inside = {prices.shapes[at] for at in range(first, end)}
        if place[0] < place[1]:
            assert certain
            assert {first, *certain} <= {*range(first, end)}
        else:
            assert place[0] not in (cuts.loose.single if cuts.loose.single is not None else ())
            assert {prices.shapes[at] for at in certain} <= inside
            assert len(certain) <= end - first
        assert prices.outputs[cuts.cuts[place[1]]] == prices.outputs[end]
        assert prices.outputs[cuts.cuts[place[0]]] == prices.outputs[first]


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("block", range(4))
def test_the_loose_bound_is_below_every_plan_with_any_cuts(block: int, *, alike: bool) -> None:
    """Of each number of stages, too; and what is found on the grid is a plan on the grid."""
    compared = below = 0
    for seed in range(block * 15, block * 15 + 15):
        case = stretched(random_case(seed, SMALL), seed, alike=alike)
        bundles = coarse_cuts(case.prices, Random(seed).randint(3, 5))
        if bundles.loose is None:
            continue
        for shape in case.shapes[-3:]:
            options = case.options(shape.micro_batch_size, case.scope(zero=(1, 3)))
            plans = list(itertools.islice(complete_plans(case, shape, options), MOST_PLANS + 1))
            if not 0 < len(plans) <= MOST_PLANS:
                continue
            search = search_on(case, shape, options, bundles)
            exact = search_on(case, shape, options, all_cuts(case.prices))
            times = case.seconds(shape, plans)
            for number in {len(plan) for plan in plans}:
                best = min(t for plan, t in zip(plans, times, strict=True) if len(plan) == number)
                loose, tight = (one.bounds.root(number, case.counts) for one in (search, exact))
                assert loose <= tight * (1 + 1e-12), seed
                assert loose <= best * (1 + 1e-9), seed
            compared += 1
            below += search.bound < exact.bound * (1 - 1e-9)
            on_grid = set(bundles.cuts.tolist())
            for plan in search.descend(math.inf):
                assert {choice.end for choice in plan} <= on_grid
    assert compared >= 10
    assert below, "the bound lost nothing anywhere: nothing was tested"


def search_on(case: Case, shape: Shape, options: Options, bundles: CutGrid) -> PlanSearch:
    menu = Menu(
        case.prices, options, shape, ground_of(case.cluster, case.pools, case.ones), bundles
    )
    return PlanSearch(menu, case.counts, sum(case.counts), math.inf, slack=None, only_kind=False)


@pytest.mark.parametrize("seed", range(40, 70))
def test_level_1_in_bundles_is_certified_below_all_plans(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = stretched(random_case(seed, SMALL), seed, alike=seed % 3 != 0)
    best = math.inf
    for shape in case.shapes:
        plans = complete_plans(case, shape, case.options(shape.micro_batch_size, case.scope()))
        best = min([best, *case.seconds(shape, list(itertools.islice(plans, MOST_PLANS // 4)))])
    if math.isinf(best):
        return
    monkeypatch.setattr(
        "argosy.solve.pool_search.coarse_cuts", lambda prices: coarse_cuts(prices, 4)
    )
    plan = plan_of(case, Settings(level=1, schedules=case.schedules))
    assert plan.certificate is not None
    assert plan.certificate.lower_bound_seconds <= best * (1 + 1e-9)


def test_settling_moves_layers_between_cuts() -> None:
    """From cuts far from even, of equal layers on equal devices, to even ones."""
    recipe = Recipe(
        min_devices=2,
        max_devices=2,
        max_pools=1,
        max_layers=1,
        batches=(4,),
        tight=False,
        per_node=(1,),
    )
    case = random_case(5, recipe)
    case = replace(
        case, chain=replace(case.chain, layers=(smaller(case.chain.layers[0], 24),) * 24)
    )
    shape = case.shapes[-1]
    options = case.options(shape.micro_batch_size, case.scope())
    plan = min(
        (
            plan
            for plan in complete_plans(case, shape, options)
            if len(plan) == 2 and plan[0].end == 4
        ),
        key=lambda one: case.seconds(shape, [one])[0],
    )
    trial = ExactTrial(case.prices, case.cluster, case.cluster, case.scope())
    incumbents = Incumbents(case.judge, trial)
    incumbents.settle(shape, [plan], case.ones, 8)
    best = incumbents.found[0].plan
    assert best[0].end in (11, 12, 13)
    assert [choice.option for choice in best] == [choice.option for choice in plan]
