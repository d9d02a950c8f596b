"""Training by compiled stages, for the ranks of a test."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from training_cases import Case, KeepGradients, Outcome, built, cut_of, outcome_of, plan_of

from argosy.runtime import compiling
from argosy.runtime.trainer import parallelize


def train_compiled(case: Case, backend: str) -> tuple[Outcome, int]:
    """What training gave, and the graphs that were compiled on this rank. To be called by every rank."""
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    graphs: list[int] = []
    plain = torch._dynamo.lookup_backend(backend)  # type: ignore[no-untyped-call]

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return plain(graph, inputs)

    model, loss_fn, batch = built(case)
    with mock.patch.object(compiling, "BACKEND", counting):
        trainer = parallelize(
            model, loss_fn, KeepGradients, batch, plan_of(case), cut=cut_of(case), compile_stages=True
        )
        losses = [trainer.step(batch) for _ in range(case.steps)]
    return outcome_of(trainer, losses), len(graphs)
