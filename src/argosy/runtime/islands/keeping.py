"""Save and load checkpoints of an island: those of its trainer, with the shared parameters and
their momentum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from argosy.errors import invalid
from argosy.runtime.islands.outer import OuterState
from argosy.runtime.islands.training import IslandTrainer
from argosy.runtime.state import checkpoint
from argosy.runtime.state.reading import load_tensors
from argosy.runtime.state.state import merged, trainer_state


def save_island(training: IslandTrainer, folder: Path) -> Path:
    """Write a checkpoint; every rank of the island calls this while no exchange is in flight."""
    assert not training.is_waiting, "an exchange that is under way is not in a checkpoint"
    state: dict[str, Any] = merged(trainer_state(training.trainer, is_written=True))
    about = checkpoint.facts(training.trainer)
    if training.lead is not None:
        outer = training.lead.outer
        state |= _entries(outer)
        about["outer"] = {**outer.counters(), "shared_since": list(training.shared_since)}
    return checkpoint.write(state, about, folder, device=training.trainer.device)


def load_island(training: IslandTrainer, outer: OuterState | None, path: Path) -> None:
    """Load what a checkpoint contains about exchanges, after the trainer has loaded the rest. Every
    rank calls this."""
    known = checkpoint.outer_facts(path)
    if known is None or len(known.shared_since) != training.plan.fragments:
        actual = "no exchanges" if known is None else f"{len(known.shared_since)} fragments"
        expected = f"a checkpoint of islands with {training.plan.fragments} fragments"
        raise invalid(file=str(path), found=actual, expected=expected)
    training.shared_since = list(known.shared_since)
    if outer is not None:
        load_tensors(_entries(outer), path, alone=True)
        outer.take_counters(known.model_dump(exclude={"shared_since"}))


def _entries(outer: OuterState) -> dict[str, torch.Tensor]:
    names = {"theta": outer.theta, "momentum": outer.momentum}
    return {
        f"outer.{name}.{at}": vector
        for name, vectors in names.items()
        for at, vector in enumerate(vectors)
    }
