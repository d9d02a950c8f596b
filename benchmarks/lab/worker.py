"""One rank of a run in the lab: `python -m benchmarks.lab.worker PLAN JOB STEPS RESULT`.

Rank 0 writes the seconds of every step, and the most memory that each device held during one more.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from argosy.cluster.file import cluster_from_content
from argosy.measure.allocated import Allocations
from argosy.plan.file import load_plan
from argosy.runtime.processes.emulated import join_device, say_ready
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.processes.world import gather_texts
from argosy.runtime.step.trainer import Trainer, parallelize
from argosy.timeline.file import dumps_timeline
from benchmarks.lab import real
from benchmarks.lab.emulated import Job, build_model, loss_of, speed_of


def main(plan_file: str, job_file: str, steps: str, result_file: str) -> None:
    torch.set_num_threads(1)
    plan = load_plan(plan_file)
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    device = cluster_from_content(plan.cluster.content).device(os.environ["ARGOSY_DEVICE"])
    if job.real:
        join_device()
    model = (
        real.build_model(job) if job.real else build_model(job, lambda: speed_of(device.kind.name))
    )
    batch = torch.zeros(plan.global_batch, job.values)
    trainer = parallelize(model, loss_of, lambda p: torch.optim.SGD(p, lr=0.0), batch, plan)
    trainer.step(batch)  # the first tells the stages what will come
    dist.barrier()
    if dist.get_rank() == 0:
        say_ready()
    times = []
    for _ in range(int(steps)):
        begin = time.perf_counter()
        trainer.step(batch)
        times.append(time.perf_counter() - begin)
    dist.barrier()
    peaks = [
        json.loads(text)
        for text in gather_texts(json.dumps(peak(trainer, batch)), torch.device("cpu"))
    ]
    timeline = trainer.timeline()
    if timeline is not None:
        Path(result_file).with_name("timeline.json").write_text(
            dumps_timeline(timeline), encoding="utf-8"
        )
    if dist.get_rank() == 0:
        found = {"times": times, "peaks": dict(zip(devices_by_rank(plan), peaks, strict=True))}
        Path(result_file).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def peak(trainer: Trainer, batch: torch.Tensor) -> float:
    """Bytes: the weights, which SGD keeps nothing beside, and the most that one step allocates on
    top."""
    weights = sum(p.numel() * p.element_size() for p in trainer.gradients.parameters())
    with Allocations(torch.device("cpu")) as allocations:
        trainer.step(batch)
    return weights + allocations.segments[0].peak


if __name__ == "__main__":
    main(*sys.argv[1:])
