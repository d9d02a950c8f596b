"""Whatever befalls an elastic run, it ends with the losses of one process, in time, and leaves
nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.chaos import LAST, SOAK_RATE, draw, is_cut, play
from runtime.programs import double_gpt

SAMPLE = (68,)
SEEDS = range(LAST + 1)


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_sample_of_misfortunes(seed: int, tmp_path: Path) -> None:
    play(draw(seed, cuts=is_cut(seed)), tmp_path, cuts=is_cut(seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed not in SAMPLE])
def test_all_misfortunes(seed: int, tmp_path: Path) -> None:
    play(draw(seed, cuts=is_cut(seed)), tmp_path, cuts=is_cut(seed))


class Disturbed(torch.optim.AdamW):
    """An optimizer that leaves out one step, or whose first gradients are rounded differently."""

    def __init__(self, parameters: Any, lr: float, *, skipped: int = -1, factor: float = 1) -> None:
        super().__init__(parameters, lr=lr)
        self.num_steps, self.skipped, self.factor = 0, skipped, factor

    def step(self, closure: Any = None) -> Any:
        if self.num_steps == 0:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.factor)
        self.num_steps += 1
        return None if self.num_steps - 1 == self.skipped else super().step(closure)


def largest_difference(rate: float, **disturbance: Any) -> float:
    """The largest relative difference of 400 losses, trained with and without a disturbance."""
    steps = 400
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(double_gpt, "CAPTURED", True)
        patch.setattr(double_gpt, "optimizer", lambda given: Disturbed(given, rate))
        right = double_gpt.losses_alone(steps)
        patch.setattr(double_gpt, "optimizer", lambda given: Disturbed(given, rate, **disturbance))
        wrong = double_gpt.losses_alone(steps)
    torch.set_default_dtype(torch.float32)
    return max(abs(one - other) / one for one, other in zip(right, wrong, strict=True))


def test_a_soak_shows_a_lost_step_and_no_rounding() -> None:
    """Losses of long runs can be held to 1e-7 at the rate of soaks alone."""
    assert largest_difference(0.01, factor=1 + 1e-15) > 1e-11
    assert largest_difference(SOAK_RATE, factor=1 + 1e-15) < 1e-13
    assert largest_difference(SOAK_RATE, skipped=200) > 1e-4
