"""No plan is faster than the reach of its stages says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support.planning_cases import Case, Recipe, complete_plans, random_case

from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.solve.search.reach import ShapeBound
from argosy.solve.search.shape import Shape
from argosy.space.enumerate import stage_parts
from argosy.space.prune import Counters


def reach_of(case: Case, shape: Shape) -> ShapeBound:
    parts = stage_parts(case.prices, shape.micro_batch_size, case.scope(), Counters())
    ways = {vector: list(dict.fromkeys(one for one, _ in each)) for vector, each in parts.items()}
    return ShapeBound(case.prices, shape, ways, case.counts)


@pytest.mark.parametrize("seed", range(40))
def test_reach_bounds_every_plan(seed: int) -> None:
    schedules = (
        ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE),
    )
    case = replace(
        random_case(seed, Recipe(max_devices=5, max_layers=4, batches=(2, 4))), schedules=schedules
    )
    for shape in case.shapes[:4]:
        plans = list(
            complete_plans(case, shape, case.options(shape.micro_batch_size, case.scope()))
        )[:3000]
        if not plans:
            continue
        best = min(case.seconds(shape, plans))
        if best < math.inf:
            reach = reach_of(case, shape)
            assert reach.covers(best * (1 + 1e-9))
            assert reach.least(0.0, 2 * best) <= best * (1 + 1e-9)


def test_reach_is_not_far_below_a_pipeline_of_equal_layers() -> None:
    """A bound that is always 0 would hold too."""
    case = random_case(3, Recipe(max_devices=4, max_layers=6, batches=(4,), tight=False))
    for shape in case.shapes:
        plans = list(
            complete_plans(case, shape, case.options(shape.micro_batch_size, case.scope(zero=(1,))))
        )[:3000]
        best = min(case.seconds(shape, plans), default=math.inf)
        if best < math.inf:
            assert reach_of(case, shape).least(0.0, best) >= 0.5 * best
