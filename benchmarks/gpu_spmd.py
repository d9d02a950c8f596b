"""Distributed programs on one GPU, against one process on it: ``python -m benchmarks.gpu_spmd
[cuda|cpu]``.

    (1)  one rank on NCCL, which refuses two ranks on one card: the lowered module on CUDA, every
         tensor whole, and NCCL's collectives that unequal parts rest on, at world size 1
    (2)  two ranks on the one card at 0.7 / 0.3, found and data-parallel programs, over gloo through
         host memory

Losses, every gradient and the parameters after three steps are compared with ``run_whole`` on the
same device, in fp64; step times are medians in fp32. With ``cpu`` the same runs on gloo alone,
which is how the script itself is tried.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from argosy.cost.group import DeviceGroup
from argosy.runtime.graphs.calls import run_whole, whole_tensors
from argosy.runtime.step.spmd import Trainer
from argosy.solve.programs.placement import Pricing
from argosy.solve.programs.spmd import Program, find_program
from argosy.space.operations.rules import CutKind
from argosy.workload.capture.trace import capture
from benchmarks.spmd_models import Language

STEPS, WARM = 9, 3
RATIOS = (0.7, 0.3)


def build(dtype: torch.dtype, *, large: bool) -> Any:
    width, layers, batch, time_ = (1024, 6, 32, 256) if large else (64, 2, 8, 16)
    torch.manual_seed(0)
    model = Language(
        2000, time_, width=width, inner=4 * width, heads=8, layers=layers, experts=0
    ).to(dtype)
    ids = torch.randint(0, 2000, (batch, time_))

    def loss(net: torch.nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(net(pair[0]).flatten(0, 1), pair[1].flatten())

    return model, loss, (ids, ids)


def programs(count: int, dtype: torch.dtype, *, large: bool) -> dict[str, Program]:
    """Found by cost, and plain data parallelism, for devices of one speed that share a card; for
    the small model they are taken to be slow, so that sharing it pays."""
    group = DeviceGroup(
        names=tuple(f"rank{rank}" for rank in range(count)),
        flops=(2e13 if large else 1e9,) * count,
        memory_bandwidths=(2e12,) * count,
        memory=(6e10,) * count,
        bandwidth=3e9,
        latency=1e-4 if large else 0.0,
        launch=1e-5 if large else 0.0,
    )
    graph = capture(lambda: build(dtype, large=large), name="language")
    ratios = RATIOS if count == 2 else (1.0,)
    pricing = Pricing(group=group)
    found = {"found": find_program(graph, pricing, ratios=ratios)}
    if count > 1:
        found["by samples"] = find_program(graph, pricing, ratios=ratios, kind=CutKind.SAMPLES)
    return found


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def difference(one: Tensor, other: Tensor) -> float:
    apart, size = (one - other).detach().abs().max(), other.detach().abs().max()
    return float(apart / (1e-6 + size))


def differences(program: Program, device: torch.device) -> tuple[float, float, float]:
    """Largest relative difference of losses, gradients and parameters over three steps."""
    graph = program.graph
    model, _, batch = build(torch.float64, large=False)
    named = {
        key: tensor.detach() for key, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    trainer = Trainer(program, named.items(), optimizer=adamw, device=device)
    leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(batch)[0]}
    held = {
        value: tensor.to(device)
        for value, tensor in whole_tensors(graph, {**named, **leaves}).items()
    }
    reference = {value: torch.nn.Parameter(held[value].clone()) for value in graph.parameters}
    update = adamw(reference.values())
    loss_gap = gradient_gap = parameter_gap = 0.0
    for step in range(3):
        loss, gradients, _ = run_whole(graph, {**held, **reference}, step=step)
        own = trainer.backward(batch)
        loss_gap = max(loss_gap, abs(own / float(loss) - 1))
        for value, gradient in gradients.items():
            grad = trainer.held[value].grad
            assert grad is not None
            gradient_gap = max(gradient_gap, difference(trainer.whole(value, grad), gradient))
            reference[value].grad = gradient
        update.step()
        trainer.optimizer.step()
        trainer.clock.step += 1
    for value, parameter in reference.items():
        parameter_gap = max(
            parameter_gap, difference(trainer.whole(value, trainer.held[value].detach()), parameter)
        )
    return loss_gap, gradient_gap, parameter_gap


def step_seconds(program: Program, device: torch.device) -> float:
    """Median of the slowest rank's steps."""
    model, _, batch = build(torch.float32, large=device.type == "cuda")
    named = [*model.named_parameters(), *model.named_buffers()]
    trainer = Trainer(program, named, optimizer=adamw, device=device)
    there = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
    seconds = []
    for _ in range(STEPS):
        dist.barrier()
        _wait(device)
        begin = time.perf_counter()
        trainer.step(there)
        _wait(device)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[WARM:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def collectives_hold(device: torch.device) -> bool:
    """The calls that unequal parts rest on, at this world size: sums, swaps and broadcasts of a
    tensor."""
    own = torch.arange(7.0, device=device)
    swapped, size = torch.empty_like(own), dist.get_world_size()
    assert size == 1
    dist.all_to_all_single(swapped, own, [7], [7])
    total = own.clone()
    dist.all_reduce(total)
    dist.broadcast(total, 0)
    gathered = [torch.empty_like(own)]
    dist.all_gather(gathered, own)
    return all(torch.equal(other, own) for other in (swapped, total, gathered[0]))


def rank(
    number: int, count: int, store: str, kind: str, backend: str, cases: Sequence[Any], pipe: Any
) -> None:
    """What one process does: every case checked and timed."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group(
        backend, store=dist.FileStore(store, count), rank=number, world_size=count
    )
    found = [collectives_hold(device)] if count == 1 else []
    for small, large in cases:
        found.append((differences(small, device), step_seconds(large, device)))
    pipe.send(found)
    dist.destroy_process_group()


def measured(count: int, kind: str, backend: str, cases: Sequence[Any]) -> list[Any]:
    """What every rank found."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number in range(count):
            here, there = context.Pipe()
            given = (number, count, str(Path(folder) / "store"), kind, backend, cases, there)
            process = context.Process(target=rank, args=given)
            process.start()
            started.append((here, process))
        results = [pipe.recv() for pipe, _ in started]
        for _, process in started:
            process.join()
    return results


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    for count in (1, 2):
        backend = "nccl" if kind == "cuda" and count == 1 else "gloo"
        small = programs(count, torch.float64, large=False)
        large = programs(count, torch.float32, large=kind == "cuda")
        results = measured(count, kind, backend, [(small[name], large[name]) for name in small])
        told = [f"{kind}, {backend}, {count} rank" + ("s" if count > 1 else "")]
        if count == 1:
            told.append(
                f"  collectives at world size 1 return what they were given: {results[0].pop(0)}"
            )
        for place, name in enumerate(small):
            gaps = [max(result[place][0][what] for result in results) for what in range(3)]
            seconds = max(result[place][1] for result in results)
            told.append(
                f"  {name}: {len(small[name].moves)} collectives; fp64 differences: losses {gaps[0]:.1e}, "
                f"gradients {gaps[1]:.1e}, parameters {gaps[2]:.1e}; fp32 step {1e3 * seconds:.1f} ms"
            )
            assert gaps[0] < 1e-9 and gaps[1] < 1e-9 and gaps[2] < 1e-7
        sys.stdout.write("\n".join(told) + "\n")


if __name__ == "__main__":
    main()
