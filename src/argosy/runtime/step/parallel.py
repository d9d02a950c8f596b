"""Turn a model and a plan, or a model and a program, into a trainer for this rank.

    program = argosy.share_program(build, cluster)                   # the same on every rank
    model, loss_fn, batch = build()
    trainer = argosy.parallelize(model, loss_fn, optimizer, batch, program)
    trainer.step(batch)

This runs under torchrun, with one process per device of the cluster, in its order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, overload

from torch import nn

from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.group import device_group
from argosy.dtype import Dtype
from argosy.plan.file import load_plan
from argosy.plan.plan import Plan
from argosy.runtime.sources.optimizing import OptimizerFactory
from argosy.runtime.stages.stage import LossFunction
from argosy.runtime.step import spmd, trainer
from argosy.solve.programs.placement import Pricing
from argosy.solve.programs.segments import find_segmented
from argosy.solve.programs.spmd import Program
from argosy.workload.capture.trace import Build, capture


def share_program(
    build: Build, cluster: Cluster | str, *, dtype: Dtype = Dtype.FP32, name: str = "program"
) -> Program:
    """Return the cheapest program that shares the step of ``build() -> (model, loss_fn, batch)``
    among all devices."""
    where = load_cluster(cluster) if isinstance(cluster, str) else cluster
    group = device_group(where, [device.name for device in where.devices], dtype)
    return find_segmented(capture(build, name=name), Pricing(group=group))


@overload
def parallelize(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer_factory: OptimizerFactory,
    example_batch: Any,
    plan: Plan | str | Path,
    **options: Any,
) -> trainer.Trainer: ...


@overload
def parallelize(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer_factory: OptimizerFactory,
    example_batch: Any,
    plan: Program,
) -> spmd.Trainer: ...


def parallelize(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer_factory: OptimizerFactory,
    example_batch: Any,
    plan: Plan | Program | str | Path,
    **options: Any,
) -> trainer.Trainer | spmd.Trainer:
    """Return a trainer for this rank: of a plan's stages (``runtime.step.trainer.parallelize``,
    with its options), or of a program.

    A plan may be given by its file. A program contains the loss that it was captured with;
    ``loss_fn`` is not called.
    """
    if isinstance(plan, Program):
        return spmd.parallelize_program(model, optimizer_factory, example_batch, plan)
    plan = load_plan(plan) if isinstance(plan, str | Path) else plan
    return trainer.parallelize(model, loss_fn, optimizer_factory, example_batch, plan, **options)
