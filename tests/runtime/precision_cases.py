"""What a rank does in the tests of half precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from runtime.training_cases import Case, KeepGradients, built, plan_of

from argosy.dtype import Dtype
from argosy.errors import RunError
from argosy.runtime.step.trainer import parallelize

ALONE = Case(shares=((2,),), single=True, num_micro_batches=1)


def overflow(steps: int, first: float) -> tuple[list[float], list[float], int]:
    """Scales and norms of changes of the weights, step by step, and steps that were counted."""
    model, loss_fn, batch = built(replace(ALONE, dtype=Dtype.FP16))
    trainer = parallelize(
        model, loss_fn, KeepGradients, batch, plan_of(replace(ALONE, dtype=Dtype.FP16))
    )
    trainer.scale.value = first
    scales, changes = [], []
    for _ in range(steps):
        before = [held.parameter.detach().clone() for held in trainer.held()]
        trainer.step(batch)
        after = [held.parameter.detach() for held in trainer.held()]
        changes.append(
            sum((a - b).square().sum().item() for a, b in zip(after, before, strict=True))
        )
        scales.append(trainer.scale.value)
    return scales, changes, trainer.steps


def singular(case: Case, first: float) -> str:
    """A loss that is finite where its gradient is not."""
    model, loss_fn, batch = built(case)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        value = loss_fn(model, batch)
        result: torch.Tensor = value + (value - value.detach()).abs().sqrt()
        return result

    trainer = parallelize(model, loss, KeepGradients, batch, plan_of(case), clip_norm=1.0)
    trainer.scale.value = first
    try:
        for _ in range(3):
            trainer.step(batch)
    except RunError as error:
        return str(error)
    return "nothing was wrong"
