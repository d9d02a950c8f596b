"""Export a plan to ``torch.distributed.pipelining``: a module, the schedule as CSV, a launch
script.

``argosy_pipeline.py`` needs only torch. It takes the layers of a model in order, keeps those of its
stages, and lets torch execute the schedule of the CSV row by row; torch inserts the communication.
Gradients of replicas are averaged; gradients of a weight that several stages hold are added. A
16-bit plan runs under autocast, so weights, gradients and optimizer state are fp32
(``data/calibrations/torch.json`` assumes the same).

It cannot express: stages that differ in replicas, tensor, context and expert parallelism, fp16,
which needs a scaled loss (final); uneven shares; ZeRO; selective recomputation; a policy.
"""

from __future__ import annotations

from argosy.dtype import Dtype
from argosy.exporters.form import Export, head, settle, target_limits
from argosy.exporters.grid import grid_of, launch_script
from argosy.exporters.torchtitan import CSV, schedule_csv
from argosy.plan.plan import Plan, Recompute
from argosy.plan.targets import TARGETS, TargetName
from argosy.workload.chain import Chain

# What the target can express.
TARGET = TARGETS[TargetName.TORCH]

# The generated module ``argosy_pipeline.py``.
_MODULE = '''\
{head}
"""In train.py, in every process that run.sh starts:

    # {count} layers: embedding, blocks, head; the same in every process
    pipeline = Pipeline(layers, loss_fn)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    # {rows} rows, those of replica pipeline.replica of {replicas}
    loss = pipeline.step(inputs, targets)
    optimizer.step()
    optimizer.zero_grad()

``loss_fn(output, target)`` is the mean over a micro-batch. ``step`` returns the mean loss in the
processes of the last stage, and None in others.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.utils.checkpoint import checkpoint

CUTS = {cuts}  # stage s has the layers from CUTS[s] to CUTS[s + 1]
RECOMPUTES = {recomputes}  # whether stage s computes its activations again in the backward
WORKERS, CHUNKS, REPLICAS = {workers}, {chunks}, {replicas}
MICRO_BATCHES = {micro_batches}
DTYPE = {dtype}
SCHEDULE = Path(__file__).resolve().parent / "{csv}"


class Part(nn.Module):
    """The layers of one stage."""

    def __init__(self, layers, stage):
        super().__init__()
        self.layers = nn.ModuleList(layers[CUTS[stage] : CUTS[stage + 1]])
        self.recomputes = RECOMPUTES[stage]

    def forward(self, hidden):
        for layer in self.layers:
            with torch.autocast(hidden.device.type, DTYPE, enabled=DTYPE is not torch.float32):
                if self.recomputes:
                    hidden = checkpoint(layer, hidden, use_reentrant=False)
                else:
                    hidden = layer(hidden)
            if hidden.is_floating_point():
                hidden = hidden.to(DTYPE)
        return hidden


class Pipeline:
    """The stages of one process, and the schedule that runs them."""

    def __init__(self, layers, loss_fn, device=None):
        layers = list(layers)
        if len(layers) != CUTS[-1]:
            raise ValueError(f"The plan has {{CUTS[-1]}} layers, found {{len(layers)}}.")
        if not dist.is_initialized():
            dist.init_process_group()
        if dist.get_world_size() != WORKERS * REPLICAS:
            raise ValueError(
                f"The plan has {{WORKERS * REPLICAS}} processes, found {{dist.get_world_size()}}."
            )
        if device is None:
            local = int(os.environ.get("LOCAL_RANK", 0))
            has_cuda = torch.cuda.is_available()
            device = torch.device("cuda", local) if has_cuda else torch.device("cpu")
        self.worker, self.replica = divmod(dist.get_rank(), REPLICAS)
        self.stages = range(self.worker, len(CUTS) - 1, WORKERS)
        chains = [
            dist.new_group([w * REPLICAS + r for w in range(WORKERS)]) for r in range(REPLICAS)
        ]
        replicas = [
            dist.new_group([w * REPLICAS + r for r in range(REPLICAS)]) for w in range(WORKERS)
        ]
        self.replicas = replicas[self.worker]
        self.parts = nn.ModuleList(Part(layers, stage) for stage in self.stages)
        self.shared = list(self._shared(layers))
        for layer in self.parts:
            layer.to(device)
        pieces = [
            PipelineStage(part, stage, len(CUTS) - 1, device, group=chains[self.replica])
            for part, stage in zip(self.parts, self.stages)
        ]
        self.schedule = _PipelineScheduleRuntime(
            pieces, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn
        )
        self.schedule._load_csv(str(SCHEDULE))

    def parameters(self):
        return self.parts.parameters()

    def step(self, inputs=None, targets=None):
        losses = []
        first, last = 0 in self.stages, len(CUTS) - 2 in self.stages
        given = (inputs,) if first else ()
        if last:
            self.schedule.step(*given, target=targets, losses=losses)
        else:
            self.schedule.step(*given)
        for parameter, group in self.shared:
            dist.all_reduce(parameter.grad, group=group)
        for parameter in self.parameters():
            if parameter.grad is not None:
                self._average(parameter.grad)
        return self._average(torch.stack(losses).mean()) if last else None

    def _average(self, tensor):
        tensor = tensor.detach()
        dist.all_reduce(tensor, group=self.replicas)
        return tensor.div_(REPLICAS)

    def _shared(self, layers):
        """Yield weights that processes of other stages hold too, with the group of holders."""
        holders = {{}}
        for stage in range(len(CUTS) - 1):
            for layer in layers[CUTS[stage] : CUTS[stage + 1]]:
                for parameter in layer.parameters():
                    holders.setdefault(parameter, set()).add(stage % WORKERS)
        for parameter, workers in holders.items():
            if len(workers) > 1:
                for replica in range(REPLICAS):
                    ranks = [worker * REPLICAS + replica for worker in sorted(workers)]
                    group = dist.new_group(ranks)
                    if self.worker in workers and replica == self.replica:
                        yield parameter, group
'''


def export_torch(plan: Plan, chain: Chain, *, lossy: bool = False) -> Export:
    """``argosy_pipeline.py``, ``schedule.csv`` and ``run.sh``."""
    lost = settle(target_limits(plan, TARGET), lossy=lossy, target=TargetName.TORCH)
    grid, first_line = grid_of(plan), head(TARGET, plan, chain)
    module = _MODULE.format(
        head=first_line,
        count=plan.stages[-1].end,
        rows=plan.num_micro_batches * grid.samples,
        cuts=[0, *(stage.end for stage in plan.stages)],
        recomputes=[stage.recompute is not Recompute.NONE for stage in plan.stages],
        workers=grid.pipeline,
        chunks=grid.chunks,
        replicas=grid.data,
        micro_batches=plan.num_micro_batches,
        dtype="torch.float32" if plan.model.dtype is Dtype.FP32 else "torch.bfloat16",
        csv=CSV,
    )
    script = launch_script(first_line, grid.runs, 'train.py "$@"')
    return Export(
        files=(("argosy_pipeline.py", module), (CSV, schedule_csv(plan)), ("run.sh", script)),
        lost=lost,
    )
