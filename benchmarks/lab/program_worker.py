"""One rank of ``benchmarks.lab.programs``: `python -m benchmarks.lab.program_worker PLAN JOB
RESULT`.

An action computes, and then waits until its seconds have passed; those in which devices of a stage
exchange tensors are added to them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from argosy.plan.file import load_plan
from argosy.runtime.communication.marks import SPAN_KIND, Recorder
from argosy.runtime.processes.emulated import say_ready
from argosy.runtime.step.trainer import parallelize
from argosy.schedule import Action
from benchmarks.lab.program_builds import built, optimizer


def pace(recorder: Recorder, seconds: Mapping[str, float]) -> None:
    """Make the actions of a rank take the seconds that are given by kind and stage."""
    computing = recorder.computing

    @contextmanager
    def paced(action: Action) -> Iterator[None]:
        begin = time.perf_counter()
        with computing(action):
            yield
            exchanged = sum(end - start for start, end in recorder.exchanges or ())
            until = begin + exchanged + seconds[f"{SPAN_KIND[action.kind]} {action.stage}"]
            time.sleep(max(0.0, until - time.perf_counter()))

    recorder.computing = paced  # type: ignore[method-assign, assignment]


def main(plan_file: str, job_file: str, result_file: str) -> None:
    torch.set_num_threads(1)
    plan = load_plan(plan_file)
    job: Any = json.loads(Path(job_file).read_text(encoding="utf-8"))
    model, loss_fn, batch = built(job["program"])
    trainer = parallelize(model, loss_fn, optimizer, batch, plan, cut=job["cut"])
    pace(trainer.executor.recorder, job["paces"][os.environ["ARGOSY_DEVICE"]])
    losses = [trainer.step(batch)]  # the first also agrees on the forms of messages
    dist.barrier()
    if dist.get_rank() == 0:
        say_ready()
    times = []
    for _ in range(job["steps"]):
        begin = time.perf_counter()
        losses.append(trainer.step(batch))
        times.append(time.perf_counter() - begin)
    dist.barrier()
    if dist.get_rank() == 0:
        result = {"times": times, "losses": [float(loss) for loss in losses]}
        Path(result_file).write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
