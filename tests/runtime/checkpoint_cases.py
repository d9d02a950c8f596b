"""What ranks do in the tests of checkpoints."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from runtime.training_cases import Case, built, plan_of

from argosy.errors import InputError, RunError
from argosy.runtime.job import worker
from argosy.runtime.processes.run_folder import EVENTS, read_lines
from argosy.runtime.state import checkpoint, saving
from argosy.runtime.state.saving import Saver
from argosy.runtime.state.state import parts_of
from argosy.runtime.step.trainer import Trainer, parallelize
from argosy.solve.programs.stagecut import cut_graph
from argosy.workload.capture.trace import capture

Parts = dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], np.ndarray]]]]
"""By name: the shape of the whole, and for every box that is held its first element and its
values."""


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def trainer_for(case: Case) -> tuple[Trainer, Any]:
    model, loss_fn, batch = built(case)
    proportions = (lambda stage: case.proportions) if case.proportions else None
    return parallelize(
        model, loss_fn, adam, batch, plan_of(case), shard_proportions=proportions
    ), batch


def decayed_without_gradient(case: Case) -> list[str]:
    """Weights of this rank that AdamW changed although the loss does not depend on them through
    gradients: cut at every tenth of the work."""
    graph = capture(lambda: built(case))
    cuts = {cut_graph(graph, (share / 10, 1 - share / 10)).stages for share in range(1, 10)}
    found = []
    for cut in sorted(cuts):
        model, loss_fn, batch = built(case)
        trainer = parallelize(model, loss_fn, adam, batch, plan_of(case), cut=cut)
        trainer.step(batch)
        state: Any = {} if trainer.optimizer is None else trainer.optimizer.state
        changed = [held.name for held in trainer.held() if state.get(held.parameter)]
        found += [name for name in changed if name.startswith("teacher")]
    assert len(cuts) > 3
    return found


def parts(trainer: Trainer) -> Parts:
    """Everything a rank holds."""
    found = {}
    for name, value in trainer.state_dict().items():
        held = [
            (box.whole, box.of(part.tensor).detach().clone().numpy())
            for part in parts_of(value)
            for box in part.boxes
        ]
        found[name] = (tuple(value.size()), held)
    return found


def save_after(case: Case, folder: str, steps: int) -> tuple[Parts, list[float]]:
    """Train, save, and train on: what was saved, and the losses that follow."""
    trainer, batch = trainer_for(case)
    for _ in range(steps):
        trainer.step(batch)
    trainer.save(folder)
    return parts(trainer), [trainer.step(batch) for _ in range(2)]


def save_while_training(case: Case, folder: str, steps: int) -> tuple[Parts, list[float]]:
    """The same, in the background: it has not been waited for when training goes on."""
    trainer, batch = trainer_for(case)
    saver = Saver(Path(folder), print)
    for _ in range(steps):
        trainer.step(batch)
    saver.begin(trainer)
    saved = parts(trainer)
    losses = [trainer.step(batch) for _ in range(2)]
    saver.wait()
    return saved, losses


def load_and_go_on(case: Case, path: str) -> tuple[Parts, list[float]]:
    trainer, batch = trainer_for(case)
    trainer.load(path)
    return parts(trainer), [trainer.step(batch) for _ in range(2)]


def go_back(case: Case, folder: str) -> tuple[list[float], list[float], int]:
    """Save before the first step, train, load, train again: the losses of both, and the steps of
    calm after loading."""
    trainer, batch = trainer_for(case)
    trainer.scale.calm = 7
    path = trainer.save(folder)
    losses = [trainer.step(batch) for _ in range(3)]
    trainer.scale.calm = 0
    trainer.load(path)
    calm = trainer.scale.calm
    return losses, [trainer.step(batch) for _ in range(3)], calm


class Counting(torch.optim.Optimizer):
    """Smaller and smaller steps, counted in a number that is no tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["count"], state["sum"] = 0, torch.zeros_like(parameter)
            state["count"] += 1
            state["sum"] += parameter.grad
            parameter.data.sub_(state["sum"] / state["count"])


