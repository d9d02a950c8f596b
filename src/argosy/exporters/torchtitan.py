"""Export a plan as a torchtitan recipe: a Python module, the schedule as CSV, and a launch script.

torchtitan reads its configuration from a function in a module. The recipe builds the model by
torchtitan's own registry, overrides the defaults that would change the model, the memory or the
numbers, and names the modules of every stage: ``tok_embeddings``, ``layers.N``, ``norm`` and
``lm_head``. The schedule is written action by action (``2F0``), one row per worker, so every
schedule of ours can be expressed; torch inserts the communication. The loss is computed in chunks,
as torchtitan does by default; under schedules that split backwards it is not, because there the
last norm would get no gradient (torchtitan 0.3.0 with torch 2.15).

torchtitan cannot express: stages that differ in replicas, widths, context or expert parallelism,
models that it does not have, sequences that its splits do not divide, formats but bf16 and fp32
(final); uneven shares and ratios; ZeRO 1, or levels that differ; sequences or experts over several
holders under ZeRO 0, because it takes these from the ranks that shard weights; recomputation per
stage; optimizers but AdamW; a policy. Experts of a tensor-parallel group are whole experts on each
of its devices, not a slice of each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pprint import pformat

from argosy.dtype import Dtype
from argosy.exporters.form import (
    Export,
    Limit,
    head,
    limit,
    note,
    settle,
    strongest_recompute,
    target_limits,
    zero_level,
)
from argosy.exporters.grid import ParallelGrid, grid_of, launch_script
from argosy.exporters.megatron import layers_have_letters
from argosy.plan.plan import ModelRef, Plan, Recompute
from argosy.plan.targets import TARGETS, TargetName
from argosy.schedule import ScheduleKind, build_schedule
from argosy.workload.architecture import Architecture, Experts
from argosy.workload.chain import Chain

# What the target can express, and its name.
TARGET = TARGETS[TargetName.TORCHTITAN]
NAME = TARGET.name
MODELS = {
    "llama-3-8b": ("llama3", "8B"),
    "llama-3-70b": ("llama3", "70B"),
    "llama-3.1-8b": ("llama3", "8B"),
    "llama-3.1-405b": ("llama3", "405B"),
    "llama-3.3-70b": ("llama3", "70B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
}
"""The names and flavors that torchtitan has for our presets with an untied head."""
# The modules of the layers that are not blocks.
_MODULES = {"embedding": ("tok_embeddings",), "head": ("norm", "lm_head")}
# The expression for each kind of recomputation.
_CHECKPOINTING = {
    Recompute.NONE: "None",
    Recompute.SELECTIVE: "SelectiveAC.Config()",
    Recompute.FULL: "FullAC.Config()",
}
_NAMED = {ScheduleKind.ZERO_BUBBLE_V: "ZBVZeroBubble", ScheduleKind.DUALPIPE_V: "DualPipeV"}
"""Schedules that torchtitan places on ranks only by their names."""
# A note that is added to the recipe of a pipeline.
_PIPELINES = """

Pipelines need torch 2.14 or newer: torchtitan gives its schedules micro-batches, which older ones
do not take.
"""
# Names of the generated files and of the recipe's function.
CSV, MODULE, FUNCTION = "schedule.csv", "argosy_recipe", "planned"

# The generated recipe.
_RECIPE = '''\
{head}
"""Start it with run.sh, or by

