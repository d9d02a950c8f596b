"""Gradient sums by PowerSGD equal the same algorithm in one process, whoever shares the samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.powersgd_cases import factored_plan, train_factored, train_factored_alone
from runtime.rank_pool import RankPool
from runtime.training_cases import Case, Outcome, box_of

from argosy.cluster.host import Tier
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.plan.offload import Offload
from argosy.plan.plan import Algorithm
from argosy.plan.runnable import check_movable, unsupported

REPLICAS = Case(shares=((3, 1),), num_micro_batches=2, steps=4)


def largest_difference(outcomes: list[Outcome], weights: dict[str, np.ndarray]) -> float:
    worst = 0.0
    for outcome in outcomes:
        for name, boxes in outcome.weights.items():
            for first, part in boxes:
                worst = max(
                    worst, float(np.abs(weights[name][box_of(first, part)] - part).max(initial=0.0))
                )
    return worst


@pytest.mark.parametrize(
    "case",
    [
        REPLICAS,
        Case(shares=((1, 3), (2, 1, 1)), num_micro_batches=2, steps=3, tied=True),
        Case(
            shares=((1, 2, 1),), num_micro_batches=1, steps=3, per_node=2, algorithm=Algorithm.TREE
        ),
    ],
    ids=str,
)
def test_unequal_replicas_train_as_one_process_does(ranks: RankPool, case: Case) -> None:
    outcomes = ranks(case.num_ranks, train_factored, case)
    losses, weights = train_factored_alone(case)
    assert all(outcome.losses == pytest.approx(losses, abs=1e-6) for outcome in outcomes)
    assert largest_difference(outcomes, weights) < 1e-6


def test_the_errors_of_a_checkpoint_go_on_with_as_many_holders_and_with_others(
    ranks: RankPool, tmp_path: Path
) -> None:
    whole = ranks(2, train_factored, REPLICAS, str(tmp_path), 2)
    rest = ranks(2, train_factored, REPLICAS, str(tmp_path), -1, True)
    for one, other in zip(whole, rest, strict=True):
        assert one.losses[2:] == other.losses
        assert all(
            np.array_equal(one.weights[name][0][1], other.weights[name][0][1])
            for name in one.weights
        )
    others = replace(REPLICAS, shares=((1, 2, 1),))
    _, weights = train_factored_alone(others)
    assert (
        largest_difference(ranks(3, train_factored, others, str(tmp_path), -1, True), weights)
        < 1e-6
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"zero": 1}, "zero 0 with PowerSGD"),
        ({"dtype": Dtype.FP16}, "bf16 or fp32 with PowerSGD"),
        ({"shares": ((2,),), "ratios": ((0.5, 0.5),)}, "tensor width 1 with PowerSGD"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(changes: dict[str, Any], expected: str) -> None:
    plan = factored_plan(replace(REPLICAS, **changes))
    assert any(expected in sentence for sentence in unsupported(plan))
    assert not unsupported(factored_plan(REPLICAS))
    offloaded = replace(plan.stages[0], offload=Offload(optimizer=Tier.HOST), zero=0)
    sentences = unsupported(replace(factored_plan(REPLICAS), stages=(offloaded,)))
    assert any("nothing offloaded with PowerSGD" in sentence for sentence in sentences)
    with pytest.raises(InputError, match="PowerSGD"):
        check_movable(plan)
