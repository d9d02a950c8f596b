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
from argosy.runtime.sources.evaluating import EvaluationStages
from argosy.runtime.sources.operations import GraphSource
from argosy.runtime.stages.graph_stage import GraphStage
from argosy.runtime.stages.stage import LayerStage
from argosy.runtime.stages.weighing import Tally, weight_of
from argosy.runtime.step.batch import filled_up, parts_of

if TYPE_CHECKING:
    from argosy.runtime.step.trainer import Trainer


def evaluate(trainer: Trainer, batch: Any) -> float:
    """Return the loss of a batch on every rank. Every rank calls this with the same batch, between
    two steps.

    A batch of more samples than the plan's is evaluated in several parts.
    """
    tally, recorder, plan = Tally(), trainer.recorder, trainer.plan
    captured = _captured(trainer)
    may_be_short = (captured or trainer).takes_short_batches
    records, recorder.enabled = recorder.enabled, False
    losses = torch.zeros((), dtype=torch.float64, device=trainer.device)
    try:
        with _evaluating(trainer, captured), in_contact_beside_others("in an evaluation"):
            for part in parts_of(batch, plan.global_batch):
                samples = trainer.check_batch(part, may_be_short=may_be_short)
                whole = filled_up(part, samples, plan)
                losses += trainer.executor.step(whole, tally, samples=samples, trains=False).sum()
            figures = torch.cat([losses[None], tally.sums(losses)])
            dist.all_reduce(figures)
    finally:
        recorder.enabled = records
    loss, *sums = figures.tolist()
    return float(loss) / weight_of(sums, trainer.steps, plan.global_batch)


def _captured(trainer: Trainer) -> EvaluationStages | None:
    """Return the stages in eval mode of a captured program, which are made once under each plan;
    None if stages consist of layers, or if devices share operations."""
    assert trainer.making is not None, "set by parallelize"
    source = trainer.making.source
    if not isinstance(source, GraphSource) or source.shares_operations:
        return None
    if trainer.evaluated is None or trainer.evaluated.source is not source:
        trainer.evaluated = EvaluationStages(source, trainer.making.maker)
    return trainer.evaluated


@contextlib.contextmanager
def _evaluating(trainer: Trainer, captured: EvaluationStages | None) -> Iterator[None]:
    """Set every module of this rank's stages to eval mode in the context, and run captured programs
    as they are in eval mode; restore both afterwards."""
    modules: dict[nn.Module, bool] = {}
    programs = trainer.executor.programs
    for program in programs.values():
        if isinstance(program, LayerStage):
            modules |= {
                module: module.training for layer in program.layers for module in layer.modules()
            }
        elif isinstance(program, GraphStage):
            modules |= {module: module.training for module in program.model.modules()}
            if captured is None:
                _check_captured(program)
    own = {at: program for at, program in programs.items() if isinstance(program, GraphStage)}
    running = programs if captured is None else captured.programs(own)
    try:
        for module in modules:
            module.training = False
        with trainer.executor.running(running):
            yield
    finally:
        for module, training in modules.items():
            module.training = training
        for gate in trainer.gates.values():
            gate.discard()


def _check_captured(program: GraphStage) -> None:
    """Raise an ``InputError`` if a program on groups of devices does something only in training,
    which cannot be removed: their shares are chosen for the program as it trains."""
    graph = program.cut.graph
    drawn = next((node.op for node in graph.nodes if node.op in RANDOM), None)
    if drawn is not None or graph.updates:
        actual = "random numbers" if drawn is not None else "statistics over the batch"
        expected = (
            "a program that does the same in training and in evaluation, for groups of devices"
        )
        raise invalid("evaluate", actual, expected)
