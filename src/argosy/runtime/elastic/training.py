"""Run one worker of an elastic job: join its generation, restore the state of the job, and train
until the leader pauses it.

After every step all ranks know whether to pause and whether the last copies have arrived, because
they exchange this with the loss (``Trainer.votes``): so they pause and copy at the same step
without another message.

If the job adapts, every generation has a controller of its own, which begins with the generation's
plan and has no data of earlier ones. Copies follow its migrations: they contain what each rank
holds when they are made.
"""

from __future__ import annotations

import datetime
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from argosy.adapt.controller import AdaptationLevel
from argosy.document import JsonObject
from argosy.errors import ArgosyError, RunError
from argosy.plan.file import loads_plan
from argosy.plan.plan import Plan
from argosy.runtime.elastic.copies import BlockHeader, BlockSource
from argosy.runtime.elastic.snapshot import AgentPlace, Copier, restore
from argosy.runtime.job.adapting import Adapter
from argosy.runtime.job.agreement import given_facts
from argosy.runtime.job.program import load_program
from argosy.runtime.job.worker import RECORDED, adapter_of, compare, prepare, write_timeline
from argosy.runtime.processes.emulated import join_device, say_ready
from argosy.runtime.processes.failure import ElsewhereError, is_of_torch_distributed, told
from argosy.runtime.processes.hardware import check_hardware
from argosy.runtime.processes.run_folder import (
    CHECKPOINTS,
    DECISIONS,
    EVENTS,
    PROGRESS,
    TIMELINE,
    Log,
)
from argosy.runtime.processes.run_spec import RunSpec, loads_run_spec
from argosy.runtime.processes.world import check_supported, join
from argosy.runtime.state.checkpoint import load_checked
from argosy.runtime.state.saving import Saver
from argosy.runtime.step.trainer import Trainer


def work(task: JsonObject, pipe: Connection) -> JsonObject:
    """Train, and return the last message to the agent."""
    try:
        step, paused = _Worker(task, pipe).train()
    except ElsewhereError as error:
        return {"kind": "ending", "how": "elsewhere", "message": str(error)}
    except ArgosyError as error:
        return {
            "kind": "ending",
            "how": "failed",
            "message": str(error),
            "exit_code": error.exit_code,
        }
    except BrokenPipeError:
        return {"kind": "ending", "how": "elsewhere", "message": "the agent of this host has gone"}
    except Exception as error:  # the user's own code may raise anything
        is_elsewhere = isinstance(error, RuntimeError) and is_of_torch_distributed(error)
        how = "elsewhere" if is_elsewhere else "failed"
        return {
            "kind": "ending",
            "how": how,
            "message": told(error),
            "exit_code": RunError.exit_code,
        }
    return {"kind": "ending", "how": "paused" if paused else "finished", "step": step}


