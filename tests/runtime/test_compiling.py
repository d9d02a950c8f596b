"""Compiled stages train as one process does, one graph for each stage."""

from __future__ import annotations

import pytest
from runtime.compiling_cases import train_compiled
from runtime.rank_pool import RankError, RankPool
from runtime.training_cases import Case, differences

from argosy.plan.plan import Recompute
from argosy.schedule import ScheduleKind

FAST = "aot_eager"
"""torch's own gradients and partition, without generated code."""


CASES = [
    (
        Case(
            shares=((2,), (2,)), num_micro_batches=3, clip=True, tied=True, recompute=Recompute.FULL
        ),
        [1, 1],
    ),
    (Case(model="cnn", shares=((2,), (2,)), num_micro_batches=2, work=(0.5, 0.5)), [1, 1]),
]
MORE = [
    (Case(shares=((3, 1), (4,)), num_micro_batches=3), [1, 1, 1]),
    (
        Case(model="t5", shares=((2,), (2,)), num_micro_batches=3, recompute=Recompute.SELECTIVE),
        [1, 1],
    ),
    (Case(shares=((1, 1),), num_micro_batches=2, zero=3), [6, 6]),
    (Case(model="t5", shares=((2,), (2,)), num_micro_batches=2, work=(0.4, 0.6)), [1, 1]),
]


@pytest.mark.parametrize(
    ("case", "graphs"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)],
    ids=str,
)
def test_compiled_stages_train_as_one_process(
    ranks: RankPool, case: Case, graphs: list[int]
) -> None:
    results = ranks(case.num_ranks, train_compiled, case, FAST)
    assert not differences(case, [outcome for outcome, _ in results])
    assert [count for _, count in results] == graphs


@pytest.mark.exhaustive
def test_generated_code_trains_as_one_process(ranks: RankPool) -> None:
    case = Case(shares=((2,), (2,)), num_micro_batches=2)
    assert not differences(
        case, [outcome for outcome, _ in ranks(2, train_compiled, case, "inductor")]
    )


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            Case(kind=ScheduleKind.ZERO_BUBBLE),
            "schedule: found zero-bubble, expected a schedule that does not split backwards, "
            "because a compiled backward is one piece",
        ),
        (
            Case(shares=((2,),), ratios=((0.5, 0.5),)),
            r"stages\[0\]: found tensor width 2, expected tensor width 1 for compiled stages",
        ),
    ],
    ids=["split", "group"],
)
def test_what_cannot_be_compiled_is_refused(ranks: RankPool, case: Case, message: str) -> None:
    with pytest.raises(RankError, match=message):
        ranks(case.num_ranks, train_compiled, case, FAST)
