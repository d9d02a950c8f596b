"""A plan as a shell script that starts Megatron-LM with its flags.

The layers go into ``--pipeline-model-parallel-layout``: E is the embedding, t a block, L the head with its loss, ``|``
ends a stage, ``t*8`` is eight of them. Under an interleaved schedule the stages of the layout go round the ranks.

What Megatron-LM cannot express: stages that differ in replicas, widths, context or expert parallelism, models in
another shape than its GPT (``architecture``), blocks of two kinds, fp8 without a recipe (final); windows of attention;
uneven shares and ratios; ZeRO beyond the optimizer's state; recomputation per stage; schedules other than 1F1B and its
interleaved form; a policy; hosts whose ranks are apart. Which algorithm a collective uses is left to NCCL.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby

from argosy.cost.remembered import remembered
from argosy.dtype import Dtype
from argosy.export.architecture import Value, model_arguments, precision_arguments, shape_has_words
from argosy.export.form import (
    Export,
    Limit,
    head,
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
from argosy.export.grid import Grid, grid_of, hosts_are_whole, torchrun_lines
from argosy.plan.plan import Plan, Recompute
from argosy.schedule import ScheduleKind
from argosy.workload.architecture import Architecture
from argosy.workload.chain import Chain, Selective

NAME = "Megatron-LM"
SCHEDULES = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED)
ZERO = (0, 1)
LETTERS = {"embedding": "E", "block": "t", "head": "L"}
"""By kind of layer."""
_RECOMPUTE: dict[Recompute, dict[str, Value]] = {
    Recompute.NONE: {},
    Recompute.SELECTIVE: {"recompute_granularity": "selective"},
    Recompute.FULL: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def export_megatron(plan: Plan, chain: Chain, architecture: Architecture, *, lossy: bool = False) -> Export:
    """``megatron.sh``: the flags once, and one command per host."""
    lost = settle(limits(plan, chain, architecture), lossy=lossy)
    grid = grid_of(plan)
    flags = [_flag(name, value) for name, value in arguments(plan, chain, architecture, grid).items()]
    lines = [
        "#!/usr/bin/env bash",
        head(NAME, plan, chain),
        "ARGUMENTS=(",
        *(f"  {flag}" for flag in flags),
        ")",
        *torchrun_lines(grid.hosts, 'pretrain_gpt.py "${ARGUMENTS[@]}" "$@"'),
    ]
    return Export(files=(("megatron.sh", "\n".join(lines) + "\n"),), lost=lost)


def limits(plan: Plan, chain: Chain, architecture: Architecture) -> Iterator[Limit]:
    yield from layers_have_letters(chain)
    yield from shape_has_words(architecture, plan, NAME)
    yield from stages_are_alike(plan, NAME)
    yield from samples_are_even(plan, NAME)
    yield from tensors_are_even(plan, NAME)
    yield from recomputation_is_one(plan, NAME)
    yield from zero_is_one_of(plan, NAME, ZERO)
    yield from schedule_is_one_of(plan, NAME, SCHEDULES)
    yield from policy_is_absent(plan, NAME)
    yield from hosts_are_whole(plan, NAME)
    yield from selective_is_meant(plan)
    if plan.model.dtype is Dtype.FP8:
        yield limit("model.dtype", "fp8", f"bf16, fp16 or fp32: {NAME} needs a recipe for fp8", final=True)


def selective_is_meant(plan: Plan, target: str = NAME) -> Iterator[Limit]:
    """Selective recomputation of core attention alone keeps more than the plan was made for."""
    if remembered(plan).calibration.selective is Selective.ATTENTION:
        return
    for index, stage in enumerate(plan.stages):
        if stage.recompute is Recompute.SELECTIVE:
            expected = f"none or full: {target} recomputes core attention alone and keeps more than the plan assumes"
            hint = "argosy plan --calibration megatron makes a plan for that; --lossy writes it as it is"
            yield limit(f"stages[{index}].recompute", "selective", expected, suggestion=hint)
            return


def layers_have_letters(chain: Chain, target: str = NAME) -> Iterator[Limit]:
    blocks = [layer for layer in chain.layers if layer.kind == "block"]
    for layer in chain.layers:
        is_odd = layer.kind == "block" and layer.parameters != blocks[0].parameters
        if layer.kind not in LETTERS or is_odd:
            expected = f"an embedding, blocks of one kind and a head, which {target} lays out"
            yield limit("model.name", f"{chain.name} with {layer.name}", expected, final=True)
            return


def arguments(plan: Plan, chain: Chain, architecture: Architecture, grid: Grid) -> dict[str, Value]:
    found: dict[str, Value] = {
        "tensor_model_parallel_size": grid.tensor,
        "pipeline_model_parallel_size": grid.pipeline,
        "context_parallel_size": grid.context,
        "expert_model_parallel_size": grid.expert,
    }
    if len(plan.stages) > 1:
        found["pipeline_model_parallel_layout"] = layout(plan, chain)
    if grid.tensor > 1:
        found["sequence_parallel"] = True
    found |= {"micro_batch_size": grid.samples, "global_batch_size": plan.global_batch}
    if zero_level(plan, ZERO) == 1:
        found["use_distributed_optimizer"] = True
    found |= _RECOMPUTE[strongest_recompute(plan)]
    return found | precision_arguments(plan.model.dtype) | model_arguments(architecture, plan)


def layout(plan: Plan, chain: Chain) -> str:
    """The layers of every stage."""
    return "|".join(_stage([LETTERS[layer.kind] for layer in chain.layers[s.first : s.end]]) for s in plan.stages)


def _stage(letters: Sequence[str]) -> str:
    """
    >>> _stage(["E", "t", "t", "t"])
    'Et*3'
    """
    runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
    return "".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)


def _flag(name: str, value: Value) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag} {shlex.quote(str(value))}"
