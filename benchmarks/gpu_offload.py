"""On one GPU, one rank: peaks and steps of fine-tuning and of offload, predicted and measured.

``python -m benchmarks.gpu_offload`` prints JSON lines. Each case profiles the layers of a GPT,
predicts the peak of a rank (``benchmarks.memory_ledger``) and the time of a step (the exact
engine) from that, and then trains: the peak is that of torch's allocator, the time the median of
the steps. The rate of copies to pinned memory is measured first and is the cluster's. ``adamw8bit``
and ``nf4`` need bitsandbytes and are left out without it. Needs torch, numpy and argosy.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.document import Document
from argosy.dtype import Dtype
from argosy.lab.job import free_port
from argosy.measure.profile import ProfileSettings, profile_model
from argosy.plan.offload import NO_OFFLOAD, parse_offload
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Recompute, Replica, Stage
from argosy.runtime.step.trainer import parallelize
from argosy.runtime.weights.host_memory import CopyStream, HostBuffers
from argosy.schedule import ScheduleSpec
from argosy.sim.simulate import simulate
from benchmarks.gpu_runtime import LENGTH, VOCABULARY, Block, build, loss_fn
from benchmarks.memory_ledger import peak_bytes

NUM_MICRO_BATCHES = 4
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and what is kept where."""

    name: str
    lora: bool = False
    packed: bool = False
    optimizer: str = "adamw"
    offload: str = ""
    dtype: Dtype = Dtype.FP32
    recompute: Recompute = Recompute.NONE


CASES = (
    Case(name="all weights, AdamW"),
    Case(name="all weights, AdamW, optimizer state in host memory", offload="optimizer"),
    Case(name="all weights, AdamW, activations in host memory", offload="activations"),
    Case(name="all weights, AdamW, both in host memory", offload="optimizer,activations"),
    Case(name="LoRA, rank 16", lora=True, dtype=Dtype.BF16),
    Case(
        name="LoRA, activations in host memory", lora=True, dtype=Dtype.BF16, offload="activations"
    ),
    Case(name="all weights, 8-bit AdamW", optimizer="adamw8bit", dtype=Dtype.BF16),
    Case(name="LoRA on NF4 weights", lora=True, packed=True, dtype=Dtype.BF16),
)


class Adapter(nn.Module):
    """A frozen product and a trained one of low rank beside it."""

    def __init__(self, frozen: nn.Module, width: int, output: int, rank: int = 16) -> None:
        super().__init__()
        self.frozen = frozen
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, output, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(x) + self.up(self.down(x))
        return result


def built(case: Case, options: argparse.Namespace, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = build(options.width, options.layers)
    if case.dtype is Dtype.BF16:
        model.to(torch.bfloat16)
    if not case.lora:
        return model
    model.requires_grad_(False)
    for block in (module for module in model.modules() if isinstance(module, Block)):
        for name in ("mix", "out", "up", "down"):
            layer = getattr(block, name)
            frozen = packed(layer, device) if case.packed else layer
            adapter = Adapter(frozen, layer.in_features, layer.out_features)
            adapter.down.to(device=layer.weight.device, dtype=torch.bfloat16)
            adapter.up.to(device=layer.weight.device, dtype=torch.bfloat16)
            setattr(block, name, adapter)
    return model


def packed(layer: nn.Linear, device: torch.device) -> nn.Module:
    """The same product with weights in NF4."""
    import bitsandbytes

    result: nn.Module = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, compute_dtype=torch.bfloat16, quant_type="nf4"
    )
    result.load_state_dict(layer.state_dict())
    result.requires_grad_(False)
    return result.to(device)


def optimizer_of(case: Case) -> Callable[[Any], torch.optim.Optimizer]:
    def made(values: Any) -> torch.optim.Optimizer:
        if case.optimizer == "adamw8bit":
            import bitsandbytes

            found: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(values, lr=1e-4)
            return found
        return torch.optim.AdamW(values, lr=1e-4, fused=torch.cuda.is_available())

    return made


def copies_at_once(device: torch.device) -> float:
    """Bytes/s in each direction while both are in use."""
    ways = [(CopyStream(device), HostBuffers(device).take(2**28)) for _ in range(2)]
    there = [torch.empty(2**28, dtype=torch.uint8, device=device) for _ in ways]
    rates = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(4):
            ways[0][0].copy(there[0], ways[0][1])
            ways[1][0].copy(ways[1][1], there[1])
        torch.cuda.synchronize()
        rates.append(4 * 2**28 / (time.perf_counter() - begin))
    return max(rates)


