"""Write and load checkpoints that are independent of the plan.

A checkpoint is a folder in the format of torch.distributed.checkpoint, with one entry per weight
and per tensor of optimizer state, no matter which rows of it each rank held. So it loads under
another plan, on other ranks, with rows divided differently, or as the ordinary state dict of one
process. All ranks must see the same file system.

    (1)  files     every rank writes its files into a folder with a dot before its name
    (2)  hashes    every rank syncs its files, reads them back and hashes them
    (3)  manifest  rank 0 writes and syncs the manifest (``manifest``), then the names in the folder
    (4)  name      the folder is renamed, and its new name synced; only then older checkpoints are
                   removed

After each of these the ranks exchange whether they succeeded: if one failed, an ``UnsavedError`` is
raised on all of them, no whole checkpoint is lost, and they may continue training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from argosy.errors import RunError, invalid, show
from argosy.runtime.processes.manifest import (
    MANIFEST,
    OuterFacts,
    check_whole,
    facts_of,
    read_manifest,
    sync,
    tear_in,
    write_manifest,
)
from argosy.runtime.processes.run_folder import checkpoints
from argosy.runtime.processes.world import gather_texts
from argosy.runtime.state.reading import entries, load_tensors, read_weights
from argosy.runtime.state.state import HeldWeight, Rows, Stored, merged, take_state, trainer_state

if TYPE_CHECKING:
    from argosy.runtime.step.trainer import Trainer

_CPU = torch.device("cpu")


class UnsavedError(RunError):
    """An error that is raised on every rank if a checkpoint could not be written."""


def save(trainer: Trainer, folder: Path) -> Path:
    """Write a checkpoint of every rank's part."""
    return write(
        merged(trainer_state(trainer, is_written=True)),
        facts(trainer),
        folder,
        device=trainer.device,
    )


def facts(trainer: Trainer) -> dict[str, Any]:
    """Return what a checkpoint contains beside its tensors."""
    scale = trainer.scale
    return {
        "steps": trainer.steps,
        "scale": scale.value,
        "calm": scale.calm,
        "aliases": trainer.aliases,
    }


def write(
    state: dict[str, Any],
    about: dict[str, Any],
    folder: Path,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device = _CPU,
    keep: int = 2,
) -> Path:
    """Write what the ranks of a group hold, each its part; the newest ``keep`` checkpoints stay."""
    try:
        return _write(state, about, folder, _Ranks(group, device), keep)
    except _RankError as error:
        rank, reason = error.args
    # torch's class is no Exception, so nothing else catches it
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
    step = about["steps"]
    raise UnsavedError(
        f"the checkpoint of step {step} could not be written into {folder}: rank {rank}: {reason}"
    )


class _RankError(Exception):
    """An error that is raised on every rank if one rank could not do its part."""


@dataclass(frozen=True)
class _Ranks:
    """The ranks that write a checkpoint together."""

    group: dist.ProcessGroup | None
    device: torch.device

    def each(self, act: Callable[[], Any]) -> list[Any]:
        """Return what ``act`` returned on every rank; raise a ``_RankError`` if it raised an
        ``OSError`` on one of them."""
        try:
            own = {"result": act()}
        except OSError as error:
            own = {"problem": str(error)}
        answers = [
            json.loads(text) for text in gather_texts(json.dumps(own), self.device, self.group)
        ]
        for rank, answer in enumerate(answers):
            if "problem" in answer:
                raise _RankError(rank, answer["problem"])
        return [answer["result"] for answer in answers]

    def first(self, act: Callable[[], object]) -> None:
        """Call ``act`` on rank 0 only."""

        def by_one() -> None:
            if dist.get_rank() == 0:
                act()

        self.each(by_one)


def _write(
    state: dict[str, Any], about: dict[str, Any], folder: Path, ranks: _Ranks, keep: int
) -> Path:
    """Write a checkpoint by (1) to (4)."""
    name = f"step-{about['steps']:08d}"
    partial, whole = folder / f".{name}.partial", folder / name
    ranks.first(lambda: _make_room(folder, partial))
    save_distributed(state, checkpoint_id=partial, process_group=ranks.group)
    rank_files = ranks.each(lambda: _hashes_of_rank(partial, dist.get_rank()))
    files = {file: facts for of_rank in rank_files for file, facts in of_rank.items()}
    ranks.first(lambda: _publish(partial, whole, about, files, keep))
    return whole


def _make_room(folder: Path, partial: Path) -> None:
    """Make an empty folder, and remove incomplete ones that interrupted writes have left."""
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path)
    made = [path for path in (partial, *partial.parents) if not path.exists()]
    partial.mkdir(parents=True)
    for path in made:
        sync(path.parent)


