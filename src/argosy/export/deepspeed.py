"""A plan for DeepSpeed: its JSON config, a hostfile, the arguments of its pipeline module, and the command.

``pipeline.json`` holds what a program passes to ``PipelineModule``: the number of stages, the topology, a partition
method that cuts as the plan does where there is one, and the cuts themselves as ``parts``: stage s has the layers from
``parts[s]`` to ``parts[s + 1]``.

What DeepSpeed cannot express: stages that differ in replicas or widths, context and expert parallelism (final); cuts
that its methods would not make, unless a program sets ``parts`` itself; uneven shares and ratios; ZeRO beyond 1 in a
pipeline; selective recomputation, or recomputation per stage; schedules other than 1F1B; a policy; hosts whose ranks
are apart or whose devices are out of order.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence

from argosy.dtype import Dtype
from argosy.export.form import (
    Export,
    Limit,
    limit,
    policy_is_absent,
    recomputation_is_one,
    samples_are_even,
    schedule_is_one_of,
    settle,
    stages_are_alike,
    strongest_recompute,
    tensors_are_even,
    zero_is_one_of,
    zero_level,
)
from argosy.export.grid import Grid, grid_of, hosts_are_whole
from argosy.plan.plan import Plan, Recompute
from argosy.schedule import ScheduleKind

NAME = "DeepSpeed"
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion", "sgd": "SGD", "momentum": "SGD"}
_MOMENTUM = 0.9


def export_deepspeed(plan: Plan, *, lossy: bool = False) -> Export:
    lost = settle(limits(plan), lossy=lossy)
    grid = grid_of(plan)
    include = "@".join(f"{host.name}:{','.join(map(str, host.devices))}" for host in grid.hosts)
    options = shlex.join(["--hostfile", "hostfile", "--include", include])
    command = f'deepspeed {options} train.py --deepspeed_config ds_config.json "$@"'
    files = (
        ("ds_config.json", json.dumps(_config(plan, grid), indent=1) + "\n"),
        ("pipeline.json", json.dumps(_pipeline(plan, grid), indent=1) + "\n"),
        ("hostfile", "".join(f"{host.name} slots={max(host.devices) + 1}\n" for host in grid.hosts)),
        ("run.sh", f"#!/usr/bin/env bash\n{command}\n"),
    )
    return Export(files=files, lost=lost)


def limits(plan: Plan) -> Iterator[Limit]:
    yield from stages_are_alike(plan, NAME)
    for name in ("context", "expert"):
        if getattr(plan.stages[0], name) > 1:
            expected = f"1: {NAME}'s pipeline has data, pipeline and tensor parallelism only"
            yield limit(f"stages[0].{name}", getattr(plan.stages[0], name), expected, final=True)
    yield from samples_are_even(plan, NAME)
    yield from tensors_are_even(plan, NAME)
    yield from recomputation_is_one(plan, NAME)
    yield from zero_is_one_of(plan, NAME, _levels(plan))
    yield from schedule_is_one_of(plan, NAME, (ScheduleKind.ONE_F_ONE_B,))
    yield from policy_is_absent(plan, NAME)
    yield from hosts_are_whole(plan, NAME, ascending=True)
    if len(plan.stages) > 1 and _method(plan) is None:
        expected = f"as many layers in every stage, which {NAME} can be asked for"
        suggestion = "--lossy writes parts for a PipelineModule that sets them in _partition_layers"
        found = "/".join(str(stage.end - stage.first) for stage in plan.stages)
        yield limit("stages.layers", found, expected, suggestion=suggestion)
    if any(stage.recompute is Recompute.SELECTIVE for stage in plan.stages):
        yield limit("stages.recompute", "selective", f"none or full: {NAME} recomputes whole layers; full is written")
    if plan.model.dtype is Dtype.FP8:
        yield limit("model.dtype", "fp8", "bf16, fp16 or fp32", final=True)
    if plan.model.optimizer not in _OPTIMIZERS:
        yield limit("model.optimizer", plan.model.optimizer, f"one of {', '.join(_OPTIMIZERS)}", final=True)


def _levels(plan: Plan) -> tuple[int, ...]:
    return (0, 1) if len(plan.stages) > 1 else (0, 1, 2, 3)


def _config(plan: Plan, grid: Grid) -> dict[str, object]:
    dtype, optimizer, level = plan.model.dtype, plan.model.optimizer, zero_level(plan, _levels(plan))
    rates = {"lr": 1e-4} | ({"momentum": _MOMENTUM} if optimizer == "momentum" else {})
    found: dict[str, object] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": grid.samples,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "optimizer": {"type": _OPTIMIZERS[optimizer], "params": rates},
        "zero_optimization": {"stage": level},
    }
    if level and _OPTIMIZERS[optimizer] == "SGD":  # it would refuse to shard the state of one that it did not test
        found["zero_allow_untested_optimizer"] = True
    return found | ({str(dtype): {"enabled": True}} if dtype in (Dtype.BF16, Dtype.FP16) else {})


def _pipeline(plan: Plan, grid: Grid) -> dict[str, object]:
    return {
        "num_stages": grid.pipeline,
        "topology": {"pipe": grid.pipeline, "data": grid.data, "model": grid.tensor},
        "partition_method": _method(plan) or "uniform",
        "parts": _parts(plan),
        "activation_checkpoint_interval": 0 if strongest_recompute(plan) is Recompute.NONE else 1,
    }


def _parts(plan: Plan) -> list[int]:
    return [0, *(stage.end for stage in plan.stages)]


def _method(plan: Plan) -> str | None:
    """A partition method of DeepSpeed's that cuts as the plan does."""
    return "uniform" if _parts(plan) == uniform_parts(plan.stages[-1].end, len(plan.stages)) else None


def uniform_parts(layers: int, stages: int) -> Sequence[int]:
    """As many layers each, the first stages one more where it does not come out even.

    >>> uniform_parts(10, 4)
    [0, 3, 6, 8, 10]
    """
    size, rest = divmod(layers, stages)
    return [stage * size + min(stage, rest) for stage in range(stages + 1)]
