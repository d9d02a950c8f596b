"""A found program and the even split on real processes of unequal speed, and their measured step times.

Two processes on gloo. The second is slowed by sleeping after every operation, in proportion to how long the operation
took; collectives are real. What is measured is the slowest rank's median step.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from argosy.cost.group import DeviceGroup
from argosy.solve.placement import Pricing
from argosy.solve.spmd import Program, find_program
from argosy.space.rules import Kind
from argosy.workload.capture.trace import capture
from benchmarks.spmd_models import Language

SLOWNESS = (1.0, 3.0)
STEPS = 7


def build() -> Any:
    model = Language(2000, 64, width=256, inner=1024, heads=8, layers=3, experts=0)
    ids = torch.randint(0, 2000, (32, 64))

    def loss(net: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())

    return model, loss, (ids, ids)


class Slowed(fx.Interpreter):
    """Runs a rank's module and sleeps after what it computed itself."""

    COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

    def __init__(self, module: fx.GraphModule, slowness: float) -> None:
        super().__init__(module)
        self.extra = slowness - 1.0
        self.debt = 0.0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        begin = time.perf_counter()
        out = super().call_function(target, args, kwargs)
        if getattr(target, "__name__", "").startswith(self.COLLECTIVES):
            return out
        self.debt += self.extra * (time.perf_counter() - begin)
        if self.debt > 2e-3:
            time.sleep(self.debt)
            self.debt = 0.0
        return out


def _rank(rank: int, store: str, program: Program, pipe: Any) -> None:
    import torch.distributed as dist

    from argosy.runtime.spmd import Trainer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model, _, batch = build()
    named = [*model.named_parameters(), *model.named_buffers()]
    trainer = Trainer(program, named, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    module = trainer.module
    trainer.module = lambda *given: Slowed(module, SLOWNESS[rank]).run(*given)  # type: ignore[assignment]
    seconds, losses = [], []
    for _ in range(STEPS):
        dist.barrier()
        begin = time.perf_counter()
        losses.append(trainer.step(batch))
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    pipe.send((statistics.median(seconds[1:]), losses))
    dist.destroy_process_group()


def measured(program: Program) -> tuple[float, list[float]]:
    """Median step time of the slowest rank, and the losses."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=_rank, args=(rank, store, program, there))
            process.start()
            pipes.append(here)
            processes.append(process)
        results = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return max(seconds for seconds, _ in results), results[0][1]


def group() -> DeviceGroup:
    """Two cores of about 20 GFLOP/s, one slowed, over loopback."""
    return DeviceGroup(
        names=("quick", "slow"),
        flops=tuple(20e9 / slowness for slowness in SLOWNESS),
        memory_bandwidths=tuple(8e9 / slowness for slowness in SLOWNESS),
        memory=(8e9, 8e9),
        bandwidth=0.6e9,
        latency=1e-4,
        launch=2e-5,
    )


def compare() -> tuple[float, float, float]:
    """Step seconds of the even split, of the found program, and the largest relative difference of their losses."""
    graph, pricing = capture(build, name="language"), Pricing(group=group())
    even = find_program(graph, pricing, ratios=(0.5, 0.5), kind=Kind.SAMPLES)
    found = find_program(graph, pricing)
    slow, expected = measured(even)
    quick, losses = measured(found)
    return slow, quick, max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
