"""Run one process of an island: ``python -m argosy.runtime.islands.worker RUN.json``.

torchrun starts the processes of each island on their own, and the leads meet at the address in
``run.json``. In a lab all islands are started at once; ranks then count the devices of one island
after the other.

The lead appends a line to ``progress.jsonl`` in its island's folder after every step, and one to
``exchanges.jsonl`` for every exchange, loss and return of islands.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.utils._pytree import tree_map

from argosy.adapt.controller import AdaptationLevel
from argosy.adapt.sync import SyncLimits
from argosy.document import read_json
from argosy.errors import ArgosyError, RunError
from argosy.plan.islands import IslandPlan
from argosy.plan.islands_file import dumps_island_plan, island_plan_from_document
from argosy.plan.plan import Plan
from argosy.runtime.islands.files import EXCHANGES, island_folder
from argosy.runtime.islands.keeping import load_island, save_island
from argosy.runtime.islands.lead import Lead
from argosy.runtime.islands.membership import Membership
from argosy.runtime.islands.training import IslandTrainer
from argosy.runtime.job.agreement import given_facts
from argosy.runtime.job.program import load_program
from argosy.runtime.job.worker import compare, prepare
from argosy.runtime.processes.emulated import join_device, say_ready
from argosy.runtime.processes.failure import ElsewhereError, leave_note, told
from argosy.runtime.processes.hardware import check_hardware
from argosy.runtime.processes.orphan import end_with_parent
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.processes.run_folder import (
    CHECKPOINTS,
    PROGRESS,
    Log,
    checkpoints,
    forget_after,
    step_of,
)
from argosy.runtime.processes.run_spec import RunSpec, read_run_spec
from argosy.runtime.processes.world import check_supported, join
from argosy.runtime.state.checkpoint import UnsavedError

_LOOPBACK = ("127.0.0.1", "localhost")
"""Hosts of a meeting address that only this machine reaches."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The island and rank of a process, and the store that its lead uses."""

    island: int
    rank: int
    """The rank in the island."""
    connect: Callable[[], Store]
    """A function that opens a new connection to the store where leads meet."""
    finish: Callable[[], None] = lambda: None
    """A function that is called at the end: a process that serves the store waits for the
    others."""


def main(values: list[str]) -> int:
    end_with_parent()
    try:
        spec = read_run_spec(values[0])
        plan = island_plan_from_document(read_json(spec.plan))
    except ArgosyError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    patience = datetime.timedelta(seconds=spec.patience)
    place = _place(spec, plan, patience)
    if spec.island is None:
        spec = replace(spec, out=str(island_folder(spec.folder, place.island)), island=place.island)
    device = devices_by_rank(plan.islands[place.island])[place.rank]

    def note(message: str, code: int, *, first_hand: bool) -> int:
        spec.folder.mkdir(parents=True, exist_ok=True)
        leave_note(
            spec.folder,
            rank=place.rank,
            device=device,
            message=message,
            exit_code=code,
            first_hand=first_hand,
        )
        return code

    try:
        work(spec, plan, place, interface)
    except ArgosyError as error:
        return note(str(error), error.exit_code, first_hand=not isinstance(error, ElsewhereError))
    except Exception as error:  # the user's own code may raise anything
        return note(told(error), RunError.exit_code, first_hand=True)
    place.finish()
    return 0


def _place(spec: RunSpec, plan: IslandPlan, patience: datetime.timedelta) -> _Place:
    """Return this process's island and rank, and a function that connects to the store; in a lab
    also join the island's group."""
    rank = int(os.environ["RANK"])
    if spec.island is not None:
        assert spec.meeting is not None, "an island is started with the address where leads meet"
        host, _, port = spec.meeting.rpartition(":")

        def connect() -> Store:
            return TCPStore(host, int(port), is_master=False, timeout=patience)

        return _Place(island=spec.island, rank=rank, connect=connect)
    address, number = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    everyone = [
        (at, own) for at, island in enumerate(plan.islands) for own in range(len(island.devices))
    ]
    island, own = everyone[rank]

    def connect_in_lab() -> Store:
        return TCPStore(address, number, is_master=False, timeout=patience)

    server = None
    if rank == 0:
        server = TCPStore(address, number, is_master=True, wait_for_workers=False, timeout=patience)
    store = PrefixStore(f"island-{island}", connect_in_lab())
    size = len(plan.islands[island].devices)
    dist.init_process_group("gloo", store=store, rank=own, world_size=size, timeout=patience)

    def finish() -> None:
        connect_in_lab().set(f"ended/{rank}", "1")
        if server is not None:
            server.wait([f"ended/{at}" for at in range(len(everyone))])

    return _Place(island=island, rank=own, connect=connect_in_lab, finish=finish)


