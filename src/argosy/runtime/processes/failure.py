"""Record why a rank failed, so that the launcher can report the first cause. Needs no torch.

A rank that fails leaves a note in the run's folder and ends. The others lose contact and leave
second-hand notes, which count only if no rank has left a first-hand one, as when a process is
killed.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from argosy.errors import RunError

_TORCHRUN = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*:\s*(-?\d+)")
"""Matches the rank and exit code of a failed process in the output of torchrun."""


class ElsewhereError(RunError):
    """An error that happened on another rank: it ended, stopped answering, or reported one."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """The note that a rank leaves when it fails."""

    rank: int
    device: str
    message: str
    exit_code: int
    first_hand: bool
    """True if the note is about the rank itself, False if it is about another."""
    at: float
    """The time at which it was written, in seconds since the epoch."""


@contextlib.contextmanager
def in_contact(moment: str) -> Iterator[None]:
    """Raise an ``ElsewhereError`` in place of the errors that torch.distributed raises if a peer
    goes away."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(moment, error) from error


@contextlib.contextmanager
def in_contact_beside_others(moment: str) -> Iterator[None]:
    """Do as ``in_contact`` around code that may also fail by itself, such as a user's model: only
    errors of torch.distributed are replaced."""
    try:
        yield
    except RuntimeError as error:
        if not is_of_torch_distributed(error):
            raise
        raise _lost(moment, error) from error


@contextlib.contextmanager
def ending_after(seconds: float, end: Callable[[], None]) -> Iterator[None]:
    """Call ``end`` in another thread if the body takes longer than ``seconds``.

    A rank may block anywhere in a CUDA call under NCCL, which no signal and no exception ends.
    """
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _lost(moment: str, error: RuntimeError) -> ElsewhereError:
    first = (str(error).splitlines() or [""])[0]
    reason = first.partition("] ")[2] or first
    return ElsewhereError(f"lost contact {moment}: {reason.partition('. This is typically')[0]}")


def is_of_torch_distributed(error: RuntimeError) -> bool:
    """Return whether torch.distributed raised an error: by its type, by the function that raised
    it, or, for errors from C++, by the words of gloo."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    return "DistError" in kinds or "/torch/distributed/" in innermost or "/gloo/" in str(error)


def told(error: Exception) -> str:
    """Write the traceback of an error in a user's code to standard error, and return its message
    with the place."""
    sys.stderr.write(traceback.format_exc())
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"


def how_it_ended(code: int) -> str:
    """Describe how a process with a non-zero exit code ended.

    >>> how_it_ended(-9), how_it_ended(-35), how_it_ended(3)
    ('was killed by SIGKILL', 'was killed by signal 35', 'ended with exit code 3')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    known = {int(number): number.name for number in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"


def leave_note(
    folder: Path, *, rank: int, device: str, message: str, exit_code: int, first_hand: bool
) -> None:
    note = Note(
        rank=rank,
        device=device,
        message=message,
        exit_code=exit_code,
        first_hand=first_hand,
        at=time.time(),
    )
    (folder / f"failure-{rank}.json").write_text(json.dumps(asdict(note)))


def read_notes(folder: Path) -> list[Note]:
    """Return the notes of a run, first-hand notes first, then by time."""
    notes = [Note(**json.loads(path.read_text())) for path in sorted(folder.glob("failure-*.json"))]
    return sorted(notes, key=lambda note: (not note.first_hand, note.at))


def clear_notes(folder: Path) -> None:
    for path in folder.glob("failure-*.json"):
        path.unlink()


def verdict(folder: Path, log: str, devices: Sequence[str]) -> tuple[str, int]:
    """Return which rank failed and why, and the exit code, from the notes and the output of
    torchrun."""
    notes = read_notes(folder)
    first_hand = {note.rank for note in notes if note.first_hand}
    sentences = []
    for rank, code in dict(_TORCHRUN.findall(log)).items():
        if int(code) < 0 and int(code) != -signal.SIGTERM and int(rank) not in first_hand:
            sentences.append(f"rank {rank} ({devices[int(rank)]}) {how_it_ended(int(code))}")
    if notes and (notes[0].first_hand or not sentences):
        sentences.append(f"rank {notes[0].rank} ({notes[0].device}): {notes[0].message}")
    elif notes:
        sentences.append(
            f"rank {notes[0].rank} ({notes[0].device}) saw it first: {notes[0].message}"
        )
    if not sentences:
        last = [line for line in log.splitlines() if line.strip()][-1:]
        sentences = [
            f"torchrun failed: {last[0].strip()}" if last else "torchrun failed without a message"
        ]
    exit_code = notes[0].exit_code if notes and notes[0].first_hand else RunError.exit_code
    return "; ".join(sentences), exit_code
