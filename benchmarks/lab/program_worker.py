"""One rank of ``benchmarks.lab.programs``: `python -m benchmarks.lab.program_worker PLAN JOB
RESULT`.

An action computes, and then waits until its seconds have passed; those in which devices of a stage
exchange tensors are added to them. If weights are gathered (ZeRO 3), segments that have weights do
the same, so that gathers have the computation to overlap with that the device would have.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from argosy.plan.file import load_plan
from argosy.runtime.communication.marks import SPAN_KIND, Recorder
from argosy.runtime.processes.emulated import say_ready
from argosy.runtime.step.trainer import parallelize
from argosy.runtime.weights.gate import WeightGate
from argosy.schedule import Action, ActionKind
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
            _sleep_until(until)

    recorder.computing = paced  # type: ignore[method-assign, assignment]


def pace_segments(gate: WeightGate, seconds: Sequence[Sequence[float]]) -> None:
    """Make the segments around which weights are gathered take their (forward, backward) seconds.
    ``pace`` waits for the rest of an action."""
    run, open_gate, close = gate.run, gate.open, gate.close
    begun: dict[int, float] = {}

    def paced_run(index: int, segment: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        def slow(*values: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = segment(*values, **named)
            _sleep_until(begin + seconds[index][0])
            return result

        return run(index, slow, arguments, keywords)

    def paced_open(index: int, kind: ActionKind) -> None:
        open_gate(index, kind)
        begun[index] = time.perf_counter()

    def paced_close(index: int) -> None:
        _sleep_until(begun.get(index, 0.0) + seconds[index][1])
        close(index)

    gate.run, gate.open, gate.close = paced_run, paced_open, paced_close  # type: ignore[method-assign]


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def main(plan_file: str, job_file: str, result_file: str) -> None:
    torch.set_num_threads(1)
    plan = load_plan(plan_file)
    job: Any = json.loads(Path(job_file).read_text(encoding="utf-8"))
    model, loss_fn, batch = built(job["program"])
    trainer = parallelize(model, loss_fn, optimizer, batch, plan, cut=job["cut"])
    device = os.environ["ARGOSY_DEVICE"]
    pace(trainer.executor.recorder, job["paces"][device])
    for stage, gate in trainer.gates.items():
        pace_segments(gate, job["segments"][f"{device} {stage}"])
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
