"""Gradients are summed by the algorithm that the plan chose, and the sum is the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import nn
from training_cases import Case, differences, train_in_parallel, ways_of_summing

from argosy.plan.plan import Algorithm
from argosy.runtime import gradients
from argosy.runtime.ledger import MOST_BUCKETS

LAYOUTS = [(((1, 2, 1, 1, 1),), 2), (((1, 1, 1, 1, 1),), 3), (((2, 1), (1, 1, 1)), 2)]
"""Shares, and devices of a node: nodes of 2, 2 and 1; of 3 and 2; two stages, one of them over two nodes."""
CASES = [
    Case(shares=shares, per_node=per_node, algorithm=algorithm, zero=zero, num_micro_batches=2)
    for (shares, per_node), algorithm, zero in itertools.product(LAYOUTS, Algorithm, (0, 1, 3))
    if algorithm is Algorithm.HIERARCHICAL or (algorithm is Algorithm.TREE and zero == 0)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_algorithm_gives_the_gradients_of_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


@pytest.mark.parametrize(
    ("algorithm", "per_node", "expected"),
    [
        (Algorithm.RING, 2, "Ring"),
        (Algorithm.HIERARCHICAL, 2, "Nodes"),
        (Algorithm.HIERARCHICAL, 8, "Ring"),
        (Algorithm.TREE, 2, "Nodes by trees"),
        (Algorithm.TREE, 8, "Nodes by trees"),
    ],
)
def test_the_plan_s_choice_is_taken(ranks: RankPool, algorithm: Algorithm, per_node: int, expected: str) -> None:
    """Within one node there is nothing hierarchical."""
    case = Case(shares=((1, 1, 1, 1),), algorithm=algorithm, per_node=per_node, num_micro_batches=1)
    assert ranks(4, ways_of_summing, case) == [[expected]] * 4


def test_gradients_are_summed_in_buckets_and_those_that_nobody_has_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """With buckets of three numbers, of which many are under way; the other holder has twice as much."""

    class Doubled:
        under_way, most = 0, 0

        def begin(self, vector: torch.Tensor) -> Callable[[], None]:
            self.under_way += 1
            self.most = max(self.most, self.under_way)

            def finish() -> None:
                self.under_way -= 1
                vector.mul_(3)

            return finish

    monkeypatch.setattr(gradients, "BUCKET_BYTES", 24)
    weights = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float64, torch.float32) * 12]
    for number, weight in enumerate(weights[:-1]):
        weight.grad = torch.full_like(weight, number)
    way: Any = Doubled()
    gradients._sum(way, weights)
    assert way.under_way == 0
    assert way.most == MOST_BUCKETS + 1, "and who has a gradient at all"
    assert [float(weight.grad[0]) for weight in weights[:-1] if weight.grad is not None] == [3 * n for n in range(23)]
    assert weights[-1].grad is None
    gradients._sum(way, [])
