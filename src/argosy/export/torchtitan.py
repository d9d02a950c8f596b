"""A plan as a torchtitan job: its TOML file, the schedule as the CSV file that it reads, and the commands.

Layers are named as torchtitan's models name them: ``tok_embeddings``, ``layers.N``, ``norm`` and ``output``. The
schedule is written out action by action (``2F0``), one row per worker, so every schedule of ours can be said;
torchtitan inserts the communication. Newer versions keep the same fields in Python classes instead of a TOML file.

What torchtitan cannot express: stages that differ in replicas, widths, context or expert parallelism, experts over
fewer holders than the parts of a sequence (final); uneven shares and ratios; ZeRO 1, or levels that differ; experts
over several holders under ZeRO 0, because it takes these from the ranks that shard weights; recomputation per stage;
fp16; a policy; hosts whose ranks are apart; models that it does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from argosy.dtype import Dtype
from argosy.export.form import (
    Export,
    Limit,
    head,
    limit,
    policy_is_absent,
    recomputation_is_one,
    samples_are_even,
    settle,
    stages_are_alike,
    strongest_recompute,
    tensors_are_even,
    zero_is_one_of,
    zero_level,
)
from argosy.export.grid import Grid, grid_of, hosts_are_whole, torchrun_lines
from argosy.export.megatron import layers_have_letters
from argosy.plan.plan import Plan
from argosy.schedule import ScheduleKind, build_schedule
from argosy.workload.chain import Chain

NAME = "torchtitan"
ZERO = (0, 2, 3)
MODELS = {
    "llama-3-8b": ("llama3", "8B"),
    "llama-3-70b": ("llama3", "70B"),
    "llama-3.1-405b": ("llama3", "405B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
}
"""Our presets by torchtitan's names and flavors."""
_MODULES = {"embedding": ("tok_embeddings",), "head": ("norm", "output")}
CSV, TOML = "schedule.csv", "torchtitan.toml"
_NAMED = {ScheduleKind.ZERO_BUBBLE_V: "ZBVZeroBubble", ScheduleKind.DUALPIPE_V: "DualPipeV"}
"""Schedules that torchtitan places on ranks only by their names."""


def export_torchtitan(plan: Plan, chain: Chain, *, lossy: bool = False) -> Export:
    lost = settle(limits(plan, chain), lossy=lossy)
    grid = grid_of(plan)
    files = [(TOML, _job(plan, chain, grid))]
    if len(plan.stages) > 1 and plan.schedule.kind not in _NAMED:
        files.append((CSV, schedule_csv(plan)))
    command = f"-m torchtitan.train --job.config_file {TOML}"
    lines = ["#!/usr/bin/env bash", *torchrun_lines(grid.hosts, f'{command} "$@"')]
    return Export(files=(*files, ("run.sh", "\n".join(lines) + "\n")), lost=lost)


def limits(plan: Plan, chain: Chain) -> Iterator[Limit]:
    yield from layers_have_letters(chain, NAME)
    yield from stages_are_alike(plan, NAME)
    yield from samples_are_even(plan, NAME)
    yield from tensors_are_even(plan, NAME)
    yield from recomputation_is_one(plan, NAME)
    yield from zero_is_one_of(plan, NAME, ZERO)
    yield from policy_is_absent(plan, NAME)
    yield from hosts_are_whole(plan, NAME)
    yield from _experts_are_sharded(plan)
    if plan.model.dtype not in (Dtype.BF16, Dtype.FP32):
        expected = f"bf16 or fp32, which {NAME} trains in; bf16 is written"
        yield limit("model.dtype", plan.model.dtype, expected)
    if chain.name not in MODELS:
        expected = f"a model that {NAME} has ({', '.join(MODELS)}); its name and flavor are left to you"
        yield limit("model.name", chain.name, expected)


def _experts_are_sharded(plan: Plan) -> Iterator[Limit]:
    expert, context = plan.stages[0].expert, plan.stages[0].context
    if expert > 1 and expert % context:
        expected = f"a multiple of the {context} parts of a sequence, which {NAME}'s experts are spread over first"
        yield limit("stages[0].expert", expert, expected, final=True)
    if expert > 1 and not zero_level(plan, ZERO):
        expected = f"2 or 3 where experts have several holders, which {NAME} takes from those that shard; 2 is written"
        yield limit("stages.zero", 0, expected)


def modules(plan: Plan, chain: Chain) -> list[list[str]]:
    """``module_fqns_per_model_part``: the modules of every stage."""
    found: list[list[str]] = []
    blocks = 0
    for stage in plan.stages:
        names: list[str] = []
        for layer in chain.layers[stage.first : stage.end]:
            names += _MODULES.get(layer.kind, (f"layers.{blocks}",))
            blocks += layer.kind not in _MODULES
        found.append(names)
    return found


def schedule_csv(plan: Plan) -> str:
    """One row per worker."""
    schedule = build_schedule(plan.schedule, len(plan.stages), plan.num_micro_batches)
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)


def _schedule(plan: Plan, grid: Grid) -> dict[str, object]:
    """V-shaped schedules by torch's names for them; all others as a list of actions."""
    if plan.schedule.kind in _NAMED:
        return {"pipeline_parallel_schedule": _NAMED[plan.schedule.kind]}
    name = "PipelineScheduleMulti" if grid.chunks > 1 else "PipelineScheduleSingle"
    return {"pipeline_parallel_schedule": name, "pipeline_parallel_schedule_csv": CSV}


def _job(plan: Plan, chain: Chain, grid: Grid) -> str:
    """All values are JSON, which TOML reads as it is."""
    level = zero_level(plan, ZERO) or (2 if grid.expert > 1 else 0)
    name, flavor = MODELS.get(chain.name, ("", ""))
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": 1 if level else grid.data,
        "data_parallel_shard_degree": grid.data if level else 1,
        "fsdp_reshard_after_forward": "always" if level == 3 else "never",
        "tensor_parallel_degree": grid.tensor,
        "context_parallel_degree": grid.context,
        "expert_parallel_degree": grid.expert,
        "pipeline_parallel_degree": grid.pipeline,
    }
    if grid.expert > 1 and grid.tensor > 1:  # as the plan has it: groups split the tensors of experts too
        parallelism["expert_tensor_parallel_degree"] = grid.tensor
    batch = grid.samples  # one stage takes a micro-batch at a time and adds their gradients up
    if len(plan.stages) > 1:
        batch *= plan.num_micro_batches  # a pipeline cuts it into micro-batches itself
        parallelism |= {
            "module_fqns_per_model_part": modules(plan, chain),
            **_schedule(plan, grid),
            "pipeline_parallel_microbatch_size": grid.samples,
        }
    tables: dict[str, dict[str, object]] = {
        "model": {"name": name, "flavor": flavor},
        "training": {
            "local_batch_size": batch,
            "global_batch_size": plan.global_batch,
            "seq_len": plan.model.sequence_length,
            "mixed_precision_param": "float32" if plan.model.dtype is Dtype.FP32 else "bfloat16",
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": str(strongest_recompute(plan))},
    }
    lines = [head(NAME, plan, chain)]
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"
