"""Checkpoints that are written while training goes on.

``begin`` copies this rank's state to host memory and returns; a thread writes it, with a process group of its own, so
that its messages keep out of training's way. One checkpoint is written at a time: the next ``begin`` waits for it. One
that could not be written ends the run before its next step (``heeded``), which nobody would have to go on from. As
always, the folder gets its name when it is whole, so whatever ends the process leaves the one before as the newest.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from argosy.runtime.checkpoint import facts, write
from argosy.runtime.failure import ElsewhereError, in_contact
from argosy.runtime.state import Rows, trainer_state

if TYPE_CHECKING:
    from argosy.runtime.trainer import Trainer


class Saver:
    """Writes checkpoints of a trainer in the background; every rank has one, made at the same point."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def begin(self, trainer: Trainer, folder: Path) -> None:
        """Copy, and write what was copied in the background. Every rank calls this at the same step."""
        self.wait()
        state = {name: _on_host(value) for name, value in trainer_state(trainer)}
        arguments = (state, facts(trainer), folder)
        self.thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self.thread.start()

    def _write(self, state: dict[str, Any], about: dict[str, Any], folder: Path) -> None:
        try:
            write(state, about, folder, group=self.group)
        except Exception as error:  # told where somebody waits for it
            self.error = error

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Around a step: what kept a checkpoint from being written is told before it, and in place of the contact that
        was lost because another rank was told first."""
        self._tell_what_is_known()
        try:
            yield
        except ElsewhereError:
            self._tell_what_is_known()
            raise

    def _tell_what_is_known(self) -> None:
        if self.thread is not None and not self.thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Until what was begun is whole."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            with in_contact("while a checkpoint was written"):
                raise error


def _on_host(value: Tensor) -> Tensor:
    return value.on_host() if isinstance(value, Rows) else value.detach().to("cpu", copy=True)
