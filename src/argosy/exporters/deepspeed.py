"""Export a plan to DeepSpeed: a JSON config, a pipeline module with the plan's cuts, a launch
script.

``argosy_pipeline.py`` has a ``PipelineModule`` whose stages are the plan's: a program gives it the
layers in order and passes it to ``deepspeed.initialize``. A plan of one stage under ZeRO 2 or 3 has
no pipeline module, because DeepSpeed does not combine the two.

DeepSpeed cannot express: stages that differ in replicas, tensor, context and expert parallelism in
a pipeline, fp8 (final); uneven shares; ZeRO beyond 1 in a pipeline; selective recomputation, or any
without a pipeline module; schedules other than 1F1B; a policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from argosy.cost.remembered import remembered
from argosy.dtype import Dtype
from argosy.exporters.form import (
    Export,
    Limit,
    head,
    limit,
    note,
    settle,
    target_limits,
    zero_level,
)
from argosy.exporters.grid import ParallelGrid, grid_of, launch_script
from argosy.plan.plan import Plan, Recompute
from argosy.plan.targets import TARGETS, TargetName
from argosy.workload.chain import Chain

# What the target can express, and its name.
TARGET = TARGETS[TargetName.DEEPSPEED]
NAME = TARGET.name
# DeepSpeed's names of our optimizers.
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion", "sgd": "SGD", "momentum": "SGD"}
# The momentum that is written for SGD with momentum.
_MOMENTUM = 0.9

# The generated module ``argosy_pipeline.py``.
_PIPELINE = '''\
{head}
"""In train.py:

    pipeline = PlannedPipeline(layers, loss_fn=loss_fn)  # {count} layers: embedding, blocks, head
    engine, *_ = deepspeed.initialize(
        model=pipeline, model_parameters=pipeline.parameters(), config="ds_config.json"
    )
    engine.train_batch(batches)
"""

from deepspeed.pipe import PipelineModule

CUTS = {cuts}  # stage s has the layers from CUTS[s] to CUTS[s + 1]
RECOMPUTES = {recomputes}  # whether stage s computes its activations again in the backward


class PlannedPipeline(PipelineModule):
    """A pipeline with the stages of the plan."""

    def __init__(self, layers, **options):
        layers = list(layers)
        if len(layers) != CUTS[-1]:
            raise ValueError(f"The plan has {{CUTS[-1]}} layers, found {{len(layers)}}.")
        super().__init__(layers, num_stages=len(CUTS) - 1, **options)
        self.activation_checkpoint_interval = int(RECOMPUTES[self.stage_id])

    def _partition_layers(self, method="planned"):
        self.parts = CUTS
        self._set_bounds(start=CUTS[self.stage_id], stop=CUTS[self.stage_id + 1])
'''


def export_deepspeed(plan: Plan, chain: Chain, *, lossy: bool = False) -> Export:
    """``ds_config.json``, ``argosy_pipeline.py`` and ``run.sh``."""
    lost = settle(limits(plan), lossy=lossy, target=TargetName.DEEPSPEED)
    grid, first_line = grid_of(plan), head(TARGET, plan, chain)
    files = [("ds_config.json", json.dumps(_config(plan, grid), indent=1) + "\n")]
    if _has_pipeline(plan):
        text = _PIPELINE.format(
            head=first_line,
            count=plan.stages[-1].end,
            cuts=[0, *(stage.end for stage in plan.stages)],
            recomputes=[stage.recompute is not Recompute.NONE for stage in plan.stages],
        )
        files.append(("argosy_pipeline.py", text))
    program = 'train.py --deepspeed_config ds_config.json "$@"'
    return Export(
        files=(*files, ("run.sh", launch_script(first_line, grid.runs, program))), lost=lost
    )


def limits(plan: Plan) -> Iterator[Limit]:
    """Yield everything in a plan that the target cannot express."""
    yield from target_limits(plan, TARGET)
    if not _has_pipeline(plan) and plan.stages[0].recompute is not Recompute.NONE:
        expected = f"none: {NAME} recomputes the layers of a pipeline only; your model has to do it"
        yield limit("stages[0].recompute", plan.stages[0].recompute, expected)
    if plan.model.dtype is Dtype.FP16 and remembered(plan).calibration.gradient_dtype is Dtype.FP32:
        yield note(
            "gradients",
            "fp32",
            f"fp16: {NAME} keeps them in the format of the weights there, in less memory",
        )


def _has_pipeline(plan: Plan) -> bool:
    """Return whether the export has a pipeline module."""
    return len(plan.stages) > 1 or zero_level(plan, TARGET) < 2


def _config(plan: Plan, grid: ParallelGrid) -> dict[str, object]:
    """Return the content of ``ds_config.json``."""
    dtype, optimizer, level = plan.model.dtype, plan.model.optimizer, zero_level(plan, TARGET)
    rates = {"lr": 1e-4} | ({"momentum": _MOMENTUM} if optimizer == "momentum" else {})
    config: dict[str, object] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": grid.samples,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "zero_optimization": {"stage": level},
    }
    name = _OPTIMIZERS.get(optimizer)
    if name is not None:  # else the user's program passes its own to deepspeed.initialize
        config["optimizer"] = {"type": name, "params": rates}
    # Without the flag DeepSpeed refuses to shard the state of an optimizer that it did not test.
    if level and name in ("SGD", None):
        config["zero_allow_untested_optimizer"] = True
    if dtype in (Dtype.BF16, Dtype.FP16):
        config[str(dtype)] = {"enabled": True}
    if dtype is Dtype.BF16:
        kept = remembered(plan).calibration.gradient_dtype or dtype
        config["data_types"] = {"grad_accum_dtype": str(kept)}
    return config
