"""Run one process of a run: ``python -m argosy.runtime.job.worker RUN.json``, started by torchrun.

In the run's folder, rank 0 appends a line of JSON to ``progress.jsonl`` after every step (lines of
steps before the checkpoint that it resumes from stay) and one to ``decisions.jsonl`` for every
change that it decides and for its outcome, and writes ``timeline.json`` at the end. A rank that
fails leaves a note there (``failure``).
"""

from __future__ import annotations

import contextlib
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
from argosy.adapt.controller import AdaptationLevel, ControllerLimits
from argosy.cluster.file import cluster_from_content
from argosy.cluster.lasting import at_time_zero
from argosy.cost.remembered import cost_model_of
from argosy.document import JsonObject
from argosy.errors import ArgosyError, Problem, RunError, raise_any
from argosy.plan.file import load_plan
from argosy.plan.plan import Plan
from argosy.plan.runnable import splits_after
from argosy.runtime.job.adapting import Adapter
from argosy.runtime.job.agreement import (
    Facts,
    check_agreed,
    given_facts,
    loaded_facts,
    with_first_compared,
)
from argosy.runtime.job.built import model_facts, settings_facts, updating_facts
from argosy.runtime.job.metrics import Metrics, serve
from argosy.runtime.job.program import UserProgram, check_loader, load_program, split_name
from argosy.runtime.processes.emulated import join_device, say_ready
from argosy.runtime.processes.failure import ElsewhereError, ending_after, leave_note, told
from argosy.runtime.processes.hardware import check_hardware
from argosy.runtime.processes.orphan import end_with_parent
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.processes.run_folder import (
    CHECKPOINTS,
    DECISIONS,
    EVENTS,
    PROGRESS,
    TIMELINE,
    Log,
    checkpoints,
    forget_after,
    keep_private,
)
from argosy.runtime.processes.run_spec import RunSpec, read_run_spec
from argosy.runtime.processes.world import check_supported, device_of, join
from argosy.runtime.state import checkpoint
from argosy.runtime.state.saving import Saver
from argosy.runtime.step.loading import batches_of
from argosy.runtime.step.trainer import Trainer, parallelize
from argosy.timeline.file import dumps_timeline
from argosy.workload.capture.digest import initial_digest
from argosy.workload.capture.initial import Recording, run_build

# Steps whose spans are recorded, from the beginning of a run or generation; this bounds the size of
# the timeline.
RECORDED = 50


def main(values: list[str]) -> int:
    end_with_parent()
    keep_private()
    rank = int(os.environ.get("RANK", "0"))
    device = "?"
    try:
        spec = read_run_spec(values[0])
    except ArgosyError as error:  # the run's folder is not known, so no note can be left
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    try:
        plan = load_plan(spec.plan)
        devices = devices_by_rank(plan)
        device = devices[rank] if rank < len(devices) else "no device of the plan"
        work(spec, plan, rank)
    except ArgosyError as error:
        first_hand = not isinstance(error, ElsewhereError)
        _note(spec.folder, rank, device, str(error), error.exit_code, first_hand=first_hand)
        return error.exit_code
    except Exception as error:  # the user's own code may raise anything
        _note(spec.folder, rank, device, told(error), RunError.exit_code, first_hand=True)
        return RunError.exit_code
    return 0