class _Worker:
    def __init__(self, task: JsonObject, pipe: Connection) -> None:
        self.task, self.pipe = task, pipe
        self.spec = loads_run_spec(task["run"])
        self.progress, self.events = (
            Log(self.spec.folder / PROGRESS),
            Log(self.spec.folder / EVENTS),
        )
        self.pausing = self.saving = False
        """True if this rank was asked to pause, and to save before it does."""
        self.seconds = 0.0
        """Seconds of the last step."""
        plan, rank = loads_plan(task["plan"]), task["rank"]
        join_device()
        check_supported(plan)
        if not self.spec.any_device:
            check_hardware(plan, rank)
        program = load_program(self.spec.program, trains=True)
        try:
            self._meet(plan)
            compare(given_facts(self.spec, plan, elastic=True), plan)
            self.trainer, self.data = prepare(program, plan, self._own_spec())
            self._take_up()
            self.saver = Saver(self.spec.folder / CHECKPOINTS, self._warn)
        except (RuntimeError, OSError) as error:  # contact was lost during preparation
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ElsewhereError(f"the generation could not start: {reason}") from error
        self.copier = self._copier()
        self.adapter = self._adapter() if self.spec.adapt != AdaptationLevel.OFF else None
        pipe.send({"kind": "ready"})
        say_ready()

    def _meet(self, plan: Plan) -> None:
        """Join the other ranks; if they cannot meet, this generation has failed, not the job."""
        try:
            join(plan, patience=datetime.timedelta(seconds=self.spec.patience))
        except RunError as error:
            raise ElsewhereError(str(error)) from error

    def _own_spec(self) -> RunSpec:
        """Return the run's options; those about its beginning are kept only in a generation that
        begins there."""
        init = self.spec.init if self.task["base"]["kind"] == "start" else None
        return replace(self.spec, init=init, resume=False)

    def _take_up(self) -> None:
        """Restore the state from copies in memory or from a checkpoint, unless this is the
        beginning."""
        base = self.task["base"]
        if base["kind"] == "checkpoint":
            load_checked(self.trainer, Path(base["path"]))
        elif base["kind"] == "copies":
            sources = [
                BlockSource(address=address, port=port, header=BlockHeader.of(header))
                for address, port, header in base["sources"]
            ]
            near = AgentPlace(*self.task["near"])
            restore(
                self.trainer,
                sources,
                near=near,
                token=self.task["token"],
                patience=self.spec.patience,
            )

    def _copier(self) -> Copier:
        far = self.task["far"]
        base = self.task["base"]
        return Copier(
            self.trainer,
            generation=self.task["generation"],
            hosts=self.task["hosts"],
            near=AgentPlace(*self.task["near"]),
            far=None if far is None else AgentPlace(*far),
            token=self.task["token"],
            patience=self.spec.lost_after,
            base=tuple(base["moment"]) if base["kind"] == "copies" else (0, 0),
        )

    def _adapter(self) -> Adapter:
        log = Log(self.spec.folder / DECISIONS)

        def tell(event: JsonObject) -> None:
            log.add({**event, "generation": self.task["generation"]})

        return adapter_of(self.trainer, self.spec, tell)

    def train(self) -> tuple[int, bool]:
        """Train; return the steps done, and whether the run was paused before its end."""
        trainer, last = self.trainer, self.task["last"]
        begun = copied = trainer.steps
        # the restored copies may be the only ones of their state
        if self.spec.copy_every and begun:
            self.copier.begin()
        while trainer.steps < last:
            self._step()
            pausing, saving, busy, failed, is_due = (count > 0 for count in trainer.tally)
            self.copier.learn(busy=busy, failed=failed)
            if pausing and trainer.steps < last:
                self._close()
                self.copier.begin()
                self.copier.wait()
                if saving:
                    self.saver.begin(trainer)
                    self.saver.finish(trainer)
                self.saver.wait()
                return trainer.steps, True
            if self.adapter is not None:
                self.adapter.after_step(self.seconds, last - trainer.steps)
            if self.spec.copy_every and trainer.steps - copied >= self.spec.copy_every and not busy:
                self.copier.begin()
                copied = trainer.steps
            is_asked_for = self.spec.save_every and trainer.steps % self.spec.save_every == 0
            if trainer.steps == last or is_asked_for or is_due:
                self.saver.begin(trainer)
            if trainer.steps == min(last, begun + RECORDED):
                write_timeline(trainer, self.adapter, self.spec.folder / TIMELINE, self._warn)
        self._close()
        self.saver.finish(trainer)
        self.copier.wait()
        dist.destroy_process_group()
        return trainer.steps, False

    def _close(self) -> None:
        if self.adapter is not None:
            self.adapter.close()

    def _step(self) -> None:
        trainer = self.trainer
        begin = time.perf_counter()
        batch = self.data(trainer.steps)
        # Read after the data, which may take long, so that a request meanwhile is seen.
        if self.pipe.poll():
            self.pausing, self.saving = True, self.pipe.recv()["save"]
        facts = (
            self.pausing,
            self.saving,
            self.copier.is_busy,
            self.copier.failed,
            self.saver.is_due(),
        )
        trainer.votes = tuple(map(float, facts))
        with self.saver.heeded():
            loss = trainer.step(batch)
        self.seconds = time.perf_counter() - begin
        if trainer.rank == 0:
            self._log_step(trainer, loss)
        self.pipe.send({"kind": "step", "step": trainer.steps})

    def _log_step(self, trainer: Trainer, loss: float) -> None:
        line = {
            "step": trainer.steps - 1,
            "loss": loss,
            "seconds": self.seconds,
            "generation": self.task["generation"],
        }
        self.progress.add(line)

    def _warn(self, why: str) -> None:
        self.events.event("not written", self.trainer.roster[self.trainer.rank], why=why)
