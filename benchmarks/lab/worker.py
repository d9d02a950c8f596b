"""One rank of a run in the lab: `python -m benchmarks.lab.worker PLAN JOB STEPS RESULT`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from argosy.cluster.file import cluster_from_content
from argosy.plan.file import load_plan
from argosy.runtime.emulated import say_ready
from argosy.runtime.trainer import parallelize
from benchmarks.lab.emulated import Job, build_model, loss_of, speed_of


def main(plan_file: str, job_file: str, steps: str, result_file: str) -> None:
    torch.set_num_threads(1)
    plan = load_plan(plan_file)
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    import os

    device = cluster_from_content(plan.cluster.content).device(os.environ["ARGOSY_DEVICE"])
    model = build_model(job, lambda: speed_of(device.kind.name))
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
    if dist.get_rank() == 0:
        Path(result_file).write_text(json.dumps(times), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
