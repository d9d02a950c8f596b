"""The certificate of level 1: it holds for its units, which are the finest with a small gap."""

from __future__ import annotations

import pytest
from support.planning_cases import FOLDED, Recipe, found_best, random_case

from argosy.errors import InfeasibleError
from argosy.planner import Settings
from argosy.solve.pool_search import PoolSearch
from argosy.solve.proof import widest_proof

CASES = Recipe(
    min_devices=4, max_devices=8, max_pools=2, max_layers=4, batches=(2, 4), per_node=(1, 2)
)


@pytest.mark.parametrize("seed", range(1500, 1510))
def test_no_plan_of_its_units_is_faster_than_the_bound(seed: int) -> None:
    case = random_case(seed, CASES)
    settings = Settings(schedules=case.schedules)
    search = PoolSearch(case.chain, case.cluster, case.global_batch, settings, case.model)
    try:
        plan = search.run()
    except InfeasibleError:
        return
    exact = Settings(
        level=2,
        gap=0,
        units=search.units,
        schedules=case.schedules,
        spanning=search.scope(search.units).spanning,
    )
    _, best = found_best(case, exact)
    assert plan.certificate is not None
    assert plan.certificate.lower_bound_seconds <= best * (1 + FOLDED)


def test_the_finest_units_with_a_small_gap_count_if_they_have_a_plan_as_fast() -> None:
    fast, close, far = (0.9, (4,), 1, True), (0.95, (2,), 1, True), (0.5, (1,), 1, True)
    coarse = (2.0, (4,), 1, True)
    assert widest_proof([fast, close, far], 1.0, spans=False) == close
    for bound in (0.6, 0.9):
        fine = (bound, (1,), 1, True)
        assert widest_proof([coarse, far, fine], 1.0, spans=False) == fine


def test_groups_inside_nodes_prove_nothing_about_a_plan_across_nodes() -> None:
    inside, all_groups = (0.95, (1,), 1, False), (0.5, (1,), 1, True)
    assert widest_proof([inside, all_groups], 1.0, spans=False) == inside
    assert widest_proof([inside, all_groups], 1.0, spans=True) == all_groups
