"""Start and end the processes of a command, which lock a folder until they have ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import IO

# Seconds between two looks at processes that were started.
POLL = 0.05
# Seconds that torchrun gets to end its workers before it is killed.
_GRACE = 40.0


def start_process(
    command: list[str], log: IO[str], lock: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process; the folder is unlocked when both this process and that one have ended."""
    from argosy.runtime.processes.orphan import end_with_parent

    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
        preexec_fn=end_with_parent,  # noqa: PLW1509 (there is one thread)
    )


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
