"""Checkpoints that outlive the plan they were written under.

A checkpoint is a folder in the format of torch.distributed.checkpoint, with one entry per weight and per tensor of
optimizer state, whatever rows of it each rank held. So it loads under another plan, on other ranks, with rows divided
otherwise, or as the ordinary state dict of one process. It is written under another name and renamed when it is whole:
at any moment the newest folder called ``step-...`` is complete. All ranks must see the same file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from argosy.document import Schema, read_json, validate
from argosy.errors import InputError, Problem, RunError, show
from argosy.runtime.failure import ElsewhereError
from argosy.runtime.folder import checkpoints
from argosy.runtime.reading import entries, load_tensors, read_weights
from argosy.runtime.state import Held, Rows, Stored, take_state, trainer_state
from argosy.workload.fields import Natural

if TYPE_CHECKING:
    from argosy.runtime.trainer import Trainer

_ABOUT = "argosy.json"


def save(trainer: Trainer, folder: Path) -> Path:
    """Write a checkpoint of every rank's part."""
    return write(dict(trainer_state(trainer)), facts(trainer), folder)


def facts(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint says beside its tensors."""
    scale = trainer.scale
    return {
        "version": 1,
        "steps": trainer.steps,
        "scale": scale.value,
        "calm": scale.calm,
        "aliases": trainer.aliases,
    }


def write(
    state: dict[str, Any], about: dict[str, Any], folder: Path, *, group: dist.ProcessGroup | None = None, keep: int = 2
) -> Path:
    """Write what the ranks of a group hold, each its part; the newest ``keep`` checkpoints stay."""
    with _told(folder, about["steps"]):
        return _write(state, about, folder, group, keep)


@contextlib.contextmanager
def _told(folder: Path, step: int) -> Iterator[None]:
    """What stands in the way of a checkpoint as a sentence, on the rank that met it and on the others."""
    met = dist.get_rank()
    try:
        yield
        return
    except OSError as error:
        reason = str(error)
    except CheckpointException as error:  # torch's is no Exception, so nothing else would catch it
        met, (cause, _) = min(error.failures.items())
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
    kind = RunError if met == dist.get_rank() else ElsewhereError
    raise kind(f"the checkpoint of step {step} could not be written into {folder}: {reason}")


def _write(
    state: dict[str, Any], about: dict[str, Any], folder: Path, group: dist.ProcessGroup | None, keep: int
) -> Path:
    name = f"step-{about['steps']:08d}"
    partial, whole = folder / f".{name}.partial", folder / name
    first = dist.get_rank() == 0
    if first:
        for left in folder.glob(".step-*.partial"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)
    dist.barrier(group)
    save_distributed(state, checkpoint_id=partial, process_group=group)
    if first:
        (partial / _ABOUT).write_text(json.dumps(about, sort_keys=True))
        _make_durable(partial)
        shutil.rmtree(whole, ignore_errors=True)
        partial.rename(whole)
        _make_durable(folder)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier(group)
    return whole


def _make_durable(folder: Path) -> None:
    """What a rename promises must not still be in a cache."""
    for path in (*folder.iterdir(), folder):
        if path.is_file() or path == folder:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def load(trainer: Trainer, path: Path) -> None:
    """Continue from a checkpoint that any plan for the same model has written."""
    about, found = _about(path), entries(path)
    for held in trainer.held():
        _check_entry(path, found, held)
    stored = {name: Stored(tuple(entry.size), entry.properties.dtype) for name, entry in found.items()}
    trainer.begin_at(about.steps)
    take_state(trainer, stored, lambda wanted: load_tensors(wanted, path))
    trainer.scale.value, trainer.scale.calm = about.scale, about.calm


def load_weights(trainer: Trainer, source: Path) -> None:
    """Begin with given weights: a checkpoint's, or a state dict's (``torch.save`` or safetensors)."""
    if source.is_dir():
        found = entries(source)
        for held in trainer.held():
            _check_entry(source, found, held)
        wanted = {f"model.{h.name}": Rows.of(h.parameter.data, h.boxes, h.shape) for h in trainer.held()}
        load_tensors(wanted, source)
    else:
        values = read_weights(source)
        for held in trainer.held():
            names = [name for name in (held.name, *trainer.aliases.get(held.name, ())) if name in values]
            if not names or tuple(values[names[0]].shape) != held.shape:
                shown = f"shape {tuple(values[names[0]].shape)}" if names else "no such entry"
                problem = Problem(file=str(source), path=held.name, found=shown, expected=f"shape {held.shape}")
                raise InputError([problem])
            for box in held.boxes:
                box.of(held.parameter.data).copy_(box.out_of(values[names[0]]))
    trainer.gradients.after_update()


def read_state_dict(path: Path | str) -> dict[str, Tensor]:
    """The model's weights as one process knows them, from a checkpoint of any plan; needs no process group."""
    path = Path(path)
    found = {name: entry for name, entry in entries(path).items() if name.startswith("model.")}
    about = _about(path)
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items()}
    load_tensors(state, path, alone=True)
    result = {name.removeprefix("model."): value for name, value in state.items()}
    for name, others in about.aliases.items():
        if name not in result:
            raise InputError([Problem(file=str(path / _ABOUT), path="aliases", found=show(name), expected="a weight")])
        result |= dict.fromkeys(others, result[name])
    return result


class OuterFacts(Schema):
    """What a checkpoint of an island says about its exchanges."""

    exchanges: Natural
    step: Natural
    next_step: Natural
    sync_every: Natural
    shared_since: list[Natural]


class _About(Schema):
    version: Literal[1]
    steps: Natural
    scale: float
    calm: Natural = 0
    aliases: dict[str, list[str]]
    outer: OuterFacts | None = None


def outer_facts(path: Path) -> OuterFacts | None:
    """What a checkpoint says about exchanges; None if it is not of an island."""
    return _about(path).outer


def _about(path: Path) -> _About:
    return validate(read_json(path / _ABOUT), _About)


def _check_entry(path: Path, entries: Mapping[str, TensorStorageMetadata], held: Held) -> None:
    entry = entries.get(f"model.{held.name}")
    if entry is None or tuple(entry.size) != held.shape:
        found = "no such weight" if entry is None else f"a weight of shape {tuple(entry.size)}"
        raise InputError([Problem(file=str(path), path=held.name, found=found, expected=f"shape {held.shape}")])
