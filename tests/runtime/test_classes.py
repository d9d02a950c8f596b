"""Losses over classes that several devices divide, and their gradients, are those of torch on one
device."""

from __future__ import annotations

import pytest
import torch
from runtime.class_cases import Problem, divided, gradient_of
from runtime.rank_pool import RankPool
from torch.nn import functional

from argosy.runtime.graphs.classes import HeldRows, lookup, picked_losses

PROBLEMS = [
    Problem((7, 11)),
    Problem((7, 11), is_weighted=True, ignored=0.4),
    Problem((7, 11), summed=False, is_weighted=True, ignored=0.4),
    Problem((7, 11), ignored=1.0),
    Problem((2, 5, 3, 4), ignored=0.2),
    Problem((9,)),
    Problem((64, 31), dtype=torch.bfloat16),
]


@pytest.mark.parametrize("ratios", [(0.7, 0.3), (0.25, 0.5, 0.25)], ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.shape}")
def test_a_divided_loss_is_the_loss(
    ranks: RankPool, problem: Problem, ratios: tuple[float, ...]
) -> None:
    x, targets, weights = problem.drawn()
    x.requires_grad_()
    expected = functional.cross_entropy(
        x, targets, weights, reduction="sum" if problem.summed else "none", ignore_index=-100
    )
    expected.backward(gradient_of(expected))
    kept = targets[targets != -100]
    counted = weights[kept].sum() if weights is not None else float(len(kept.flatten()))
    results = ranks(len(ratios), divided, problem, ratios)
    half = problem.dtype is torch.bfloat16
    close = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-12, "atol": 1e-12}
    for result in results:
        torch.testing.assert_close(result["losses"], expected.detach(), **close)
        assert result["counted"].item() == pytest.approx(float(counted))
        size = result["gradient"].shape[problem.dim]
        part = x.grad.narrow(problem.dim, result["first"], size)
        torch.testing.assert_close(result["gradient"], part, **close)


@pytest.mark.parametrize("number", [-1, 7])
def test_a_number_that_no_device_has_is_refused(number: int) -> None:
    rows, numbers = HeldRows(2, 3, 7), torch.tensor([number, 3])
    with pytest.raises(RuntimeError, match="an index is out of range: expected 0 to 6"):
        lookup(rows, torch.ones(3, 2), numbers)
    with pytest.raises(RuntimeError, match="an index is out of range: expected 0 to 6"):
        picked_losses(rows, torch.zeros(2, 3), numbers, None, 0, -100)
