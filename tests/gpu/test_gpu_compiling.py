"""Compiled stages on a GPU train as one process does on the CPU."""

from __future__ import annotations

import pytest
from gpu.gpu_ranks import need_ranks
from runtime.compiling_cases import train_compiled
from runtime.rank_pool import RankPool
from runtime.training_cases import Case, differences

from argosy.plan.plan import Recompute


@pytest.mark.parametrize(
    "case",
    [
        Case(shares=((2,),), num_micro_batches=2),
        Case(shares=((2,), (2,)), num_micro_batches=3, recompute=Recompute.FULL),
        Case(model="cnn", shares=((2,), (2,)), num_micro_batches=2, work=(0.5, 0.5)),
    ],
    ids=str,
)
def test_generated_code_trains_as_one_process(nccl: RankPool, case: Case) -> None:
    need_ranks(case.num_ranks)
    assert not differences(
        case, [outcome for outcome, _ in nccl(case.num_ranks, train_compiled, case, "inductor")]
    )
