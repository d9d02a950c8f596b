"""Start and end the processes of a command, which lock a folder until they have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import IO

# Seconds between two looks at processes that were started.
POLL = 0.05
# Seconds that torchrun gets to end its workers before it is killed.
_GRACE = 40.0


def start_process(
    command: list[str],
    log: IO[str],
    lock: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process; the folder is unlocked when both this process and that one have ended."""
    from argosy.runtime.processes.orphan import end_with_parent

    return subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=() if lock is None else (lock,),
        preexec_fn=end_with_parent,  # noqa: PLW1509 (there is one thread)
    )


@contextlib.contextmanager
def exit_at_sigterm() -> Iterator[None]:
    """Have SIGTERM raise ``SystemExit``, so that what was started is ended."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and all its workers: it ends them when it is terminated, and they end with
    it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
