"""Whether a plan fits, against the list of all plans."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from support.planning_cases import Case, Recipe, complete_plans, random_case

from argosy.cluster.topology import Cluster
from argosy.plan.check import check_plan
from argosy.schedule import build_schedule
from argosy.schedule.generate import group_size, usual_depth
from argosy.solve.feasible import batch_shapes, find_fit
from argosy.solve.search.shape import Shape
from argosy.solve.settings import SCHEDULES
from argosy.space.enumerate import Scope

SHORT = Recipe(max_devices=4, max_layers=5, max_pools=2, batches=(1, 2, 3, 4))


def shrunk(case: Case, factor: float) -> Case:
    """The case with devices of less memory, so that often nothing fits."""
    devices = [
        replace(device, kind=replace(device.kind, memory=device.kind.memory * factor))
        for device in case.cluster.devices
    ]
    cluster: Cluster = replace(case.cluster, devices=tuple(devices))
    return replace(case, cluster=cluster)


def any_plan_fits(case: Case, scope: Scope) -> bool:
    return any(
        next(iter(complete_plans(case, shape, case.options(shape.micro_batch_size, scope))), None)
        is not None
        for shape in case.shapes
    )


def test_fits_exactly_where_some_plan_does() -> None:
    fitting = lacking = 0
    for seed in range(120):
        case = shrunk(random_case(seed, SHORT), Random(seed).choice((0.15, 0.3, 0.5, 0.8)))
        scope = case.scope()
        fit = find_fit(case.prices, batch_shapes(case.global_batch, case.schedules), scope)
        assert (fit is not None) == any_plan_fits(case, case.scope(prune=False)), seed
        fitting, lacking = fitting + (fit is not None), lacking + (fit is None)
        if fit is None:
            continue
        count = fit.shape.num_micro_batches
        group = group_size(fit.schedule, count)
        for left, choice in zip(range(len(fit.plan), 0, -1), fit.plan, strict=True):
            depth = usual_depth(fit.schedule, left, count)
            assert choice.option.fits(choice.first, choice.end, depth, group)
        plan = case.placed(replace(fit.shape, schedules=(fit.schedule,)), fit.plan)
        check_plan(plan, case.chain, case.cluster)
    assert min(fitting, lacking) >= 20


@pytest.mark.parametrize("batch", [1, 6, 12, 97])
def test_shapes_are_all_ways_to_cut_a_batch(batch: int) -> None:
    case = random_case(3)
    cuts: list[Shape] = list(batch_shapes(batch, case.schedules))
    assert [shape.num_micro_batches for shape in cuts] == [
        n for n in range(1, batch + 1) if batch % n == 0
    ]
    assert all(shape.num_micro_batches * shape.micro_batch_size == batch for shape in cuts)
    assert all(
        schedule.k <= shape.num_micro_batches for shape in cuts for schedule in shape.schedules
    )


def test_schedules_are_dropped_only_if_an_earlier_one_has_the_same_actions() -> None:
    """For any number of stages; what stays differs from every other."""
    for shape in batch_shapes(12, SCHEDULES):
        count = shape.num_micro_batches
        actions = {
            spec: [build_schedule(spec, stages, count).rows for stages in range(1, 7)]
            for spec in SCHEDULES
            if spec.k <= count
        }
        kept = [actions[spec] for spec in shape.schedules]
        assert all(orders in kept for orders in actions.values())
        assert all(first != second for first, second in itertools.combinations(kept, 2))
