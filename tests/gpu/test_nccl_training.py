"""Ranks that train over NCCL have the losses, gradients and weights of one process, and the losses
of gloo."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.gpu_ranks import need_ranks
from runtime.matrix import SCHEDULES, make
from runtime.migration_cases import alone, travel, worst
from runtime.parts_cases import captured, cores, planned, train_alone, train_by
from runtime.rank_pool import RankPool
from runtime.test_context import GRIDS
from runtime.test_migration import JOURNEYS
from runtime.training_cases import Case, differences, train_in_parallel

from argosy.plan.plan import Algorithm, Recompute
from argosy.schedule import ScheduleKind

EVEN, UNEVEN, ALONE = (0.5, 0.5), (0.7, 0.3), (1.0,)
TWO, FOUR = ((2,), (2,)), ((1,), (1,), (1,), (1,))
SETTINGS = (Recompute.NONE, 0, (False, False, False))
CASES = [
    *(make("gpt", schedule, TWO, 4, *SETTINGS) for schedule in SCHEDULES),
    *(make("gpt", schedule, FOUR, 5, *SETTINGS) for schedule in SCHEDULES),
    Case(shares=((3, 1), (4,)), clip=True, tied=True),
    Case(shares=((2, 1, 1), (4,)), kind=ScheduleKind.KFKB, k=2),
    Case(
        shares=((3, 1), (2, 2)),
        num_micro_batches=6,
        kind=ScheduleKind.EAGER,
        recompute=Recompute.FULL,
    ),
    Case(shares=((3, 1), (1, 3)) * 2, num_micro_batches=4, kind=ScheduleKind.INTERLEAVED),
    Case(
        shares=((3, 1), (1, 3), (1, 3), (3, 1)), num_micro_batches=4, kind=ScheduleKind.DUALPIPE_V
    ),
    *(
        Case(shares=((3, 1), (2, 2)), zero=zero, clip=True, proportions=(3.0, 1.0))
        for zero in (1, 2, 3)
    ),
    Case(model="routed", shares=((1, 1), (2,)), zero=0, num_micro_batches=2),
    Case(shares=((1, 1, 1, 1),), algorithm=Algorithm.HIERARCHICAL, per_node=2, num_micro_batches=2),
    Case(shares=((1, 1, 1, 1),), algorithm=Algorithm.TREE, per_node=1, num_micro_batches=2),
    Case(
        shares=((1, 1, 1, 1),),
        algorithm=Algorithm.HIERARCHICAL,
        per_node=2,
        zero=3,
        num_micro_batches=2,
    ),
    Case(shares=((2,),), ratios=(UNEVEN,), num_micro_batches=2),
    Case(shares=((2,), (2,)), ratios=(UNEVEN, EVEN), num_micro_batches=3, tied=True),
    Case(shares=((1, 1),), ratios=(UNEVEN,), zero=2, clip=True, num_micro_batches=2),
    Case(
        model="llama", shares=((2,), (2,)), ratios=(UNEVEN, EVEN), context=True, zero=2, clip=True
    ),
    Case(model="llama", shares=((3, 1),), ratios=(UNEVEN,), context=True, single=True),
    GRIDS[0],
    Case(model="mixture", shares=((1, 2), (2, 1)), experts=(4, 2), clip=True),
    Case(model="cnn", shares=TWO, num_micro_batches=3),
    Case(model="cnn", shares=((2,), (1, 1)), work=(0.5, 0.5), num_micro_batches=2),
]


@pytest.mark.parametrize("case", list(dict.fromkeys(CASES)), ids=str)
def test_training_over_nccl_equals_one_process(nccl: RankPool, case: Case) -> None:
    need_ranks(case.num_ranks)
    assert not differences(case, nccl(case.num_ranks, train_in_parallel, case))


@pytest.mark.parametrize("num_stages", [2, 4])
def test_losses_of_nccl_and_gloo_are_equal(nccl: RankPool, gloo: RankPool, num_stages: int) -> None:
    """In double precision, after some steps."""
    need_ranks(num_stages)
    case = Case(shares=((2,),) * num_stages, num_micro_batches=4, steps=4)
    over_nccl, over_gloo = (
        pool(num_stages, train_in_parallel, case)[0].losses for pool in (nccl, gloo)
    )
    one = replace(case, shares=((2,),))
    need_ranks(1)
    assert np.allclose(over_nccl, over_gloo, rtol=1e-12)
    assert np.allclose(over_nccl, nccl(1, train_in_parallel, one)[0].losses, rtol=1e-12)


@pytest.mark.parametrize("name", list(JOURNEYS))
def test_plans_follow_one_another_over_nccl(nccl: RankPool, name: str) -> None:
    need_ranks(4)
    journey = JOURNEYS[name]
    results = nccl(4, travel, journey)
    assert worst([outcome for _, _, outcome, _ in results], alone(journey)) < 1e-9


def test_a_program_planned_with_unequal_parts_trains_over_nccl(nccl: RankPool) -> None:
    need_ranks(2)
    plan = planned(captured(1), cores(1.0, 0.6), max_context=2)
    assert plan.stages[0].context == 2
    for losses in nccl(2, train_by, plan):
        assert losses == pytest.approx(train_alone(1), rel=1e-9)
