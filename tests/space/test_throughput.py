"""No pipeline is faster than what all devices together can do."""

from __future__ import annotations

import pytest
from planning_cases import Recipe, complete_plans, random_case

from argosy.space.rate import throughput_bound


@pytest.mark.parametrize("seed", range(30))
def test_throughput_bounds_every_plan(seed: int) -> None:
    case = random_case(seed, Recipe(max_devices=5, max_layers=3, batches=(2, 4)))
    for shape in case.shapes[:2]:
        bound = shape.num_micro_batches * throughput_bound(case.prices, shape.micro_batch_size)
        plans = list(complete_plans(case, shape, case.options(shape.micro_batch_size, case.scope(zero=(1,)))))[:2000]
        if plans:
            assert min(case.seconds(shape, plans)) >= bound * (1 - 1e-9)


def test_equal_devices_reach_it_where_nothing_is_shared() -> None:
    """One device, one layer: the bound is the time, less the update."""
    recipe = Recipe(max_devices=1, max_layers=1, batches=(1,), tight=False)
    case = random_case(0, recipe)
    (shape,) = [shape for shape in case.shapes if shape.schedules[0].k == 1][:1]
    (plan,) = complete_plans(case, shape, case.options(1, case.scope()))
    forward, backward = plan[0].option.forward[0, -1], plan[0].option.backward[0, -1]
    assert throughput_bound(case.prices, 1) == pytest.approx(forward + backward, rel=1e-12)
