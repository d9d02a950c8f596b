"""Training under a plan equals training in one process: losses, every gradient, every weight."""

from __future__ import annotations

import pytest
from runtime.matrix import distinct, everything, pairwise
from runtime.rank_pool import RankPool
from runtime.small_models import HUGGING_FACE
from runtime.training_cases import Case, differences, train_in_parallel

from argosy.schedule import ScheduleKind


@pytest.mark.parametrize("case", distinct(pairwise()), ids=str)
def test_training_equals_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name == "hf-bert" else [])
        for name in HUGGING_FACE
    ],
)
def test_hugging_face_models_train_as_in_one_process(ranks: RankPool, model: str) -> None:
    """In single precision, which is what they compute their losses in."""
    case = Case(
        model=model,
        tied=True,
        kind=ScheduleKind.KFKB,
        k=2,
        shares=((3, 1), (4,)),
        zero=1,
        clip=True,
        single=True,
    )
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


def test_stages_that_follow_one_another_on_one_worker_need_no_message(ranks: RankPool) -> None:
    case = Case(kind=ScheduleKind.INTERLEAVED, shares=((2,), (2,)), num_micro_batches=2)
    assert case.num_ranks == 1
    assert not differences(case, ranks(1, train_in_parallel, case))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_may_have_gradients_of_other_weights(ranks: RankPool, zero: int) -> None:
    """Each replica uses a layer that the other does not, and nobody uses the third kind of
    expert."""
    case = Case(model="routed", shares=((1, 1), (2,)), zero=zero, clip=True, num_micro_batches=2)
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", distinct(everything()), ids=str)
def test_every_case_equals_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))
