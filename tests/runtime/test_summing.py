"""Gradients are summed by the algorithm that the plan chose, and the sum is the same."""

from __future__ import annotations

import itertools

import pytest
from rank_pool import RankPool
from training_cases import Case, differences, train_in_parallel, ways_of_summing

from argosy.plan.plan import Algorithm

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
