"""Record the labs of this machine in one small file each, which is written before anything is
built, so that everything that a crash leaves can be found and removed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path("/run/argosy-lab")
"""The folder of the records, which a restart of the machine empties."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A lab as its file describes it."""

    name: str
    cluster: str
    """The cluster's content as canonical JSON."""
    shares: tuple[str, ...]
    """Names of the control groups that were made."""
    owner: tuple[int, str] | None = None
    """Process and its start time; a lab with an owner does not outlive it."""

    @property
    def prefix(self) -> str:
        return prefix_of(self.name)

    @property
    def is_orphan(self) -> bool:
        return self.owner is not None and start_time(self.owner[0]) != self.owner[1]

    def write(self) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        path = _path(self.name)
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(asdict(self), sort_keys=True), encoding="utf-8")
        draft.replace(path)

    def remove(self) -> None:
        _path(self.name).unlink(missing_ok=True)


def prefix_of(lab: str) -> str:
    """Return the prefix of all names that a lab uses. A lab's name has no dot, so names of
    ``trial-2`` never begin with the prefix of ``trial``."""
    return f"argosy-{lab}."


def records() -> Iterator[Record]:
    """Yield every lab of this machine, by name."""
    for path in sorted(FOLDER.glob("*.json")) if FOLDER.is_dir() else []:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:  # it was removed meanwhile
            continue
        owner = content.pop("owner")
        shares = tuple(content.pop("shares"))
        yield Record(
            **content,
            shares=shares,
            owner=None if owner is None else (int(owner[0]), str(owner[1])),
        )


def myself() -> tuple[int, str]:
    """Return this process as an owner."""
    started = start_time(os.getpid())
    assert started is not None
    return os.getpid(), started


def start_time(pid: int) -> str | None:
    """Return when a process began, as the kernel writes it; None if there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def _path(name: str) -> Path:
    return FOLDER / f"{name}.json"