def work(spec: RunSpec, plan: IslandPlan, place: _Place, interface: str | None) -> None:
    """Join the process groups, build the trainer, and train."""
    join_device()
    own = plan.islands[place.island]
    check_supported(own)
    if not spec.any_device:
        check_hardware(own, place.rank)
    program = load_program(spec.program, trains=True)
    join(own, patience=datetime.timedelta(seconds=spec.patience))
    facts = given_facts(spec, own)
    compare(facts, own)
    begin = plan.offsets[place.island]
    trainer, data = prepare(
        program, own, spec, lambda batch: rows(batch, begin, own, plan.global_batch)
    )
    training = IslandTrainer(trainer, plan, place.island)
    outer = training.initial_state()
    saved = [
        path for path in checkpoints(spec.folder / CHECKPOINTS) if step_of(path) == trainer.steps
    ]
    if spec.resume and saved:  # the trainer has loaded this one
        load_island(training, outer, saved[-1])
    if outer is not None:
        spec.folder.mkdir(parents=True, exist_ok=True)
        local = spec.meeting is not None and spec.meeting.rpartition(":")[0] in _LOOPBACK
        membership = Membership(
            place.connect,
            place.island,
            len(plan.islands),
            lost_after=spec.lost_after,
            gather=spec.gather,
            patience=spec.patience,
            interface=os.environ.get("GLOO_SOCKET_IFNAME") if local else interface,
        )
        limits = (
            SyncLimits(most=spec.max_sync_every) if spec.adapt is not AdaptationLevel.OFF else None
        )
        training.lead = Lead(
            plan, outer, membership, limits=limits, note=Log(spec.folder / EXCHANGES).add
        )
    if training.begin(_common(facts, plan)):
        say_ready()
        train(training, data, spec)
    dist.destroy_process_group()


def _common(facts: dict[str, str], plan: IslandPlan) -> str:
    """Return a hash of what all islands must have in common; whether a run is resumed may
    differ."""
    chosen = {name: text for name, text in facts.items() if name not in ("plan", "--resume")}
    text = repr(sorted(chosen.items())) + dumps_island_plan(plan)
    return hashlib.sha256(text.encode()).hexdigest()


def rows(batch: Any, begin: int, plan: Plan, whole: int) -> Any:
    """Return the samples of an island in a global batch; a tensor of another size is unchanged, and
    the trainer refuses it."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == whole:
            return leaf[begin : begin + plan.global_batch]
        return leaf

    return tree_map(of, batch)


def train(training: IslandTrainer, data: Callable[[int], Any], spec: RunSpec) -> None:
    """Train until the last step of the run, with checkpoints between exchanges."""
    trainer, lead, last = training.trainer, training.lead, spec.steps
    progress = Log(spec.folder / PROGRESS)
    if lead is not None:
        forget_after(spec.folder, trainer.steps)
    wants_save = False
    while trainer.steps < last:
        step, began = trainer.steps, time.perf_counter()
        loss = training.step(data(step))
        # After catching up with the others the trainer may be at an earlier step.
        if lead is not None and trainer.steps <= step:
            forget_after(spec.folder, trainer.steps)
        elif lead is not None:
            line = {
                "step": step,
                "loss": loss,
                "seconds": time.perf_counter() - began,
                "samples": training.share,
            }
            progress.add(line)
        wants_save = wants_save or bool(spec.save_every and trainer.steps % spec.save_every == 0)
        if wants_save and not training.is_waiting and trainer.steps < last:
            try:
                save_island(training, spec.folder / CHECKPOINTS)
            # raised on every rank of the island, so that all continue
            except UnsavedError as error:
                sys.stderr.write(f"warning: {error}; training goes on\n")
            wants_save = False
    training.end()
    save_island(training, spec.folder / CHECKPOINTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
