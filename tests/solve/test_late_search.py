"""A search whose budget is spent ends at once, with a plan and a certificate that holds."""

from __future__ import annotations

import itertools
import math

import pytest
from support.planning_cases import FOLDED, Recipe, found_best, random_case

from argosy.planner import Settings
from argosy.solve.budget import Budget, TimeIsUpError
from argosy.solve.pool_search import PoolSearch
from argosy.solve.search.bounds import suffix_bounds

CASES = Recipe(
    min_devices=4, max_devices=8, max_pools=2, max_layers=4, batches=(2, 4), per_node=(1, 2)
)


@pytest.mark.parametrize("seed", range(1600, 1605))
def test_a_search_that_ends_at_any_moment_has_a_plan_and_a_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(seed, CASES)
    settings = Settings(level=2, gap=0, schedules=case.schedules, spanning=True)
    plan, best = found_best(case, settings)
    if plan is None:
        return
    for most in (0, 3, 10, 40, 160):
        checks = itertools.count()
        monkeypatch.setattr(
            Budget,
            "is_spent",
            property(lambda _, checks=checks, most=most: next(checks) >= most),
        )
        search = PoolSearch(case.chain, case.cluster, case.global_batch, settings, case.model)
        plan = search.run()
        assert plan.certificate is not None and plan.predicted is not None
        bound = plan.certificate.lower_bound_seconds
        assert bound <= plan.predicted.iteration_seconds * (1 + FOLDED)
        if search.units == tuple(1 for _ in search.pools):
            assert bound <= best * (1 + FOLDED)


def test_suffix_programmes_of_a_late_search_are_abandoned() -> None:
    case = random_case(7, CASES)
    shape = case.shapes[0]
    menu = case.menu(shape, case.options(shape.micro_batch_size, case.scope()))
    menu.is_late = lambda: True
    with pytest.raises(TimeIsUpError):
        suffix_bounds(menu, case.counts, sum(case.counts), math.inf)
