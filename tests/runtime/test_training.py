"""Training under a plan equals training in one process: losses, every gradient, every weight."""

from __future__ import annotations

import pytest
from matrix import distinct, everything, pairwise
from rank_pool import RankPool
from training_cases import Case, differences, train_in_parallel


@pytest.mark.parametrize("case", distinct(pairwise()), ids=str)
def test_training_equals_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", distinct(everything()), ids=str)
def test_every_case_equals_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))