torchrun ... -m torchtitan.train --module {module} --config {function}{needs}"""

from pathlib import Path

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import RoPE
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{family} import model_registry
from torchtitan.trainer import Trainer

FOLDER = Path(__file__).resolve().parent
STAGES = {stages}


def {function}() -> Trainer.Config:
    model = model_registry({flavor!r})
    for _, rope, _, _ in model.traverse(RoPE.Config):
        {rope}
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model))
    return Trainer.Config(
        model_spec=model,
        loss={loss},
        optimizer=default_adamw(lr=3e-4),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
        training=TrainingConfig(
{training}
        ),
        parallelism=ParallelismConfig(
{parallelism}
        ),
        activation_checkpoint={checkpointing},
    )
'''


def export_torchtitan(
    plan: Plan, chain: Chain, architecture: Architecture, *, lossy: bool = False
) -> Export:
    """The recipe, the schedule if there is a pipeline, and ``run.sh``."""
    lost = settle(limits(plan, chain, architecture), lossy=lossy, target=TargetName.TORCHTITAN)
    grid = grid_of(plan)
    files = [(f"{MODULE}.py", _recipe(plan, chain, architecture, grid))]
    if len(plan.stages) > 1 and plan.schedule.kind not in _NAMED:
        files.append((CSV, schedule_csv(plan)))
    folder = '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'
    here = f'export PYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}"'
    program = f'-m torchtitan.train --module {MODULE} --config {FUNCTION} "$@"'
    script = launch_script(head(TARGET, plan, chain), grid.runs, program, before=[here])
    return Export(files=(*files, ("run.sh", script)), lost=lost)


def limits(plan: Plan, chain: Chain, architecture: Architecture) -> Iterator[Limit]:
    """Yield everything in a plan that the target cannot express."""
    yield from model_limits(plan.model, chain)
    yield from target_limits(plan, TARGET)
    yield from _splits_are_sharded(plan, architecture)


def model_limits(model: ModelRef, chain: Chain) -> Iterator[Limit]:
    """Yield everything in a model that the target cannot express, whatever the plan."""
    if chain.name not in MODELS:
        expected = f"a model with a recipe for {TARGET.full_name}: {', '.join(MODELS)}"
        hint = "deepspeed and torch are written for any model"
        yield limit("model.name", chain.name, expected, final=True, suggestion=hint)
    yield from layers_have_letters(chain, NAME)


def _splits_are_sharded(plan: Plan, architecture: Architecture) -> Iterator[Limit]:
    """Yield limits for splits of sequences and experts that torchtitan does not support."""
    first = plan.stages[0]
    if first.expert > 1 and first.expert % first.context:
        expected = (
            f"a multiple of the {first.context} parts of a sequence, which {NAME}'s experts are "
            "spread over first"
        )
        yield limit("stages[0].expert", first.expert, expected, final=True)
    if max(first.expert, first.context) > 1 and not zero_level(plan, TARGET):
        reason = "experts have several holders" if first.expert > 1 else "sequences are cut"
        expected = (
            f"2 or 3 where {reason}, which {NAME} takes from the ranks that shard weights; 2 is "
            "written"
        )
        yield limit("stages.zero", 0, expected)
    experts, tensor = architecture.blocks[0].feed_forward, grid_of(plan).tensor
    if isinstance(experts, Experts) and tensor > 1:
        if experts.count % (first.expert * tensor):
            expected = (
                f"a number whose product with the tensor width {tensor} divides the "
                f"{experts.count} experts"
            )
            yield limit("stages[0].expert", first.expert, expected, final=True)
        expected = (
            f"whole experts over {first.expert * tensor} ranks: {NAME} splits the tensors of no "
            "expert"
        )
        yield note(
            "stages[0].expert", f"{first.expert}, each expert over {tensor} devices", expected
        )


def modules(plan: Plan, chain: Chain) -> list[list[str]]:
    """Return the modules of every stage (``module_fqns_per_model_part``)."""
    by_stage: list[list[str]] = []
    blocks = 0
    for stage in plan.stages:
        names: list[str] = []
        for layer in chain.layers_of(stage):
            names += _MODULES.get(layer.kind, (f"layers.{blocks}",))
            blocks += layer.kind not in _MODULES
        by_stage.append(names)
    return by_stage


def schedule_csv(plan: Plan) -> str:
    """Return the schedule with one row per worker."""
    schedule = build_schedule(plan.schedule, len(plan.stages), plan.num_micro_batches)
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)


def _recipe(plan: Plan, chain: Chain, architecture: Architecture, grid: ParallelGrid) -> str:
    """Return the text of the recipe."""
    family, flavor = MODELS[chain.name]
    rotary = architecture.rotary
    assert rotary is not None, "all models that torchtitan has are rotary"
    scaling = "none" if rotary.scaling is None else "llama"
    rope = f"rope.theta, rope.scaling = {rotary.base!r}, {scaling!r}"
    if rotary.scaling is not None:
        rope += f"\n        rope.scaling_factor = {rotary.scaling!r}"
    splits_backwards = len(plan.stages) > 1 and plan.schedule.kind.is_split
    return _RECIPE.format(
        head=head(TARGET, plan, chain),
        module=MODULE,
        function=FUNCTION,
        needs=_PIPELINES if len(plan.stages) > 1 else "",
        loss="loss" if splits_backwards else "ChunkedLossWrapper.Config(loss_fn=loss)",
        family=family,
        flavor=flavor,
        stages=pformat(modules(plan, chain), width=100, compact=True),
        rope=rope,
        training=_arguments(_training(plan, grid)),
        parallelism=_arguments(_parallelism(plan, architecture, grid)),
        checkpointing=_CHECKPOINTING[strongest_recompute(plan)],
    )


def _training(plan: Plan, grid: ParallelGrid) -> dict[str, str]:
    """Return the arguments of ``TrainingConfig``.

    A pipeline divides its batch into micro-batches itself; one stage takes one at a time and sums
    gradients.
    """
    batch = grid.samples * (plan.num_micro_batches if len(plan.stages) > 1 else 1)
    return {
        "local_batch_size": repr(batch),
        "global_batch_size": repr(plan.global_batch),
        "seq_len": repr(plan.model.sequence_length),
        "dtype": '"float32"',
        "mixed_precision_param": json.dumps(
            "float32" if plan.model.dtype is Dtype.FP32 else "bfloat16"
        ),
        "mixed_precision_reduce": '"float32"',
        "disable_cuda_graphs": "True",
    }


def _parallelism(plan: Plan, architecture: Architecture, grid: ParallelGrid) -> dict[str, str]:
    """Return the arguments of ``ParallelismConfig``."""
    level = zero_level(plan, TARGET) or (2 if max(grid.expert, grid.context) > 1 else 0)
    has_experts = isinstance(architecture.blocks[0].feed_forward, Experts)
    degrees: dict[str, object] = {
        "data_parallel_replicate_degree": 1 if level else grid.data,
        "data_parallel_shard_degree": grid.data if level else 1,
        "fsdp_reshard_after_forward": "always" if level == 3 else "never",
        "tensor_parallel_degree": grid.tensor,
        "context_parallel_degree": grid.context,
        "expert_parallel_degree": grid.expert * grid.tensor if has_experts else 1,
        "pipeline_parallel_degree": grid.pipeline,
    }
    written = {name: json.dumps(value) for name, value in degrees.items()}
    if len(plan.stages) > 1:
        written |= {
            "module_fqns_per_model_part": "STAGES",
            **_schedule(plan, grid),
            "pipeline_parallel_microbatch_size": repr(grid.samples),
        }
    return written


def _schedule(plan: Plan, grid: ParallelGrid) -> dict[str, str]:
    """Return the arguments of the schedule.

    V-shaped schedules are given by torch's names. For all others the CSV replaces the schedule,
    whose name only gives the number of stages of a rank.
    """
    if plan.schedule.kind in _NAMED:
        return {"pipeline_parallel_schedule": json.dumps(_NAMED[plan.schedule.kind])}
    name = "Interleaved1F1B" if grid.chunks > 1 else "1F1B"
    return {
        "pipeline_parallel_schedule": json.dumps(name),
        "pipeline_parallel_schedule_csv": f"str(FOLDER / {CSV!r})",
    }


def _arguments(values: dict[str, str]) -> str:
    """Return keyword arguments as indented Python text."""
    return "\n".join(f"            {name}={value}," for name, value in values.items())
