"""The bound of plans with unequal replicas: a longest path that an oracle finds too, and no plan is
faster."""

from __future__ import annotations

import math
from functools import cache
from random import Random

import pytest
from support.planning_cases import Case, Recipe, random_case

from argosy.schedule import ActionKind
from argosy.schedule.generate import build_schedule
from argosy.sim.simulate import simulate
from argosy.solve.finalists.judge import Complete
from argosy.solve.search.replica_bound import replica_seconds
from argosy.solve.search.shape import Shape

RECIPE = Recipe(max_devices=5, max_layers=4, batches=(2, 3, 4, 6), tight=False, per_node=(1, 2, 3))
NOTHING = (0.0,) * 7


def mixed_plans(seed: int) -> tuple[Case, Shape, list[Complete]]:
    """Some complete plans of a random case of which a stage has devices of several pools."""
    random = Random(seed)
    case = random_case(seed, RECIPE)
    shape = random.choice(case.shapes)
    options = case.options(shape.micro_batch_size, case.scope(prune=False, zero=(1,)))
    search = case.search(shape, options)
    plans = []
    while len(plans) < 6 and (following := search.next_plan(math.inf)) is not None:
        _, plan = following
        if (
            any(len(choice.option.parts) > 1 for choice in plan)
            and case.seconds(shape, [plan])[0] < math.inf
        ):
            plans.append(plan)
    return case, shape, plans


def longest_path(shape: Shape, plan: Complete) -> float:
    """The same by recursion over actions, with samples one by one."""
    (schedule,) = shape.schedules
    orders = build_schedule(schedule, len(plan), shape.num_micro_batches).rows
    samples = []
    for choice in plan:
        owners = []
        for number, part in enumerate(choice.option.parts):
            for at in range(part.replicas):
                owners += [(number, at)] * (part.samples + (at < part.extra))
        samples.append(owners)

    def seconds(stage: int, owner: tuple[int, int], kind: ActionKind) -> float:
        option, part = plan[stage].option, plan[stage].option.parts[owner[0]]
        sums = option.sums(part, part.samples + (owner[1] < part.extra))[
            kind is not ActionKind.FORWARD
        ]
        return float(sums[plan[stage].end] - sums[plan[stage].first])

    @cache
    def end(stage: int, owner: tuple[int, int], place: int) -> float:
        if place < 0:
            return 0.0
        action = orders[stage][place]
        begins = [end(stage, owner, place - 1)]
        other = stage - 1 if action.kind is ActionKind.FORWARD else stage + 1
        if 0 <= other < len(plan):
            places = [
                at
                for at, one in enumerate(orders[other])
                if one.kind is action.kind and one.micro_batch == action.micro_batch
            ]
            pairs = zip(samples[stage], samples[other], strict=True)
            begins += [end(other, there, places[0]) for here, there in set(pairs) if here == owner]
        return max(begins) + seconds(stage, owner, action.kind)

    return max(
        end(stage, owner, len(orders[stage]) - 1)
        for stage in range(len(plan))
        for owner in samples[stage]
    )


@pytest.mark.parametrize("block", range(4))
def test_it_is_the_longest_path_and_no_plan_is_faster(block: int) -> None:
    compared = 0
    for seed in range(7000 + 40 * block, 7040 + 40 * block):
        case, shape, plans = mixed_plans(seed)
        for plan in plans:
            ranges = [(choice.option, choice.first, choice.end) for choice in plan]
            (schedule,) = shape.schedules
            found = replica_seconds(
                schedule, shape.num_micro_batches, ranges, [NOTHING] * len(plan)
            )
            assert found == pytest.approx(longest_path(shape, plan), rel=1e-12)
            (end,) = simulate(
                case.placed(shape, plan), case.chain, case.cluster, model=case.model
            ).iteration_ends
            assert found <= end * (1 + 1e-9)
            compared += 1
    assert compared >= 20
