"""Models that one group of unequal devices shares: losses and weights are those of one process."""

from __future__ import annotations

import pytest
import torch
from runtime.rank_pool import RankPool
from runtime.shared_cases import RATIOS, alone, random_plan, searched, train, two_groups
from support.spmd_models import BUILDS

from argosy.plan.file import loads_plan

INNER_FLOATS = {"llama", "mixtral"}
"""Models that compute parts in fp32 whatever their parameters are."""
EXACT, SINGLE = 1e-9, 1e-4


def check(
    ranks: RankPool,
    name: str,
    plan: str,
    count: int,
    dtype: torch.dtype,
    tolerance: float,
    *,
    all_weights: bool = True,
) -> float:
    """Return the least share of the weights that a rank holds."""
    if name == "dropout":  # its masks are those of the plan's seed, not of torch
        (one,) = ranks(1, train, name, searched(name, 1, dtype), dtype)
        losses, weights = one.losses, {key: part for key, ((_, part),) in one.weights.items()}
    else:
        losses, weights = alone(name, dtype)
    assert len({round(loss, 9) for loss in losses}) == len(losses), "the model trains nothing"
    results = ranks(count, train, name, plan, dtype)
    for result in results:
        assert result.losses == pytest.approx(losses, rel=tolerance)
        assert result.weights.keys() == weights.keys() or not all_weights
        for key, parts in result.weights.items():
            for box, part in parts:
                expected = box.out_of(weights[key])
                torch.testing.assert_close(part, expected, rtol=10 * tolerance, atol=10 * tolerance)
    return min(result.share for result in results)


@pytest.mark.parametrize("name", list(BUILDS))
def test_a_shared_model_trains_as_one_process_does(name: str, ranks: RankPool) -> None:
    count = 2 + list(BUILDS).index(name) % 2
    plan = searched(name, count)
    (program,) = loads_plan(plan).programs
    assert program.ratios == RATIOS[count] and program.weights, "weights are cut"
    tolerance = 1e-5 if name in INNER_FLOATS else EXACT
    assert check(ranks, name, plan, count, torch.float64, tolerance) < 0.85


@pytest.mark.parametrize("name", ["language", "plain"])
def test_in_single_precision(name: str, ranks: RankPool) -> None:
    check(ranks, name, searched(name, 3, torch.float32), 3, torch.float32, SINGLE)


@pytest.mark.parametrize("name", ["perceptron", "language", "residual", "unet", "vision"])
def test_any_recorded_program_is_right(name: str, ranks: RankPool) -> None:
    """Random choices, of samples too, reach rows and collectives that no cost would choose."""
    for seed in range(3):
        check(ranks, name, random_plan(name, 3, seed), 3, torch.float64, EXACT)


def test_a_weight_of_two_stages_is_cut_in_both(ranks: RankPool) -> None:
    """GPT-2's words are read by its first and its last stage, whose groups have other ratios."""
    plan = two_groups("gpt2")
    words = "transformer.wte.weight"
    stages, programs = loads_plan(plan).stages, loads_plan(plan).programs
    assert [(one.first, one.end) for one in programs] == [
        (stage.first, stage.end) for stage in stages
    ]
    for program in programs:
        assert any(weight.name == words and "dim" in weight.stored for weight in program.weights)
    assert check(ranks, "gpt2", plan, 4, torch.float64, 1e-6, all_weights=False) < 0.5
