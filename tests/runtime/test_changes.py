"""Schedule and shares change between two steps of a running job, and nothing in the result does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from runtime.rank_pool import RankPool
from runtime.training_cases import Case, differences, plan_of, train_by_policy, train_with_changes

from argosy.plan.plan import PolicyRule
from argosy.runtime.job.adapting import change_to
from argosy.schedule import ScheduleKind, ScheduleSpec

CHANGES = [
    ScheduleSpec(kind=ScheduleKind.KFKB, k=3),
    (0, (1, 3)),
    ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE),
    (1, (3, 1)),
    ScheduleSpec(kind=ScheduleKind.GPIPE),
    ScheduleSpec(kind=ScheduleKind.EAGER, depth=(4, 2)),
]


def test_schedule_and_shares_change_without_a_restart(ranks: RankPool) -> None:
    case = Case(shares=((3, 1), (2, 2)), zero=3, clip=False)
    outcomes = ranks(4, train_with_changes, case, CHANGES)
    assert not differences(replace(case, steps=1 + len(CHANGES)), outcomes)


def test_other_ratios_of_a_group_are_a_move() -> None:
    plan, other = (
        plan_of(Case(shares=((2,),), ratios=(ratios,))) for ratios in ((0.7, 0.3), (0.5, 0.5))
    )
    moves: list[Any] = []
    trainer: Any = SimpleNamespace(plan=plan, move=moves.append)
    change_to(trainer, other)
    assert moves == [other]


@pytest.mark.exhaustive
def test_the_shares_of_tensor_parallel_groups_change_too(ranks: RankPool) -> None:
    case = Case(shares=((2, 2), (4,)), ratios=((0.7, 0.3), (1.0,)), zero=1, num_micro_batches=2)
    changes = [(0, (1, 3)), ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE), (0, (2, 2))]
    outcomes = ranks(case.num_ranks, train_with_changes, case, changes)
    assert not differences(replace(case, steps=1 + len(changes)), outcomes)


def test_the_plan_s_policy_is_followed(ranks: RankPool) -> None:
    """Below a threshold its schedule, of several the lowest, above all the plan's own; the numbers
    stay the same."""
    case = Case(shares=((3, 1), (4,)))
    rules = (
        PolicyRule(edge="n0.nic", below=5e6, schedule=ScheduleSpec(kind=ScheduleKind.GPIPE)),
        PolicyRule(edge="n0.nic", below=9e6, schedule=ScheduleSpec(kind=ScheduleKind.KFKB, k=3)),
    )
    results = ranks(3, train_by_policy, case, rules, [1e7, 6e6, 1e6, 9e6])
    assert not differences(replace(case, steps=4), [outcome for outcome, _ in results])
    expected = [ScheduleSpec(), rules[1].schedule, rules[0].schedule, ScheduleSpec()]
    assert all(used == list(map(repr, expected)) for _, used in results)
