"""Training by compiled stages, for the ranks of a test."""

from __future__ import annotations

from unittest import mock

import torch
from runtime.training_cases import (
    SMALL_CLIP,
    Case,
    KeepGradients,
    Outcome,
    built,
    cut_of,
    outcome_of,
    plan_of,
)
from torch._dynamo.utils import counters

from argosy.runtime.stages import compiling
from argosy.runtime.step.trainer import parallelize


def train_compiled(case: Case, backend: str) -> tuple[Outcome, int]:
    """What training gave, and how many graphs were compiled on this rank. To be called by every
    rank."""
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    counters.clear()
    model, loss_fn, batch = built(case)
    with mock.patch.object(compiling, "BACKEND", backend):
        trainer = parallelize(
            model,
            loss_fn,
            KeepGradients,
            batch,
            plan_of(case),
            clip_norm=SMALL_CLIP if case.clip else None,
            cut=cut_of(case),
            compile_stages=True,
        )
        losses = [trainer.step(batch) for _ in range(case.steps)]
    return outcome_of(trainer, losses), counters["stats"]["unique_graphs"]
