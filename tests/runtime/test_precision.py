"""Products in half precision: as in one process under autocast, with gradients that stay finite."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from runtime.precision_cases import ALONE, overflow, singular
from runtime.rank_pool import RankPool
from runtime.training_cases import Case, differences, train_alone, train_in_parallel
from torch import nn

from argosy.dtype import Dtype
from argosy.plan.plan import Recompute
from argosy.runtime.stages.defer import Deferral
from argosy.runtime.step.scaling import LossScale
from argosy.schedule import ScheduleKind

HALF = Case(single=True, dtype=Dtype.FP16, num_micro_batches=2)
CASES = [
    replace(HALF, shares=((2,), (1, 1)), zero=3, recompute=Recompute.SELECTIVE, clip=True),
    replace(HALF, dtype=Dtype.BF16, kind=ScheduleKind.ZERO_BUBBLE),
    replace(HALF, model="unet"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_one_process_under_autocast(ranks: RankPool, case: Case) -> None:
    results = ranks(case.num_ranks, train_in_parallel, case)
    assert not differences(case, results)
    assert results[0].losses != pytest.approx(
        train_alone(replace(case, dtype=Dtype.FP32)).losses, rel=1e-6
    )


def test_the_scale_halves_at_an_overflow_and_doubles_after_many_steps_without() -> None:
    scale = LossScale(active=True)
    scale.observe(finite=False)
    assert scale.value == 2.0**15
    for _ in range(1999):
        scale.observe(finite=True)
    assert scale.value == 2.0**15
    scale.observe(finite=True)
    assert scale.value == 2.0**16
    for finite in (True,) * 1999 + (False,) + (True,) * 1999:
        scale.observe(finite=finite)
    assert scale.value == 2.0**15, "an overflow begins the count anew"
    idle = LossScale(active=False)
    idle.observe(finite=False)
    assert idle.value == 1.0


def test_a_step_that_overflows_changes_no_weight_and_is_counted(ranks: RankPool) -> None:
    ((scales, changes, steps),) = ranks(1, overflow, 6, 2.0**20)
    left_out = [change == 0 for change in changes]
    assert left_out[0]
    assert not left_out[-1]
    assert scales == [2.0 ** (20 - sum(left_out[: at + 1])) for at in range(6)]
    assert steps == 6


@pytest.mark.parametrize(
    ("dtype", "first", "says"),
    [
        (Dtype.FP32, 1.0, r"^the gradient of step 0 is not finite, though the loss is 3\.\d+$"),
        (
            Dtype.FP16,
            4.0,
            r"^the gradient of step 2 is not finite, though the loss is 3\.\d+ and its scale 1$",
        ),
    ],
)
def test_a_gradient_that_no_scale_makes_finite_ends_the_run(
    ranks: RankPool, dtype: Dtype, first: float, says: str
) -> None:
    (text,) = ranks(1, singular, replace(ALONE, dtype=dtype), first)
    assert re.search(says, text), text


def test_a_convolution_under_autocast_has_its_weight_gradient_at_once() -> None:
    torch.manual_seed(0)
    layer, x, deferral = nn.Conv1d(3, 5, 3), torch.randn(2, 3, 8), Deferral()
    with torch.autocast("cpu", torch.bfloat16), deferral:
        result = layer(x)
    assert result.dtype is torch.bfloat16
    result.float().square().sum().backward()
    assert deferral.take() == []
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.conv1d(x, weight := layer.weight.detach().requires_grad_(), layer.bias)
    plain.float().square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, weight.grad)
    with deferral:
        layer(x).square().sum().backward()
    assert len(deferral.take()) == 1, "without autocast it waits"
