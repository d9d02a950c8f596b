"""Write checkpoints while training continues.

``begin`` copies this rank's state to host memory and returns; a thread writes it, with a process
group of its own, so that its messages do not interfere with training. One checkpoint is written at
a time: the next ``begin`` waits for it. If one cannot be written (a full disk, a folder that was
removed), this is reported and training continues: rank 0 requests another one some seconds later
(``is_due``, with the votes of a step). Only the last one of a run must be written: ``finish``
retries for a minute, and then raises.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from argosy.runtime.processes.failure import ElsewhereError, in_contact
from argosy.runtime.state.checkpoint import UnsavedError, facts, write
from argosy.runtime.state.state import Rows, merged, trainer_state

if TYPE_CHECKING:
    from argosy.runtime.step.trainer import Trainer

# Seconds between a checkpoint that could not be written and the next attempt.
RETRY_SECONDS = 5.0
# Attempts to write the last checkpoint of a run again; with ``RETRY_SECONDS`` they take a minute.
LAST_TRIES = 12


class Saver:
    """A writer that saves checkpoints of a trainer in the background; every rank makes one at the
    same point."""

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        """Prepare to write into a folder; ``report`` is called on rank 0 with the reason why a
        checkpoint could not be written."""
        self.folder, self.report = folder, report
        self.group = dist.new_group(backend="gloo")
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.unsaved: UnsavedError | None = None
        """The error of the last attempt; None if it succeeded."""
        self.failed_at = 0.0

    def is_due(self) -> bool:
        """Return whether it is time for another attempt, on rank 0; the others follow it."""
        self._look()
        waited = time.monotonic() - self.failed_at
        return self.unsaved is not None and dist.get_rank() == 0 and waited >= RETRY_SECONDS

    def begin(self, trainer: Trainer) -> None:
        """Copy the state, and write the copy in the background. Every rank calls this at the same
        step."""
        self.wait()
        self.unsaved = None
        state = merged(
            (name, _on_host(value)) for name, value in trainer_state(trainer, is_written=True)
        )
        arguments = (state, facts(trainer))
        self.thread = threading.Thread(
            target=self._write, args=arguments, name="checkpoint", daemon=True
        )
        self.thread.start()

    def _write(self, state: dict[str, Any], about: dict[str, Any]) -> None:
        try:
            write(state, about, self.folder, group=self.group)
        except Exception as error:  # raised again when ``wait`` is called
            self.error = error

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Report the outcome of a checkpoint around a step: before it, and in place of a lost
        contact that follows from another rank's earlier report."""
        self._look()
        try:
            yield
        except ElsewhereError:
            self._look()
            raise

    def _look(self) -> None:
        if self.thread is not None and not self.thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the current checkpoint is written or has failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        error, self.error = self.error, None
        if isinstance(error, UnsavedError):
            self.unsaved, self.failed_at = error, time.monotonic()
            if dist.get_rank() == 0:
                self.report(f"{error}; another one is written after {RETRY_SECONDS:g} s")
        elif error is not None:
            with in_contact("while a checkpoint was written"):
                raise error

    def finish(self, trainer: Trainer) -> None:
        """Wait until the last checkpoint is written; raise an ``UnsavedError`` on every rank if it
        cannot be."""
        self.wait()
        for _ in range(LAST_TRIES):
            if self.unsaved is None:
                return
            time.sleep(RETRY_SECONDS)
            self.begin(trainer)
            self.wait()
        if self.unsaved is not None:
            raise self.unsaved


def _on_host(value: Tensor) -> Tensor:
    return value.on_host() if isinstance(value, Rows) else value.detach().to("cpu", copy=True)
