"""Keep a run's folder: its lock, its files by name, the lines of JSON appended to them, and its
checkpoints.

Needs no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from argosy.errors import impossible
from argosy.runtime.processes.manifest import tear_in

PROGRESS, DECISIONS, EVENTS = "progress.jsonl", "decisions.jsonl", "events.jsonl"
"""Files to which a run appends lines of JSON."""
TIMELINE, CHECKPOINTS = "timeline.json", "checkpoints"
"""The file of the recorded timeline, and the folder of checkpoints."""
_CHECKPOINT = re.compile(r"step-(\d+)|\.step-(\d+)\.replaced")
"""Matches the name of a checkpoint's folder, or of one that was about to be replaced."""

Line = dict[str, Any]
"""A line of a log as a JSON object."""


def keep_private() -> None:
    """Make this process, and those that it starts, create files that other users cannot read.

    The group keeps the rights that the user's umask leaves it.
    """
    os.umask(os.umask(0o077) | 0o007)


@contextlib.contextmanager
def held(folder: Path, node: str, *, elastic: bool = False) -> Iterator[int]:
    """Lock a node's part of a run's folder for one run; raise an ``InputError`` if another run has
    locked it.

    Yield the descriptor of the locked file. The kernel releases the lock when the last process that
    has it ends for any reason; the file stays. On a file system without locks nothing is locked. An
    elastic run and a plain one share nothing in a folder: if any node has locked it for one kind,
    no node can lock it for the other.
    """
    own, excluded_kind = ("elastic", "run") if elastic else ("run", "elastic")
    with contextlib.ExitStack() as opened:
        descriptor = _locked(folder / f".{own}-{node}.lock", fcntl.LOCK_EX, opened)
        for path in folder.glob(f".{excluded_kind}-*.lock"):
            with contextlib.ExitStack() as looked_at:
                _locked(path, fcntl.LOCK_SH, looked_at)
        yield descriptor


def _locked(path: Path, how: int, opened: contextlib.ExitStack) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise impossible(f"write into {path.parent}", error, "another --out") from None
    opened.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        kind, _, node = path.stem.removeprefix(".").partition("-")
        running = "an elastic run" if kind == "elastic" else "a run"
        reason = f"{running} is still writing into it (node {node})"
        remedy = "another --out, or wait for the end of that run"
        raise impossible(f"start a run in {path.parent}", reason, remedy) from None
    except OSError:
        pass
    return descriptor


def forget_after(folder: Path, done: int) -> None:
    """Remove the logged lines of all steps after the first ``done``, since these are trained
    again."""
    _keep(folder / PROGRESS, lambda line: line["step"] < done)
    _keep(folder / DECISIONS, lambda line: line.get("applied_before", line["step"] + 1) <= done)


def _keep(path: Path, stays: Callable[[Line], bool]) -> None:
    """Keep only some lines of a file, if it exists, byte for byte.

    Incomplete lines, which a power cut may leave, are removed.
    """
    if not path.exists():
        return
    before = path.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    after = b"".join(line for line in whole.splitlines(keepends=True) if _stays(line, stays))
    if not after:
        path.unlink()
    elif after != before:
        draft = path.with_name(f".{path.name}.partial")
        draft.write_bytes(after)
        draft.replace(path)


def _read(line: bytes) -> Line | None:
    """Return the content of a line; None if it is incomplete, as after a power cut or on a full
    disk."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _stays(line: bytes, stays: Callable[[Line], bool]) -> bool:
    content = _read(line)
    try:
        return content is not None and stays(content)
    except (KeyError, TypeError):
        return False


def append(path: Path, line: Line) -> None:
    """Append a line as a whole, after a line break if the last line was cut off; create the folder
    again if it was removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        is_torn = file.read(1) not in (b"", b"\n")
        data = b"\n" * is_torn + json.dumps(line).encode() + b"\n"
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class Log:
    """A file to which lines of JSON are appended; lines that cannot be written now are kept and
    written with the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: list[Line] = []

    def add(self, line: Line) -> None:
        self.kept.append(line)
        try:
            while self.kept:
                append(self.path, self.kept[0])
                del self.kept[0]
        except OSError as error:
            if len(self.kept) == 1:
                sys.stderr.write(
                    f"{self.path}: {error.strerror}; its lines are kept until they can be written\n"
                )

    def event(self, event: str, by: str, **facts: Any) -> None:
        """Append an event, with the time in seconds since the epoch."""
        self.add({"event": event, "at": round(time.time(), 3), "by": by, **facts})


def read_lines(path: Path) -> list[Line]:
    """Return the complete lines of a file; any may have been cut off when its writer ended, and the
    last may be incomplete."""
    return Tail(path, skip=False).read()


class Tail:
    """A reader that returns the lines of a file as they are appended; lines that exist already are
    skipped unless ``skip`` is false."""

    def __init__(self, path: Path, *, skip: bool = True) -> None:
        self.path = path
        self.lines: list[Line] = []
        """All lines that were read."""
        self._at = self._size() if skip else 0

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> list[Line]:
        """Return the complete lines that were appended since the last call."""
        if self._size() < self._at:  # the file was written again from its start
            self._at, self.lines = 0, []
        if not self._size():
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        added = [line for line in map(_read, whole.splitlines()) if line is not None]
        self.lines += added
        return added


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first; their manifests show which are whole
    (``manifest``).

    A checkpoint that was about to be replaced by another of the same step counts if the other did
    not get its name.
    """
    by_step: dict[int, Path] = {}
    for path in sorted(folder.glob("*step-*")):  # replaced ones begin with a dot and come first
        match = _CHECKPOINT.fullmatch(path.name)
        if match:
            by_step[int(match[1] or match[2])] = path
    return [path for _, path in sorted(by_step.items())]


def step_of(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was made."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1] or match[2])


def steps_saved(run: Path) -> int:
    """Return the number of steps after which the newest checkpoint was made whose files exist with
    their sizes; 0 if there is none."""
    saved = [path for path in checkpoints(run / CHECKPOINTS) if not tear_in(path, contents=False)]
    return step_of(saved[-1]) if saved else 0
