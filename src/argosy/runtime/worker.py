"""One process of a run: ``python -m argosy.runtime.worker PLAN FILE.py:build ...``, started by torchrun.

Rank 0 appends a line of JSON to ``progress.jsonl`` in the run's folder after every step (those of steps before the
checkpoint with which it begins stay), one to ``decisions.jsonl`` for every change that it decides and for what came of
it, and writes ``timeline.json`` at the end. A rank that fails leaves a note there (``failure``).
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from argosy.adapt.advisor import Brief
from argosy.adapt.controller import Limits, Reach
from argosy.cluster.file import cluster_from_content
from argosy.cluster.lasting import at_time_zero
from argosy.cost.remembered import cost_model_of
from argosy.errors import ArgosyError, InputError, Problem, RunError
from argosy.plan.file import load_plan
from argosy.plan.model import planned_chain
from argosy.plan.plan import Plan
from argosy.runtime import checkpoint
from argosy.runtime.adapting import Adapter
from argosy.runtime.emulated import join_device, say_ready
from argosy.runtime.failure import ElsewhereError, leave_note, told
from argosy.runtime.folder import CHECKPOINTS, DECISIONS, PROGRESS, TIMELINE, append, checkpoints, forget_after
from argosy.runtime.hardware import check_hardware
from argosy.runtime.initialise import Recording
from argosy.runtime.metrics import Metrics, serve
from argosy.runtime.mixing import undivided
from argosy.runtime.orphan import end_with_parent
from argosy.runtime.program import Program, load_program
from argosy.runtime.ranks import devices_by_rank
from argosy.runtime.saving import Saver
from argosy.runtime.trainer import Trainer, parallelize
from argosy.runtime.world import check_supported, join
from argosy.timeline.file import dumps_timeline

_RECORDED = 50
"""Steps whose spans are kept."""


def arguments(values: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="argosy.runtime.worker")
    parser.add_argument("plan")
    parser.add_argument("program")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--init", type=Path)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--patience", type=float, default=600.0)
    parser.add_argument("--any-device", action="store_true")
    parser.add_argument("--adapt", default="off")
    parser.add_argument("--model")
    parser.add_argument("--horizon", type=int, default=1000)
    parser.add_argument("--min-gain", type=float, default=0.02)
    parser.add_argument("--profile", action="append", default=[])
    parser.add_argument("--metrics-port", type=int)
    return parser.parse_args(values)


def main(values: list[str]) -> int:
    end_with_parent()
    options = arguments(values)
    rank = int(os.environ.get("RANK", "0"))
    device = "?"
    try:
        plan = load_plan(options.plan)
        devices = devices_by_rank(plan)
        device = devices[rank] if rank < len(devices) else "no device of the plan"
        work(options, plan, rank)
    except ArgosyError as error:
        first_hand = not isinstance(error, ElsewhereError)
        _note(options, rank, device, str(error), error.exit_code, first_hand=first_hand)
        return error.exit_code
    except Exception as error:  # the user's own code may raise anything
        _note(options, rank, device, told(error), RunError.exit_code, first_hand=True)
        return RunError.exit_code
    return 0


def _note(options: Any, rank: int, device: str, message: str, exit_code: int, *, first_hand: bool) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    leave_note(options.out, rank=rank, device=device, message=message, exit_code=exit_code, first_hand=first_hand)


def work(options: argparse.Namespace, plan: Plan, rank: int) -> None:
    """Build, join, train, write down."""
    join_device()
    check_supported(plan)
    if not options.any_device:
        check_hardware(plan, rank)
    program = load_program(options.program)
    join(plan, patience=datetime.timedelta(seconds=options.patience))
    trainer, data = prepare(program, plan, options)
    say_ready()
    train(trainer, data, options)
    dist.destroy_process_group()


def prepare(program: Program, plan: Plan, options: Any) -> tuple[Trainer, Callable[[int], Any]]:
    """The trainer of this rank, and where its batches come from."""
    torch.manual_seed(options.seed)
    with Recording() as recording:
        built = program.build()
    if not isinstance(built, tuple) or len(built) != 3:
        found = f"{len(built)} values" if isinstance(built, tuple) else type(built).__name__
        raise InputError([Problem(path="build()", found=found, expected="(model, loss_fn, batch)")])
    model, loss_fn, batch = built
    batch = tree_map(lambda leaf: recording.materialise([leaf])[0] if isinstance(leaf, Tensor) else leaf, batch)
    optimizer = program.optimizer or torch.optim.AdamW
    trainer = parallelize(
        model, loss_fn, optimizer, batch, plan, clip_norm=options.clip, recording=recording, seed=options.seed
    )
    if options.init is not None:
        checkpoint.load_weights(trainer, options.init)
    saved = checkpoints(options.out / CHECKPOINTS)
    if options.resume and saved:
        trainer.load(saved[-1])
    return trainer, program.data or (lambda step: batch)


def train(trainer: Trainer, data: Callable[[int], Any], options: Any) -> None:
    progress = options.out / PROGRESS
    if trainer.rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        forget_after(options.out, trainer.steps)
    metrics = Metrics()
    if options.metrics_port is not None and trainer.rank == 0:
        serve(metrics, options.metrics_port)

    def tell(event: dict[str, Any]) -> None:
        append(options.out / DECISIONS, event)
        metrics.decision(event)

    adapter = adapter_of(trainer, options, tell) if options.adapt != Reach.OFF else None
    saver = Saver()
    first, last = trainer.steps, trainer.steps + options.steps
    while trainer.steps < last:
        begin = time.perf_counter()
        with saver.heeded():
            loss = trainer.step(data(trainer.steps))
        seconds = time.perf_counter() - begin
        if trainer.rank == 0:
            line: dict[str, Any] = {"step": trainer.steps - 1, "loss": loss, "seconds": seconds}
            if adapter is not None:
                line["schedule"] = repr(trainer.plan.schedule)
                metrics.beliefs(adapter.believed, adapter.speeds)
            append(progress, line)
            metrics.step(loss, seconds, trainer.plan.global_batch)
        if trainer.steps == min(last, first + _RECORDED):  # at once, because clocks drift apart
            write_timeline(trainer, options.out / TIMELINE)
            trainer.recorder.enabled = adapter is not None
            if adapter is not None:
                adapter.keeps_marks = False
        if adapter is not None:
            adapter.after_step(seconds, last - trainer.steps)
        if trainer.steps == last or (options.save_every and trainer.steps % options.save_every == 0):
            saver.begin(trainer, options.out / CHECKPOINTS)
    saver.wait()
    if adapter is not None:
        adapter.close()


def adapter_of(trainer: Trainer, options: Any, tell: Callable[[dict[str, Any]], None]) -> Adapter:
    """What watches a run and changes it."""
    plan = trainer.plan
    costs = cost_model_of(plan, options.profile)
    chain = planned_chain(plan.model, options.model)
    brief = Brief(
        plan=plan,
        chain=costs.chain(chain),
        cluster=at_time_zero(costs.cluster(cluster_from_content(plan.cluster.content))),
        model=costs.compute_model,
        limits=Limits(reach=Reach(options.adapt), horizon=options.horizon, min_gain=options.min_gain),
        roster=trainer.roster,
        undivided=() if trainer.making is None else undivided(trainer.making.recipe.layers),
    )
    return Adapter(trainer, brief, tell)


def write_timeline(trainer: Trainer, path: Path) -> None:
    timeline = trainer.timeline()
    if timeline is not None:
        path.write_text(dumps_timeline(timeline))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
