"""No pipeline is faster than what all devices together can do."""

from __future__ import annotations

import pytest
from planning_cases import Recipe, complete_plans, random_case

from argosy.plan.plan import Recompute
from argosy.space.rate import throughput_bound


@pytest.mark.parametrize("seed", range(30))
def test_throughput_bounds_every_plan(seed: int) -> None:
    case = random_case(seed, Recipe(max_devices=5, max_layers=3, batches=(2, 4)))
    for shape in case.shapes[:2]:
        bound = shape.num_micro_batches * throughput_bound(case.prices, shape.micro_batch_size)
        plans = list(complete_plans(case, shape, case.options(shape.micro_batch_size, case.scope(zero=(1,)))))[:2000]
        if plans:
            assert min(case.seconds(shape, plans)) >= bound * (1 - 1e-9)


def test_one_layer_on_one_device_reaches_it() -> None:
    """The bound is then the time, less the update."""
    case = random_case(0, Recipe(max_devices=1, max_layers=1, batches=(1,), tight=False))
    shape = case.shapes[0]
    options = case.options(1, case.scope(recompute=(Recompute.NONE,)))
    (plan,) = complete_plans(case, shape, options)
    assert throughput_bound(case.prices, 1) == pytest.approx(sum(plan[0].option.seconds(0, 1)), rel=1e-12)