def _note(
    folder: Path, rank: int, device: str, message: str, exit_code: int, *, first_hand: bool
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    leave_note(
        folder,
        rank=rank,
        device=device,
        message=message,
        exit_code=exit_code,
        first_hand=first_hand,
    )


def work(spec: RunSpec, plan: Plan, rank: int) -> None:
    """Join the process group, build the trainer, and train."""
    join_device()
    check_supported(plan)
    if not spec.any_device:
        check_hardware(plan, rank)
    program = load_program(spec.program, trains=True)
    check_loader(program, plan.global_batch)
    join(plan, patience=datetime.timedelta(seconds=spec.patience))
    compare(given_facts(spec, plan), plan)
    trainer, data = prepare(program, plan, spec)
    say_ready()
    train(trainer, data, spec)
    dist.destroy_process_group()


def compare(facts: Facts, plan: Plan) -> None:
    """Raise an ``InputError`` if facts differ between ranks. Every rank calls this."""
    roster = devices_by_rank(plan)
    check_agreed(facts, roster, device_of(roster, dist.get_rank()))


def prepare(
    program: UserProgram,
    plan: Plan,
    spec: RunSpec,
    part: Callable[[Any], Any] = lambda batch: batch,
) -> tuple[Trainer, Callable[[int], Any]]:
    """Return the trainer of this rank and the function that returns its batches: ``part`` of those
    of the program.

    Raise an ``InputError`` if ranks built different models, and, when the first batch is read, if
    they have different data.
    """
    torch.manual_seed(spec.seed)
    recording = Recording()
    model, loss_fn, batch = run_build(program.build, recording)
    batch = tree_map(
        lambda leaf: recording.materialise([leaf])[0] if isinstance(leaf, Tensor) else leaf, batch
    )
    optimizer = program.optimizer or torch.optim.AdamW
    facts = {**settings_facts(), **model_facts(model, loss_fn, split_name(spec.program)[0])}
    facts |= updating_facts(model, optimizer, program.scheduler)
    facts |= {**loaded_facts(spec.program), "initial values": initial_digest(recording, model)}
    compare(facts, plan)
    trainer = parallelize(
        model,
        loss_fn,
        optimizer,
        part(batch),
        plan,
        clip_norm=spec.clip,
        recording=recording,
        seed=spec.seed,
        scheduler=program.scheduler,
        compile_stages=spec.compile_stages,
    )
    trainer.callbacks += program.callbacks
    if spec.init is not None:
        checkpoint.load_weights(trainer, Path(spec.init))
    if spec.resume:
        resume(trainer, spec.folder)
    data = batches_of(program.data, batch, spec.seed)
    return trainer, with_first_compared(
        lambda step: part(data(step)), lambda facts: compare(facts, plan)
    )


def resume(trainer: Trainer, folder: Path) -> None:
    """Continue from the newest checkpoint that is whole and log those that are not; raise an
    ``InputError`` if none is."""
    saved = checkpoints(folder / CHECKPOINTS)
    problems = []
    for path in reversed(saved):
        tear = checkpoint.shared_tear(path, trainer.device)
        if not tear:
            checkpoint.load_checked(trainer, path)
            return
        problems.append(Problem(file=str(path), found=tear, expected="a whole checkpoint"))
        if trainer.rank == 0:
            Log(folder / EVENTS).event("skipped", trainer.roster[0], checkpoint=path.name, why=tear)
    raise_any(problems)


def train(trainer: Trainer, data: Callable[[int], Any], spec: RunSpec) -> None:
    progress, decisions, events = (
        Log(spec.folder / name) for name in (PROGRESS, DECISIONS, EVENTS)
    )
    if trainer.rank == 0:
        spec.folder.mkdir(parents=True, exist_ok=True)
        forget_after(spec.folder, trainer.steps)
    metrics = Metrics()
    if spec.metrics_port is not None and trainer.rank == 0:
        serve(metrics, spec.metrics_port)

    def tell(event: JsonObject) -> None:
        decisions.add(event)
        metrics.decision(event)

    def warn(why: str) -> None:
        events.event("not written", trainer.roster[0], why=why)

    adapter = adapter_of(trainer, spec, tell) if spec.adapt != AdaptationLevel.OFF else None
    saver = Saver(spec.folder / CHECKPOINTS, warn)
    first, last = trainer.steps, spec.steps
    while trainer.steps < last:
        begin = time.perf_counter()
        trainer.votes = (float(saver.is_due()),)
        batch = data(trainer.steps)
        with saver.heeded(), _watched(trainer, spec):
            loss = trainer.step(batch)
        seconds = time.perf_counter() - begin
        if trainer.rank == 0:
            line: JsonObject = {"step": trainer.steps - 1, "loss": loss, "seconds": seconds}
            if adapter is not None:
                line["schedule"] = repr(trainer.plan.schedule)
                metrics.beliefs(adapter.believed, adapter.speeds)
            progress.add(line)
            metrics.step(loss, seconds, trainer.plan.global_batch)
        if trainer.steps == min(last, first + RECORDED):
            write_timeline(trainer, adapter, spec.folder / TIMELINE, warn)
        if adapter is not None:
            adapter.after_step(seconds, last - trainer.steps)
        is_asked_for = spec.save_every and trainer.steps % spec.save_every == 0
        if trainer.steps == last or is_asked_for or trainer.tally[0]:
            saver.begin(trainer)
    saver.finish(trainer)
    if adapter is not None:
        adapter.close()


def _watched(trainer: Trainer, spec: RunSpec) -> contextlib.AbstractContextManager[None]:
    """Return a context for a step over NCCL that ends the process with a note if the step takes a
    quarter longer than the run's timeout."""
    if dist.get_backend() != "nccl":
        return contextlib.nullcontext()
    limit = 1.25 * spec.patience
    message = f"lost contact in step {trainer.steps}: the step was not over after {limit:g} s"

    def end() -> None:
        _note(
            spec.folder, trainer.rank, trainer.name, message, RunError.exit_code, first_hand=False
        )
        os._exit(RunError.exit_code)

    return ending_after(limit, end)


def adapter_of(trainer: Trainer, spec: RunSpec, tell: Callable[[JsonObject], None]) -> Adapter:
    """Return the adapter that measures a run and changes its plan."""
    plan = trainer.plan
    costs = cost_model_of(plan, spec.profiles)
    brief = Brief(
        plan=plan,
        chain=costs.chain(spec.chain(plan.model)),
        cluster=at_time_zero(costs.cluster(cluster_from_content(plan.cluster.content))),
        model=costs.compute_model,
        limits=ControllerLimits(reach=spec.adapt, horizon=spec.horizon, min_gain=spec.min_gain),
        roster=trainer.roster,
        undivided=() if trainer.making is None else trainer.making.source.undivided,
        splits=splits_after(plan, is_compiled=spec.compile_stages),
    )
    return Adapter(trainer, brief, tell)


def write_timeline(
    trainer: Trainer, adapter: Adapter | None, path: Path, warn: Callable[[str], None]
) -> None:
    """Write the recorded steps before clocks drift apart, and from then on record only for the
    adapter."""
    timeline = trainer.timeline()
    if timeline is not None:
        try:
            path.write_text(dumps_timeline(timeline))
        except OSError as error:
            warn(f"the timeline could not be written: {error}")
    trainer.recorder.enabled = adapter is not None
    if adapter is not None:
        adapter.keeps_marks = False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
