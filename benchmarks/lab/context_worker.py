"""One rank of ``benchmarks.lab.context``: `python -m benchmarks.lab.context_worker PLAN STEPS
RESULT`.

A block computes on its tokens, and then waits for what is left of its time, forward and backward
(``runtime.job.paced``). In a captured stage that is a segment of operations.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from argosy.cluster.file import cluster_from_content
from argosy.plan.file import load_plan
from argosy.runtime.job.paced import _Begin, _Call, _End, pace
from argosy.runtime.processes.emulated import say_ready
from argosy.runtime.stages.context_stage import ContextStage
from argosy.runtime.step.trainer import parallelize
from benchmarks.lab.emulated import speed_of

TOKENS, WIDTH, HEADS, VOCABULARY, BLOCKS = 512, 128, 4, 64, 4
SECONDS = 2.0
"""Of the forward of a block on a device of speed 1."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (
            p(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y = self.norms[1](x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def paced_segment(
    run: Any, segment: Any, given: dict[Any, Any], *, moment: Any, seconds: dict[Any, float]
) -> Any:
    """A segment that takes as long as it is told, forward and backward."""
    call = _Call(seconds.get(segment.operations, 0.0) * moment.samples, time.perf_counter())

    def around(function: Any, held: dict[Any, Any]) -> dict[Any, Any]:
        return {
            key: function.apply(tensor, call)
            if isinstance(tensor, Tensor) and tensor.requires_grad
            else tensor
            for key, tensor in held.items()
        }

    made = run(segment, around(_End, given), moment=moment)
    call.wait(call.seconds)
    return around(_Begin, made)


def main(plan_file: str, steps: str, result_file: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plan = load_plan(plan_file)
    name = os.environ["ARGOSY_DEVICE"]
    speed = speed_of(cluster_from_content(plan.cluster.content).device(name).kind.name)
    head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(BLOCKS)), head)
    whole = all(stage.context == 1 for stage in plan.stages)
    for block in list(model)[1:-1] if whole else ():
        pace(block, SECONDS / speed)
    batch = torch.randint(VOCABULARY, (plan.global_batch, TOKENS + 1))
    trainer = parallelize(model, loss_of, lambda p: torch.optim.SGD(p, lr=0.0), batch, plan)
    for index, program in trainer.executor.programs.items():
        if not whole:
            assert isinstance(program, ContextStage), "every stage of the plan cuts the sequence"
            share = dict(
                zip(plan.stages[index].devices, plan.stages[index].replicas[0].shares, strict=True)
            )[name]
            first = plan.stages[index].first
            blocks = [s for at, s in enumerate(program.segments) if 0 < first + at <= BLOCKS]
            times = {segment.operations: SECONDS * share / speed for segment in blocks}
            program.run_segment = functools.partial(
                paced_segment, program.run_segment, seconds=times
            )
    trainer.step(batch)
    dist.barrier()
    if dist.get_rank() == 0:
        say_ready()
    found = []
    for _ in range(int(steps)):
        begin = time.perf_counter()
        trainer.step(batch)
        found.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        Path(result_file).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
