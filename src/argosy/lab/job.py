"""Run processes that belong together: one per device, started together, ended together."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from argosy.errors import RunError
from argosy.runtime.processes.failure import how_it_ended

# Seconds between two looks at the processes.
_POLL = 0.02
# Seconds for processes to end after a signal; a tenth of it lets the others report after one has
# failed.
_PATIENCE = 3.0


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """A process that is to be started: its label, its command and its environment."""

    label: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


class LabJob:
    """A set of workers that run as processes; leaving the context ends those that still run."""

    def __init__(self, workers: Sequence[WorkerCommand]) -> None:
        self.workers = tuple(workers)
        self.processes: list[subprocess.Popen[str]] = []
        self.output: dict[str, list[str]] = {worker.label: [] for worker in workers}
        """Lines of standard output and error, per worker."""
        self.echo: IO[str] | None = None
        """The stream to which lines are copied as they come, each after its worker's label."""
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> LabJob:
        try:
            for worker in self.workers:
                self._start(worker)
        except OSError as error:
            self._end()
            raise RunError(
                f"{worker.label} cannot be started: {worker.command[0]}: {error.strerror}"
            ) from None
        except BaseException:  # they are in sessions of their own, which no interrupt reaches
            self._end()
            raise
        return self

    def _start(self, worker: WorkerCommand) -> None:
        process = subprocess.Popen(
            worker.command,
            env=dict(worker.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        reader = threading.Thread(target=self._read, args=(worker.label, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, label: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.output[label].append(line.rstrip("\n"))
            if self.echo is not None:
                self.echo.write(f"{label}: {line}")

    def wait(self, timeout: float = math.inf) -> None:
        """Wait until all have ended well; raise a ``RunError`` that names the first that did
        not."""
        deadline = time.monotonic() + timeout
        while True:
            codes = [process.poll() for process in self.processes]
            failed = next((index for index, code in enumerate(codes) if code), None)
            if failed is not None:
                time.sleep(_PATIENCE / 10)
                raise RunError(self._why(failed, codes[failed]))
            if all(code == 0 for code in codes):
                self._finish_reading()
                return
            if time.monotonic() > deadline:
                waiting = [
                    worker.label
                    for worker, code in zip(self.workers, codes, strict=True)
                    if code is None
                ]
                raise RunError(f"{', '.join(waiting)} did not end within {timeout:g} s")
            time.sleep(_POLL)

    def _why(self, index: int, code: int | None) -> str:
        label = self.workers[index].label
        assert code is not None
        last_lines = [line for line in self.output[label] if line.strip()][-12:]
        return "\n".join([f"{label} {how_it_ended(code)}", *(f"  {line}" for line in last_lines)])

    def _finish_reading(self) -> None:
        for reader in self._readers:
            reader.join(_PATIENCE)

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        """End all processes that still run."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            deadline = time.monotonic() + _PATIENCE
            while (
                any(process.poll() is None for process in self.processes)
                and time.monotonic() < deadline
            ):
                time.sleep(_POLL)
        self._finish_reading()
        for process in self.processes:
            if process.stdout is not None:
                process.stdout.close()


def free_port() -> int:
    """Return a port that nothing listens on in this process's own network; on a new host all are
    free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
