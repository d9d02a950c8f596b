"""On one GPU: a GPT of over 300 M parameters by a plan of two stages, on two ranks that share the
card, and on one.

``python -m benchmarks.gpu_runtime`` prints JSON lines. NCCL refuses two ranks on one card, so the
two talk through pinned host memory and gloo; NCCL runs the single rank. Needs only torch, numpy and
argosy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from argosy.dtype import Dtype
from argosy.lab.job import free_port
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.runtime.step.trainer import parallelize
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.capture.initial import Recording

WIDTH, LAYERS, HEADS, LENGTH, VOCABULARY = 1024, 24, 16, 512, 16384
MICRO_BATCH, NUM_MICRO_BATCHES, STEPS = 4, 8, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.tokens(tokens) + self.places(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        return result


def build(width: int, layers: int) -> nn.Module:
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False))
    return nn.Sequential(Embedding(width), *(Block(width) for _ in range(layers)), head)


def loss_fn(model: Any, tokens: Tensor) -> Tensor:
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


def plan_of(num_stages: int, layers: int, *, k: int, micro_batch: int = MICRO_BATCH) -> Plan:
    """The first stage gets a block more, because the head is heavier than the embedding."""
    cut = layers // 2 + 2
    ranges = [(0, layers + 2)] if num_stages == 1 else [(0, cut), (cut, layers + 2)]
    return Plan(
        model=ModelRef(name="gpt", sequence_length=LENGTH, dtype=Dtype.BF16),
        cluster=ClusterRef(name="one card", hash="", content="{}"),
        global_batch=micro_batch * NUM_MICRO_BATCHES,
        micro_batch_size=micro_batch,
        num_micro_batches=NUM_MICRO_BATCHES,
        schedule=ScheduleSpec(kind=ScheduleKind.KFKB, k=k),
        stages=tuple(
            Stage(
                first=first,
                end=end,
                replicas=(Replica(devices=(f"n0.{index}",), samples=micro_batch),),
            )
            for index, (first, end) in enumerate(ranges)
        ),
    )


def work(rank: int, world: int, backend: str, port: int, options: argparse.Namespace) -> None:
    """One rank: train, and print what rank 0 measured."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend, rank=rank, world_size=world)
    torch.manual_seed(0)
    begin = time.perf_counter()
    with Recording() as recording:
        model = build(options.width, options.layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    batch = torch.randint(
        VOCABULARY, (MICRO_BATCH * NUM_MICRO_BATCHES, LENGTH + 1), generator=torch.Generator()
    )

    def optimizer(values: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(values, lr=1e-4, fused=torch.cuda.is_available())

    plan = plan_of(world, options.layers, k=options.k)
    trainer = parallelize(
        model, loss_fn, optimizer, batch, plan, clip_norm=1.0, recording=recording
    )
    built = time.perf_counter() - begin
    losses, seconds = [], []
    for _ in range(options.steps):
        begin = time.perf_counter()
        losses.append(trainer.step(batch))
        seconds.append(time.perf_counter() - begin)
    timeline = trainer.timeline()
    if timeline is not None:
        row = {
            "what": f"{world} stage{'s' if world > 1 else ''} on {backend}",
            "parameters": parameters,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "build_seconds": built,
            "step_seconds": sorted(seconds[1:])[len(seconds[1:]) // 2],
            "busy": timeline.utilisation(),
            "losses": losses,
            "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }
        print(json.dumps(row), flush=True)
        if options.out:
            with open(options.out, "a") as file:  # noqa: PTH123
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--out", default="/tmp/argosy-gpu-runtime.jsonl")
    options = parser.parse_args()
    open(options.out, "w").close()  # noqa: PTH123
    alone = "nccl" if torch.cuda.is_available() else "gloo"
    for world, backend in ((1, alone), (2, "gloo")):
        multiprocessing.spawn(work, args=(world, backend, free_port(), options), nprocs=world)  # type: ignore[no-untyped-call]
    with open(options.out) as file:  # noqa: PTH123
        one, two = (json.loads(line)["losses"] for line in file)
    worst = max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))
    agree = math.isfinite(worst) and worst < 2e-3
    print(
        json.dumps(
            {
                "what": "losses of two stages against one",
                "worst_relative_difference": worst,
                "agree": agree,
            }
        )
    )


if __name__ == "__main__":
    main()
