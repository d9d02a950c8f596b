"""One rank of an adaptive run in the lab: `python -m benchmarks.lab.adaptive_worker TASK.json`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from argosy.adapt.advisor import Brief
from argosy.adapt.controller import AdaptationLevel, ControllerLimits
from argosy.cluster.file import cluster_from_content
from argosy.cluster.lasting import at_time_zero
from argosy.cost.compute import ComputeModel
from argosy.plan.file import loads_plan
from argosy.plan.plan import Plan
from argosy.runtime.job.adapting import Adapter, change_to
from argosy.runtime.processes.emulated import say_ready
from argosy.runtime.step.trainer import Trainer, parallelize
from benchmarks.lab.emulated import Job, build_model, loss_of, speed_of
from benchmarks.lab.run import with_payload


class _Clock:
    """Seconds since the lab's traces began, the same on all ranks; 0 before."""

    began = float("inf")

    def now(self) -> float:
        return max(0.0, time.monotonic() - self.began)

    def begin(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            say_ready()
        moment = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.broadcast(moment, 0)
        self.began = moment.item()


class _Script:
    """Plans by the clock, for whoever knows what will happen."""

    def __init__(self, trainer: Trainer, plans: list[tuple[float, Plan]]) -> None:
        self.trainer, self.plans, self.at = trainer, plans, 0

    def after_step(self, now: float) -> None:
        index = torch.tensor([max(at for at, (begin, _) in enumerate(self.plans) if begin <= now)])
        dist.broadcast(index, 0)
        if int(index) != self.at:
            self.at = int(index)
            change_to(self.trainer, self.plans[self.at][1])


def main(task_file: str) -> None:
    torch.set_num_threads(1)
    task: dict[str, Any] = json.loads(Path(task_file).read_text(encoding="utf-8"))
    job = Job(**task["job"])
    scripted = [(begin, loads_plan(text)) for begin, text in task["plans"]]
    plan = scripted[0][1]
    cluster = cluster_from_content(task["cluster"])
    device, clock = cluster.device(os.environ["ARGOSY_DEVICE"]), _Clock()
    model = build_model(job, lambda: speed_of(device.kind.name) * device.speed.at(clock.now()))
    batch = torch.zeros(plan.global_batch, job.values)
    trainer = parallelize(
        model,
        loss_of,
        lambda p: torch.optim.SGD(p, lr=0.0),
        batch,
        plan,
        roster=tuple(task["roster"]),
    )
    events: list[Any] = []
    adapter = script = None
    if task["policy"] in list(AdaptationLevel):
        brief = Brief(
            plan=plan,
            chain=job.chain,
            cluster=with_payload(at_time_zero(cluster), task["payload"]),
            model=ComputeModel(profiles=job.profiles(cluster, plan.global_batch)),
            limits=ControllerLimits(reach=AdaptationLevel(task["policy"]), horizon=task["horizon"]),
            roster=tuple(task["roster"]),
        )
        adapter = Adapter(
            trainer, brief, lambda event: events.append({**event, "time": clock.now()})
        )
        adapter.keeps_marks = False
    else:
        script = _Script(trainer, scripted)
        trainer.recorder.enabled = False
    trainer.step(batch)
    clock.begin()
    steps = _run(trainer, batch, clock, task["seconds"], adapter, script)
    if adapter is not None:
        adapter.close()
    if trainer.rank == 0:
        result = {
            "policy": task["name"],
            "global_batch": plan.global_batch,
            "steps": steps,
            "events": events,
        }
        Path(task["result"]).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _run(
    trainer: Trainer,
    batch: Any,
    clock: _Clock,
    seconds: float,
    adapter: Adapter | None,
    script: _Script | None,
) -> list[dict[str, Any]]:
    """Steps until the time is over; rank 0's clock says when."""
    steps = []
    while True:
        go_on = torch.tensor([float(clock.now() < seconds)])
        dist.broadcast(go_on, 0)
        if not go_on.item():
            return steps
        start = clock.now()
        trainer.step(batch)
        took = clock.now() - start
        believed = {} if adapter is None else {**adapter.believed, **adapter.speeds}
        steps.append(
            {"start": start, "seconds": took, "plan": repr(trainer.plan), "believed": believed}
        )
        if adapter is not None:
            adapter.after_step(took, max(1, int((seconds - clock.now()) / took)))
            steps[-1]["seen"] = adapter.seen
        if script is not None:
            script.after_step(clock.now())


if __name__ == "__main__":
    main(sys.argv[1])
