"""Start a worker's process. Needs no torch, so that an agent can import it."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


def end_with_agent() -> None:
    """Start a thread that ends this process when its agent has ended for any reason."""
    agent = multiprocessing.parent_process()
    assert agent is not None

    def follow() -> None:
        wait([agent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, name="agent", daemon=True).start()


def _log_file(path: Path) -> io.FileIO:
    """Open a worker's log; nothing is kept if the run's folder cannot be written now."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)
    except OSError:
        return Path(os.devnull).open("ab", buffering=0)


def begin(task: dict[str, Any], pipe: Connection) -> None:
    """Run the worker: set its environment and log, end with its agent, and train."""
    end_with_agent()
    os.environ.update(task["environment"])
    with _log_file(Path(task["log"])) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from argosy.runtime.elastic.training import work

    with contextlib.suppress(OSError):  # the agent has ended, and so does this process
        pipe.send(work(task, pipe))
    sys.stdout.flush()
    os._exit(0)
