"""Write and read restart files that survive a kill at any moment.

Each process writes its particles into a new folder. When all have done so, one small file, which is
replaced atomically, names this folder as the one to continue from, and only then the previous
folder is removed. A kill leaves the old state or the new one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from argosy.document import Schema, read_json, validate
from argosy.errors import invalid
from argosy.nbody.files.snapshot import read_array, read_names, reading, writing
from argosy.nbody.particles import Names, Particles, check_finite
from argosy.workload.fields import Count, Natural

# The file that names the folder to continue from.
_MARK = "restart.json"


class _Mark(Schema):
    """The content that the restart mark has."""

    version: Literal[1]
    step: Natural
    processes: Count
    folder: str


def write_restart(
    folder: Path,
    particles: Particles,
    *,
    step: int,
    rank: int,
    processes: int,
    wait_for_all: Callable[[], None],
) -> None:
    """Write the state after ``step`` steps.

    Every process calls this; ``wait_for_all`` is their barrier.
    """
    place = folder / f"step-{step:06d}"
    with writing(place / f"{rank:04d}.hdf5") as file:
        file["positions"], file["momenta"], file["ids"] = (
            particles.positions,
            particles.momenta,
            particles.ids,
        )
    wait_for_all()
    if rank == 0:
        before = last_restart(folder)
        mark = folder / f".{_MARK}.partial"
        with mark.open("w", encoding="utf-8") as file:
            json.dump(
                {"version": 1, "step": step, "processes": processes, "folder": place.name}, file
            )
            file.flush()
            os.fsync(file.fileno())
        mark.replace(folder / _MARK)
        if before is not None and before[0] != step:
            shutil.rmtree(folder / f"step-{before[0]:06d}", ignore_errors=True)
    wait_for_all()


def last_restart(folder: Path) -> tuple[int, int] | None:
    """Return (steps done, number of processes) of the state in a folder; None if there is none."""
    mark = folder / _MARK
    if not mark.exists():
        return None
    content = validate(read_json(mark), _Mark)
    return content.step, content.processes


def read_restart(folder: Path, rank: int, processes: int) -> Particles:
    """Return this process's part of the saved state, which any number of processes may have
    written."""
    state = last_restart(folder)
    if state is None:
        raise invalid(file=str(folder / _MARK), expected="a restart mark")
    step, wrote = state
    place = folder / f"step-{step:06d}"
    parts = [_read_part(place / f"{part:04d}.hdf5") for part in range(rank, wrote, processes)]
    nothing = Particles(
        positions=np.empty((0, 3)), momenta=np.empty((0, 3)), ids=np.empty(0, np.int64)
    )
    parts = parts or [nothing]
    ids: Names = np.concatenate([part.ids for part in parts])
    return Particles(
        positions=np.concatenate([part.positions for part in parts]),
        momenta=np.concatenate([part.momenta for part in parts]),
        ids=ids,
    )


def _read_part(path: Path) -> Particles:
    """Read the particles that one process wrote."""
    with reading(path) as file:
        ids = read_names(path, file, "ids")
        positions, momenta = (
            read_array(path, file, name, rows=len(ids)) for name in ("positions", "momenta")
        )
    particles = Particles(positions=positions, momenta=momenta, ids=ids)
    check_finite(particles, str(path))
    return particles
