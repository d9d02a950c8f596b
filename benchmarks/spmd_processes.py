"""A found program and the even split on real processes of unequal speed, and their measured step
times.

Two processes on gloo, whose computing threads get unequal shares of a core by control groups (as in
the lab; needs root); collectives are real. What is measured is the slowest rank's median step.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from argosy.cost.group import DeviceGroup
from argosy.lab.record import start_time
from argosy.lab.system import CoreShare
from argosy.runtime.processes.orphan import end_with_parent
from argosy.solve.programs.placement import Pricing
from argosy.solve.programs.spmd import Program, find_program
from argosy.space.operations.rules import CutKind
from argosy.workload.capture.trace import capture
from benchmarks.spmd_models import Language

SHARES = (0.3, 0.1)
"""Of a core."""
GROUPS = "argosy-spmd-"
"""Before the process and the rank that a control group is for."""
STEPS = 5


def build() -> Any:
    model = Language(2000, 64, width=256, inner=1024, heads=8, layers=2, experts=0)
    ids = torch.randint(0, 2000, (16, 64))

    def loss(net: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())

    return model, loss, (ids, ids)


def _rank(rank: int, store: str, program: Program, threads: str, pipe: Any) -> None:
    import torch.distributed as dist

    from argosy.runtime.step.spmd import Trainer

    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model, _, batch = build()
    named = [*model.named_parameters(), *model.named_buffers()]
    trainer = Trainer(program, named, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    Path(threads).write_text(str(threading.get_native_id()))
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
    with tempfile.TemporaryDirectory() as folder, _core_shares() as shares:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, store, program, str(shares[rank].threads), there)
            )
            process.start()
            pipes.append(here)
            processes.append(process)
        results = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return max(seconds for seconds, _ in results), results[0][1]


@contextlib.contextmanager
def _core_shares() -> Iterator[list[CoreShare]]:
    remove_left()
    shares = [CoreShare(f"{GROUPS}{os.getpid()}-{rank}") for rank in range(len(SHARES))]
    try:
        for share, part in zip(shares, SHARES, strict=True):
            share.create()
            share.set(part)
        yield shares
    finally:
        for share in shares:
            share.remove()


def remove_left() -> None:
    """The groups of runs that were killed, and could not remove them."""
    for folder in CoreShare(GROUPS).folder.parent.glob(f"{GROUPS}*"):
        process = folder.name.removeprefix(GROUPS).partition("-")[0]
        if process.isdigit() and start_time(int(process)) is None:
            with contextlib.suppress(
                OSError
            ):  # its ranks are still ending: the next run removes it
                folder.rmdir()


def group() -> DeviceGroup:
    """Shares of cores of about 20 GFLOP/s, over loopback."""
    return DeviceGroup(
        names=("quick", "slow"),
        flops=tuple(20e9 * share for share in SHARES),
        memory_bandwidths=tuple(8e9 * share for share in SHARES),
        memory=(8e9, 8e9),
        bandwidth=0.6e9,
        latency=1e-4,
        launch=1e-4,
    )


def compare() -> tuple[float, float, float]:
    """Step seconds of the even split, of the found program, and the largest relative difference of
    their losses."""
    graph, pricing = capture(build, name="language"), Pricing(group=group())
    even = find_program(graph, pricing, ratios=(0.5, 0.5), kind=CutKind.SAMPLES)
    found = find_program(graph, pricing)
    slow, expected = measured(even)
    quick, losses = measured(found)
    return slow, quick, max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
