"""Compute the loss of a batch under a plan without training on it: run the forwards of a step with
layers in eval mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from argosy.errors import invalid
from argosy.runtime.graphs.calls import RANDOM
from argosy.runtime.processes.failure import in_contact_beside_others
from argosy.runtime.stages.graph_stage import GraphStage
from argosy.runtime.stages.stage import LayerStage
from argosy.runtime.stages.weighing import Tally, weight_of
from argosy.runtime.step.batch import check_batch, filled_up, parts_of

if TYPE_CHECKING:
    from argosy.runtime.step.trainer import Trainer


def evaluate(trainer: Trainer, batch: Any) -> float:
    """Return the loss of a batch on every rank. Every rank calls this with the same batch, between
    two steps.

    A batch of more samples than the plan's is evaluated in several parts.
    """
    tally, recorder, plan = Tally(), trainer.recorder, trainer.plan
    records, recorder.enabled = recorder.enabled, False
    losses = torch.zeros((), dtype=torch.float64, device=trainer.device)
    try:
        with _evaluating(trainer), in_contact_beside_others("in an evaluation"):
            for part in parts_of(batch, plan.global_batch):
                samples = check_batch(part, plan, may_be_short=trainer.takes_short_batches)
                whole = filled_up(part, samples, plan)
                losses += trainer.executor.step(whole, tally, samples=samples, trains=False).sum()
            figures = torch.cat([losses[None], tally.sums(losses)])
            dist.all_reduce(figures)
    finally:
        recorder.enabled = records
    loss, *sums = figures.tolist()
    return float(loss) / weight_of(sums, trainer.steps, plan.global_batch)


@contextlib.contextmanager
def _evaluating(trainer: Trainer) -> Iterator[None]:
    """Set every module of this rank's layers to eval mode in the context, and restore it
    afterwards."""
    modules: dict[nn.Module, bool] = {}
    for program in trainer.executor.programs.values():
        if isinstance(program, LayerStage):
            modules |= {
                module: module.training for layer in program.layers for module in layer.modules()
            }
        elif isinstance(program, GraphStage):
            _check_captured(program)
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in modules.items():
            module.training = training


def _check_captured(program: GraphStage) -> None:
    """Raise an ``InputError`` if a captured program does something only in training, which cannot
    be removed: it is captured as it trains."""
    graph = program.cut.graph
    drawn = next((node.op for node in graph.nodes if node.op in RANDOM), None)
    if drawn is not None or graph.updates:
        actual = "random numbers" if drawn is not None else "statistics over the batch"
        expected = "a captured program that does the same in training and in evaluation"
        raise invalid("evaluate", actual, expected)