def copy_rate(device: torch.device) -> float:
    """Bytes/s from the device to pinned memory, the slower of both directions."""
    if device.type != "cuda":
        return 10e9
    host = HostBuffers(device).take(2**30)
    there = torch.empty(2**30, dtype=torch.uint8, device=device)
    rates = []
    for target, source in ((host, there), (there, host)):
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates.append(2**30 / (time.perf_counter() - begin))
    return min(max(rates[:3]), max(rates[3:]))


def cluster_of(rate: float) -> Cluster:
    memory = {"size": "100 GiB", "bandwidth": f"{rate} B/s"}
    node = {"name": "n", "devices": {"kind": "H200"}, "host_memory": memory}
    return build_cluster(Document("cluster", {"name": "one", "nodes": [node]}, {}), folder=Path())


def plan_of(case: Case, options: argparse.Namespace, cluster: Cluster) -> Plan:
    stage = Stage(
        first=0,
        end=options.layers + 2,
        replicas=(Replica(devices=("n0.0",), samples=options.micro_batch),),
        recompute=case.recompute,
        offload=parse_offload(case.offload) if case.offload else NO_OFFLOAD,
    )
    return Plan(
        model=ModelRef(
            name="gpt", sequence_length=LENGTH, dtype=case.dtype, optimizer=case.optimizer
        ),
        cluster=ClusterRef.of(cluster),
        global_batch=options.micro_batch * NUM_MICRO_BATCHES,
        micro_batch_size=options.micro_batch,
        num_micro_batches=NUM_MICRO_BATCHES,
        schedule=ScheduleSpec(),
        stages=(stage,),
    )


def row_of(
    case: Case, options: argparse.Namespace, device: torch.device, cluster: Cluster
) -> dict[str, Any]:
    batch = torch.randint(
        VOCABULARY,
        (options.micro_batch * NUM_MICRO_BATCHES, LENGTH + 1),
        generator=torch.Generator(),
    )
    plan = plan_of(case, options, cluster)
    model = built(case, options, device)
    profile = profile_model(
        model, loss_fn, batch, ProfileSettings(name="gpt", kind="H200", samples=(options.micro_batch,), dtype=case.dtype, device=device,
        seconds=options.seconds, sequence_length=LENGTH))  # fmt: skip
    del model
    chain = profile.chain(optimizer=case.optimizer)
    timeline = simulate(plan, chain, cluster, model=ComputeModel(profiles={"H200": profile}))
    seconds_by_layer = {
        row.layer: (row.forward_seconds, row.backward_seconds) for row in profile.rows
    }
    predicted = {"bytes": peak_bytes(plan, chain)["n0.0"], "seconds": timeline.iteration_ends[0]}
    gc.collect()
    before = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
    trainer = parallelize(built(case, options, device), loss_fn, optimizer_of(case), batch, plan)
    losses, seconds = [], []
    for step in range(WARM_UP + options.steps):
        if step == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses.append(trainer.step(batch))
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    found = {
        "bytes": peak,
        "seconds": statistics.median(seconds[WARM_UP:]),
        "least": min(seconds[WARM_UP:]),
    }
    host = 0 if trainer.host_state is None else trainer.host_state.memory.num_bytes
    over = {
        what: predicted[what] / found[what] if found[what] else 0.0 for what in ("bytes", "seconds")
    }
    return {
        "predicted": predicted,
        "measured": found,
        "over": over,
        "losses": losses[:3],
        "host_bytes": host,
        "layers": seconds_by_layer,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--cases", default="")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)
    rate = copy_rate(device)
    both = copies_at_once(device) if device.type == "cuda" else rate
    print(json.dumps({"copies": rate, "copies both ways": both}), flush=True)
    cluster = cluster_of(rate)
    has_packages = importlib.util.find_spec("bitsandbytes") is not None and device.type == "cuda"
    for number, case in enumerate(CASES):
        needs = case.packed or case.optimizer == "adamw8bit"
        if (needs and not has_packages) or (
            options.cases and str(number) not in options.cases.split(",")
        ):
            continue
        try:
            row = row_of(case, options, device, cluster)
        except Exception:  # the other cases are still wanted
            row = {"error": traceback.format_exc()[-1500:]}
        print(json.dumps({"what": case.name, **row}), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
