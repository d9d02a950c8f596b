"""Stages of operations, cut from a captured program, train as one process does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from runtime.checkpoint_cases import decayed_without_gradient
from runtime.rank_pool import RankError, RankPool
from runtime.training_cases import Case, differences, train_in_parallel

from argosy.plan.plan import Recompute
from argosy.schedule import ScheduleKind

UNET = Case(model="unet", num_micro_batches=3)
CASES = [
    UNET,
    replace(UNET, shares=((2,), (1, 1), (2,)), work=(0.3, 0.4, 0.3), kind=ScheduleKind.KFKB, k=2),
    replace(
        UNET,
        shares=((3, 1), (4,)),
        zero=3,
        recompute=Recompute.FULL,
        clip=True,
        kind=ScheduleKind.ZERO_BUBBLE,
    ),
    Case(
        model="t5",
        work=(0.5, 0.5),
        recompute=Recompute.SELECTIVE,
        kind=ScheduleKind.GPIPE,
        zero=2,
        shares=((1, 2), (3,)),
    ),
    Case(
        model="cnn",
        work=(0.3, 0.3, 0.4),
        shares=((2,), (1, 1), (2,)),
        kind=ScheduleKind.ZERO_BUBBLE,
        num_micro_batches=4,
    ),
    Case(model="forked", shares=((3,), (2, 1), (3,))),
    Case(model="residual", shares=((4,), (4,)), num_micro_batches=1, recompute=Recompute.FULL),
]
MORE = [
    replace(
        UNET, shares=((2,), (2,), (2,), (2,)), kind=ScheduleKind.INTERLEAVED, num_micro_batches=4
    ),
    Case(
        model="t5",
        work=(0.4, 0.3, 0.3),
        shares=((3, 1), (2, 2), (4,)),
        num_micro_batches=3,
        tied=True,
        zero=1,
    ),
    Case(model="gpt", work=(0.5, 0.5), shares=((2, 1), (1, 2)), tied=True, kind=ScheduleKind.EAGER),
    Case(model="vit", work=(0.25,) * 4, shares=((2,), (2,), (2,), (2,)), single=True),
    Case(model="forked", shares=((1, 2), (3,)), recompute=Recompute.FULL),
    Case(model="residual", shares=((4,), (4,)), num_micro_batches=1),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in MORE)], ids=str
)
def test_operations_in_stages_train_as_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


def test_a_weight_that_gets_no_gradient_is_not_decayed_wherever_stages_are_cut(
    ranks: RankPool,
) -> None:
    """A stage may hand on what a later one detaches."""
    assert ranks(2, decayed_without_gradient, Case(model="forked", shares=((2,), (2,)))) == [[], []]


@pytest.mark.parametrize(
    ("shares", "count", "why"),
    [
        (((2, 2), (4,)), 1, "stage 0 divides samples over 2 replicas"),
        (((4,), (4,)), 2, "the plan runs 2 micro-batches"),
    ],
    ids=["replicas", "micro-batches"],
)
def test_statistics_over_samples_that_are_divided_are_refused_by_name(
    ranks: RankPool, shares: tuple[tuple[int, ...], ...], count: int, why: str
) -> None:
    case = Case(model="residual", shares=shares, num_micro_batches=count)
    with pytest.raises(
        RankError,
        match=rf"aten\.sub\.Tensor in body\.0\.norm_one, which uses a mean.*because {why}",
    ):
        ranks(case.num_ranks, train_in_parallel, case)
