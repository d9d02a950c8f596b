"""Export a plan as a shell script that starts Megatron-LM with its flags.

The layers go into ``--pipeline-model-parallel-layout``: E is the embedding, t a block, L the head
with its loss, ``|`` ends a stage, ``t*8`` is eight blocks. Under an interleaved schedule the stages
of the layout are assigned to the ranks in turn.

Megatron-LM cannot express: stages that differ in replicas, widths, context or expert parallelism,
models in another shape than its GPT (``architecture``), blocks of two kinds, fp8 without a recipe
(final); windows of attention in some blocks; uneven shares and ratios; ZeRO beyond the optimizer's
state; recomputation per stage; schedules other than 1F1B and its interleaved form; a policy. Its
heterogeneous layers are blocks of different shapes, not devices.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby

from argosy.cost.remembered import remembered
from argosy.exporters.architecture import (
    Value,
    model_arguments,
    precision_arguments,
    shape_has_words,
)
from argosy.exporters.form import (
    Export,
    Limit,
    head,
    limit,
    settle,
    strongest_recompute,
    target_limits,
    zero_level,
)
from argosy.exporters.grid import ParallelGrid, grid_of, launch_script
from argosy.plan.plan import ModelRef, Plan, Recompute
from argosy.plan.targets import TARGETS, Target, TargetName
from argosy.workload.architecture import Architecture
from argosy.workload.chain import Chain
from argosy.workload.systems import Selective

# What the target can express.
TARGET = TARGETS[TargetName.MEGATRON]
LETTERS = {"embedding": "E", "block": "t", "head": "L"}
"""The letter of each kind of layer in a layout."""
# The flags of each kind of recomputation. The memory of a selective plan was computed for the
# recomputation of core attention.
_RECOMPUTE: dict[Recompute, dict[str, Value]] = {
    Recompute.NONE: {},
    Recompute.SELECTIVE: {"recompute_granularity": "selective", "recompute_modules": "core_attn"},
    Recompute.FULL: {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
# The flags of each optimizer.
OPTIMIZERS: dict[str, dict[str, Value]] = {
    "adamw": {"optimizer": "adam"},
    "adam": {"optimizer": "adam", "weight_decay": 0.0},
    "momentum": {"optimizer": "sgd", "sgd_momentum": 0.9},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.0},
}
# Before Blackwell, Megatron-LM requires one work queue per device if tensors or sequences are
# split.
_ENVIRONMENT = "export CUDA_DEVICE_MAX_CONNECTIONS=1"


def export_megatron(
    plan: Plan, chain: Chain, architecture: Architecture, *, lossy: bool = False
) -> Export:
    """``megatron.sh``: the flags once, and the processes of the host that it runs on."""
    lost = settle(limits(plan, chain, architecture), lossy=lossy, target=TargetName.MEGATRON)
    grid = grid_of(plan)
    flags = [
        _flag(name, value) for name, value in arguments(plan, chain, architecture, grid).items()
    ]
    before = [_ENVIRONMENT, "ARGUMENTS=(", *(f"  {flag}" for flag in flags), ")"]
    program = 'pretrain_gpt.py "${ARGUMENTS[@]}" "$@"'
    script = launch_script(head(TARGET, plan, chain), grid.runs, program, before=before)
    return Export(files=(("megatron.sh", script),), lost=lost)


def limits(plan: Plan, chain: Chain, architecture: Architecture) -> Iterator[Limit]:
    """Yield everything in a plan that the target cannot express."""
    yield from model_limits(plan.model, chain, architecture, TARGET)
    yield from target_limits(plan, TARGET)
    yield from selective_is_meant(plan, TARGET)


def model_limits(
    model: ModelRef, chain: Chain, architecture: Architecture, target: Target
) -> Iterator[Limit]:
    """Yield everything in a model that the target cannot express, whatever the plan."""
    yield from layers_have_letters(chain, target.name)
    yield from shape_has_words(architecture, model, target.name)


def selective_is_meant(plan: Plan, target: Target) -> Iterator[Limit]:
    """Yield a limit for selective recomputation that the plan's memory was not computed for.

    The target recomputes core attention only, which keeps more memory than the plan assumes.
    """
    if remembered(plan).calibration.selective is Selective.ATTENTION:
        return
    for index, stage in enumerate(plan.stages):
        if stage.recompute is Recompute.SELECTIVE:
            expected = (
                f"none or full: {target.name} recomputes core attention alone and keeps more than "
                "was planned"
            )
            hint = "--lossy writes it as it is"
            yield limit(f"stages[{index}].recompute", "selective", expected, suggestion=hint)
            return


def layers_have_letters(chain: Chain, target: str) -> Iterator[Limit]:
    """Yield a limit unless the model is an embedding, equal blocks and a head."""
    blocks = [layer for layer in chain.layers if layer.kind == "block"]
    for layer in chain.layers:
        is_odd = layer.kind == "block" and layer.parameters != blocks[0].parameters
        if layer.kind not in LETTERS or is_odd:
            expected = f"an embedding, blocks of one kind and a head, which {target} lays out"
            yield limit("model.name", f"{chain.name} with {layer.name}", expected, final=True)
            return


def arguments(
    plan: Plan, chain: Chain, architecture: Architecture, grid: ParallelGrid
) -> dict[str, Value]:
    """Return the names and values of all flags."""
    flags: dict[str, Value] = {
        "tensor_model_parallel_size": grid.tensor,
        "pipeline_model_parallel_size": grid.pipeline,
        "context_parallel_size": grid.context,
        "expert_model_parallel_size": grid.expert,
    }
    if len(plan.stages) > 1:
        flags["pipeline_model_parallel_layout"] = layout(plan, chain)
    if grid.tensor > 1:
        flags["sequence_parallel"] = True
    flags |= {"micro_batch_size": grid.samples, "global_batch_size": plan.global_batch}
    flags |= OPTIMIZERS.get(plan.model.optimizer, {})
    if zero_level(plan, TARGET) == 1:
        flags["use_distributed_optimizer"] = True
    flags |= _RECOMPUTE[strongest_recompute(plan)]
    return flags | precision_arguments(plan) | model_arguments(architecture, plan.model)


def layout(plan: Plan, chain: Chain) -> str:
    """Return the layers of every stage as letters."""
    return "|".join(
        _stage([LETTERS[layer.kind] for layer in chain.layers_of(s)]) for s in plan.stages
    )


def _stage(letters: Sequence[str]) -> str:
    """Return the letters of a stage with runs merged.

    >>> _stage(["E", "t", "t", "t"])
    'Et*3'
    """
    runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
    return "".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)


def _flag(name: str, value: Value) -> str:
    """Return a flag with its value as shell text."""
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag} {shlex.quote(str(value))}"