def _hashes_of_rank(partial: Path, rank: int) -> dict[str, Any]:
    """Sync and hash the files of a rank (2), which torch names by rank; rank 0 also has the table
    of contents.

    torch syncs the table of contents while it is still in the process's buffer, so files are synced
    here.
    """
    paths = [*partial.glob(f"__{rank}_*"), *(partial.glob(".metadata") if rank == 0 else ())]
    for path in paths:
        sync(path)
    return {path.name: facts_of(path) for path in paths}


def _publish(
    partial: Path, whole: Path, about: dict[str, Any], files: Mapping[str, Any], keep: int
) -> None:
    """Write the manifest and rename the folder, by (3) and (4)."""
    assert files.keys() == {path.name for path in partial.iterdir()}, "every file has been hashed"
    write_manifest(partial, about, files)
    folder, replaced = whole.parent, whole.with_name(f".{whole.name}.replaced")
    if whole.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        whole.rename(replaced)
    partial.rename(whole)
    sync(folder)
    for path in folder.glob(".step-*.replaced"):
        shutil.rmtree(path)
    saved = checkpoints(folder)
    oldest = [path for path in saved if not tear_in(path, contents=False)][-keep:][0]
    for path in saved[: saved.index(oldest)]:
        shutil.rmtree(path)


def load(trainer: Trainer, path: Path) -> None:
    """Continue from a checkpoint that any plan for the same model has written; raise an
    ``InputError`` if it is torn."""
    _check_together(path, trainer)
    load_checked(trainer, path)


def load_checked(trainer: Trainer, path: Path) -> None:
    """Continue from a checkpoint that has been checked to be whole."""
    about, stored_entries = read_manifest(path), entries(path)
    for held in trainer.held():
        _check_entry(path, stored_entries, held)
    stored = {
        name: Stored(tuple(entry.size), entry.properties.dtype)
        for name, entry in stored_entries.items()
    }
    trainer.begin_at(about.steps)
    take_state(trainer, stored, lambda wanted: load_tensors(wanted, path))
    trainer.scale.value, trainer.scale.calm = about.scale, about.calm


def _check_together(path: Path, trainer: Trainer) -> None:
    """Raise an ``InputError`` on every rank if a checkpoint is torn; the ranks divide the files
    between them."""
    tear = shared_tear(path, trainer.device)
    if tear:
        raise invalid(file=str(path), found=tear, expected="a whole checkpoint")


def shared_tear(path: Path, device: torch.device) -> str:
    """Return on every rank the reason why a checkpoint is torn, or "" if it is whole."""
    own = tear_in(path, part=dist.get_rank(), parts=dist.get_world_size())
    return next(filter(None, gather_texts(own, device)), "")


def load_weights(trainer: Trainer, source: Path) -> None:
    """Begin with given weights: those of a checkpoint, or of a state dict (``torch.save`` or
    safetensors)."""
    if source.is_dir():
        _check_together(source, trainer)
        stored_entries = entries(source)
        for held in trainer.held():
            _check_entry(source, stored_entries, held)
        wanted = [
            (f"model.{held.name}", Rows.of(held.parameter.data, held.boxes, held.shape))
            for held in trainer.held()
        ]
        load_tensors(merged(wanted), source)
    else:
        values = read_weights(source)
        for held in trainer.held():
            names = [
                name for name in (held.name, *trainer.aliases.get(held.name, ())) if name in values
            ]
            if not names or tuple(values[names[0]].shape) != held.shape:
                shown = f"shape {tuple(values[names[0]].shape)}" if names else "no such entry"
                raise invalid(held.name, shown, f"shape {held.shape}", file=str(source))
            for box in held.boxes:
                box.of(held.parameter.data).copy_(box.out_of(values[names[0]]))
    trainer.gradients.after_update()


def read_state_dict(path: Path | str) -> dict[str, Tensor]:
    """Return the model's weights as one process has them, from a checkpoint of any plan; needs no
    process group."""
    path = Path(path)
    check_whole(path)
    about = read_manifest(path)
    weights = {name: entry for name, entry in entries(path).items() if name.startswith("model.")}
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in weights.items()
    }
    load_tensors(state, path, alone=True)
    result = {name.removeprefix("model."): value for name, value in state.items()}
    for name, aliases in about.aliases.items():
        if name not in result:
            raise invalid("aliases", show(name), "a weight", file=str(path / MANIFEST))
        result |= dict.fromkeys(aliases, result[name])
    return result


def outer_facts(path: Path) -> OuterFacts | None:
    """Return the state of exchanges that a checkpoint contains; None if it is not of an island."""
    return read_manifest(path).outer


def _check_entry(
    path: Path, entries: Mapping[str, TensorStorageMetadata], held: HeldWeight
) -> None:
    entry = entries.get(f"model.{held.name}")
    if entry is None or tuple(entry.size) != held.shape:
        actual = "no such weight" if entry is None else f"a weight of shape {tuple(entry.size)}"
        raise invalid(held.name, actual, f"shape {held.shape}", file=str(path))
