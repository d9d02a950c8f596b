"""On one GPU, one rank: a step of the runtime against a plain loop, both eager and both compiled.

``python -m benchmarks.gpu_compile`` prints JSON lines: the GPT of ``gpu_runtime`` as one stage of
layers, and as a captured program; medians over steps that take turns. Needs only torch, numpy and
argosy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.lab.job import free_port
from argosy.runtime.step.trainer import parallelize
from benchmarks.gpu_runtime import (
    LENGTH,
    MICRO_BATCH,
    NUM_MICRO_BATCHES,
    VOCABULARY,
    build,
    loss_fn,
    plan_of,
)

WARM_UP = 4


def optimizer(values: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(values, lr=1e-4, fused=torch.cuda.is_available())


def plain_loop(
    options: argparse.Namespace, batch: Tensor, device: torch.device, *, compiled: bool
) -> Callable[[], float]:
    torch.manual_seed(0)
    model = build(options.width, options.layers).to(device)
    own = optimizer(model.parameters())

    def forward(rows: Tensor) -> Tensor:
        return loss_fn(model, rows)

    call = torch.compile(forward, dynamic=False) if compiled else forward

    def step() -> float:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for rows in batch.split(options.micro_batch):
            with torch.autocast(device.type, torch.bfloat16):
                loss = call(rows.to(device, non_blocking=True)) / NUM_MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        own.step()
        own.zero_grad()
        return float(total)

    return step


def runtime_step(
    options: argparse.Namespace, batch: Tensor, *, compiled: bool, captured: bool
) -> Callable[[], float]:
    torch.manual_seed(0)
    model = build(options.width, options.layers)
    plan = plan_of(1, options.layers, k=1, micro_batch=options.micro_batch)
    cut = None
    if captured:
        from argosy.runtime.sources.operations import ADDED
        from argosy.workload.capture.forward import capture_forward

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        forward = capture_forward(model, loss_fn, batch, device=device, recording=None, name="gpt")
        cut = (0,) * sum(node.op not in ADDED for node in forward.graph.nodes)
    trainer = parallelize(
        model, loss_fn, optimizer, batch, plan, clip_norm=1.0, cut=cut, compile_stages=compiled
    )
    return lambda: trainer.step(batch)


def measured(steps: dict[str, Callable[[], float]], count: int) -> dict[str, dict[str, Any]]:
    """Median seconds of each, in turns, and its losses; the first steps warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM_UP + count):
        for name, step in steps.items():
            begin = time.perf_counter()
            losses[name].append(step())
            seconds[name].append(time.perf_counter() - begin)
    return {
        name: {
            "seconds": statistics.median(times[WARM_UP:]),
            "least": min(times[WARM_UP:]),
            "losses": losses[name][:4],
        }
        for name, times in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batch", type=int, default=MICRO_BATCH)
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--modes", default="eager,compiled")
    options = parser.parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=0, world_size=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = torch.randint(
        VOCABULARY,
        (options.micro_batch * NUM_MICRO_BATCHES, LENGTH + 1),
        generator=torch.Generator(),
    )
    for compiled in (mode == "compiled" for mode in options.modes.split(",")):
        steps = {
            "plain loop": plain_loop(options, batch, device, compiled=compiled),
            "runtime": runtime_step(options, batch, compiled=compiled, captured=False),
        }
        if options.captured:
            steps["captured program"] = runtime_step(
                options, batch, compiled=compiled, captured=True
            )
        found = measured(steps, options.steps)
        alone = found["plain loop"]["seconds"]
        for name, row in found.items():
            what = f"{name}, {'compiled' if compiled else 'eager'}"
            print(
                json.dumps({"what": what, "over_plain": row["seconds"] / alone, **row}), flush=True
            )
        del steps
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