def go_on_counting(case: Case, folder: str) -> tuple[list[float], list[float], set[type]]:
    """Losses after a save, and after loading it; what the loaded optimizer counts with."""
    model, loss_fn, batch = built(case)
    trainer = parallelize(model, loss_fn, Counting, batch, plan_of(case))
    for _ in range(2):
        trainer.step(batch)
    path = trainer.save(folder)
    losses = [trainer.step(batch) for _ in range(2)]
    model, loss_fn, batch = built(case)
    trainer = parallelize(model, loss_fn, Counting, batch, plan_of(case))
    trainer.load(path)
    assert trainer.optimizer is not None
    kinds = {type(state["count"]) for state in trainer.optimizer.state.values()}
    return losses, [trainer.step(batch) for _ in range(2)], kinds


def resume_past(case: Case, folder: str) -> tuple[int, list[str], str]:
    """The step from which a run goes on whose newest checkpoint has one flipped bit; what it skips;
    and what is raised when no checkpoint is left that is whole."""
    trainer, batch = trainer_for(case)
    for _ in range(2):
        trainer.step(batch)
        trainer.save(Path(folder) / "checkpoints")
    resumed, problems = trainer_for(case)[0], ""
    for step in (2, 1):
        file = Path(folder) / "checkpoints" / f"step-{step:08d}" / "__1_0.distcp"
        dist.barrier()
        if dist.get_rank() == 0:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        dist.barrier()
        try:
            worker.resume(resumed, Path(folder))
        except InputError as error:
            problems = str(error)
    return (
        resumed.steps,
        [line["checkpoint"] for line in read_lines(Path(folder) / EVENTS)],
        problems,
    )


def begin_with(case: Case, source: str) -> tuple[Parts, list[float]]:
    trainer, batch = trainer_for(case)
    checkpoint.load_weights(trainer, Path(source))
    return parts(trainer), [trainer.step(batch)]


def die_while_saving(case: Case, folder: str) -> None:
    """Save once; then, in the second save, die when some of its files have been written."""
    trainer, batch = trainer_for(case)
    saver = Saver(Path(folder), print)
    trainer.step(batch)
    trainer.save(folder)
    trainer.step(batch)
    if dist.get_rank() == 0:
        checkpoint._publish = lambda *_: os._exit(9)
    saver.begin(trainer)
    saver.wait()


def save_without_room(case: Case, folder: str) -> tuple[list[str], list[str], list[int]]:
    """Rank 1 may not write a file for a while, then the folder cannot be made: what rank 0 reports
    and every rank raises, and the steps after which another attempt was asked for."""
    trainer, batch = trainer_for(case)
    saving.RETRY_SECONDS, saving.LAST_TRIES = 0.0, 2
    reported: list[str] = []
    raised, due = [], []
    saver = Saver(Path(folder), reported.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    for step in range(4):
        if step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        trainer.votes = (float(saver.is_due()),)
        with saver.heeded():
            trainer.step(batch)
        due += [trainer.steps] if trainer.tally[0] else []
        if step == 0 or trainer.tally[0]:
            saver.begin(trainer)
            assert saver.thread is not None
            saver.thread.join()
    saver.finish(trainer)
    (Path(folder) / "file").touch()
    saver.folder = Path(folder) / "file"
    saver.begin(trainer)
    try:
        saver.finish(trainer)
    except RunError as error:
        raised.append(f"{type(error).__name__}: {error}")
    return reported, raised, due


def begin_with_others(case: Case, checkpoint_of_others: str, weights: str) -> list[str]:
    """What is said of the weights of other models."""
    trainer, _ = trainer_for(case)
    name, values = "head.output.weight", torch.load(weights, weights_only=True)
    heard = []
    for wrong in (
        {**values, name: values[name].t()},
        {n: v for n, v in values.items() if n != name},
    ):
        torch.save(wrong, weights)
        heard.append(_refused(lambda: checkpoint.load_weights(trainer, Path(weights))))
    heard.append(_refused(lambda: trainer.load(checkpoint_of_others)))
    heard.append(_refused(lambda: checkpoint.load_weights(trainer, Path(checkpoint_of_others))))
    return heard


def _refused(call: Callable[[], None]) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return "nothing was wrong"
