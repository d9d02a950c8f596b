"""What the runtime costs beside the computation: one stage against a plain loop, a pipeline against
its recurrence.

The pipeline's stages sleep instead of computing, so that processes on few cores do not take time
from each other; its ideal is the recurrence of the schedule with the same durations and free
transfers.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from argosy.dtype import Dtype
from argosy.lab.job import free_port
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.runtime.communication.marks import Recorder
from argosy.runtime.step.trainer import parallelize
from argosy.schedule import Action, ActionKind, ScheduleKind, ScheduleSpec, build_schedule
from benchmarks.registry import Benchmark, Row
from benchmarks.unit_grid import unit_times

UNIT = 0.02
"""Seconds that a stage's forward sleeps; a backward sleeps two."""
_PAIRS, _REPEATS = 15, 5
STEP = 0.1
"""Seconds of CPU time that the plain loop's step is made to take."""


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(UNIT)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(2 * UNIT)
        return gradients[0]


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Sleep.apply(x * self.weight)  # type: ignore[no-untyped-call]
        return result


def plan_of(num_stages: int, layers: int, samples: int, count: int, spec: ScheduleSpec) -> Plan:
    each = layers // num_stages
    return Plan(
        model=ModelRef(name="benchmark", sequence_length=1, dtype=Dtype.FP32),
        cluster=ClusterRef(name="local", hash="", content="{}"),
        global_batch=samples * count,
        micro_batch_size=samples,
        num_micro_batches=count,
        schedule=spec,
        stages=tuple(
            Stage(
                first=index * each,
                end=(index + 1) * each,
                replicas=(Replica(devices=(f"n0.{index}",), samples=samples),),
            )
            for index in range(num_stages)
        ),
    )


def mean_loss(model: Any, batch: Tensor) -> Tensor:
    result: Tensor = model(batch).square().mean()
    return result


def _join(rank: int, world: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)


def _one_stage(rank: int, port: int, results: Any) -> None:
    """The same model trained by a plain loop and by the runtime, turn by turn; per repeat, the
    times of both."""
    _join(rank, 1, port)
    results.put([_turn_by_turn(samples) for samples in [_samples_for_a_step()] * _REPEATS])
    dist.destroy_process_group()


def _samples_for_a_step() -> int:
    """Samples of a micro-batch with which the plain loop takes ``STEP``; what does not grow with
    them is why it is asked twice."""
    samples = 40
    for _ in range(2):
        samples = max(1, round(samples * STEP / _turn_by_turn(samples)["loop"]))
    return samples


def _turn_by_turn(samples: int) -> dict[str, float]:
    width, count = 320, 4

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(24))
        )

    batch = torch.randn(samples * count, width)
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters())
    trainer = parallelize(
        model(), mean_loss, torch.optim.AdamW, batch, plan_of(1, 24, samples, count, ScheduleSpec())
    )

    def loop() -> None:
        optimizer.zero_grad()
        total = torch.zeros(())
        for rows in batch.split(samples):
            loss = mean_loss(plain, rows) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        total.item()

    times: dict[str, list[float]] = {"loop": [], "runtime": []}
    for _ in range(_PAIRS):
        for name, step in (("loop", loop), ("runtime", lambda: trainer.step(batch))):
            begin = time.process_time()
            step()
            times[name].append(time.process_time() - begin)
    return {name: statistics.median(values[3:]) for name, values in times.items()}


def _pipeline(
    rank: int, world: int, port: int, kind: str, k: int, count: int, results: Any
) -> None:
    _join(rank, world, port)
    spec = ScheduleSpec(kind=ScheduleKind(kind), k=k)
    batch = torch.randn(count, 1024)
    model = nn.Sequential(*(Sleeper() for _ in range(world)))
    trainer = parallelize(
        model, mean_loss, torch.optim.SGD, batch, plan_of(world, world, 1, count, spec)
    )
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        trainer.step(batch)
        times.append(time.perf_counter() - begin)
    if rank == 0:
        results.put(min(times[1:]))
    dist.destroy_process_group()


def mark_seconds(count: int = 100_000) -> float:
    """What writing one span down costs."""
    recorder, action = Recorder(torch.device("cpu")), Action(0, ActionKind.FORWARD, 0)
    begin = time.process_time()
    for _ in range(count):
        with recorder.computing(action):
            pass
    return (time.process_time() - begin) / count


def measure() -> list[Row]:
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_one_stage, args=(free_port(), results), nprocs=1)  # type: ignore[no-untyped-call]
    repeats = results.get()
    ratios = sorted(times["runtime"] / times["loop"] for times in repeats)
    step = statistics.median(times["loop"] for times in repeats)
    rows = [
        Row(what="a step of a plain loop, CPU time", value=step * 1e3, unit="ms"),
        Row(
            what=f"one stage over a plain loop, median of {_REPEATS}",
            value=statistics.median(ratios),
            unit="x",
            target="<= 1.03",
        ),
        Row(what="the least of them", value=ratios[0], unit="x"),
        Row(what="the most of them", value=ratios[-1], unit="x"),
    ]
    rows.append(Row(what="writing a span down", value=mark_seconds() * 1e6, unit="us"))
    for world, kind, k, count in ((2, "1f1b", 1, 8), (2, "kfkb", 2, 8), (3, "1f1b", 1, 8)):
        arguments = (world, free_port(), kind, k, count, results)
        multiprocessing.spawn(_pipeline, args=arguments, nprocs=world)  # type: ignore[no-untyped-call]
        measured = results.get()
        times = unit_times(build_schedule(ScheduleSpec(kind=ScheduleKind(kind), k=k), world, count))
        ideal = UNIT * max(end for _, end in times.values())
        rows.append(
            Row(
                what=f"{world} stages, {kind} k={k}, over the recurrence",
                value=measured / ideal,
                unit="x",
            )
        )
    return rows


BENCHMARK = Benchmark(
    name="runtime", shows="what the runtime costs beside the computation", measure=measure
)
