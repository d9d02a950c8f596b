"""Serve the store where the leads of islands meet: ``python -m argosy.runtime.islands.meeting
HOST:PORT FILE``.

The store runs in a process of its own, so that it outlives every island. It ends with the process
that started it. On the loopback address only this machine reaches it; otherwise it listens on all
interfaces. Port 0 takes any free port; the port is written into FILE.
"""

from __future__ import annotations

import datetime
import sys
import threading
from pathlib import Path

from argosy.runtime.processes.meeting import listening_store
from argosy.runtime.processes.orphan import end_with_parent

_PATIENCE = datetime.timedelta(minutes=10)
"""The timeout of the store."""


def main(values: list[str]) -> None:
    end_with_parent()
    place, file = values
    host, _, port = place.rpartition(":")
    store = listening_store(int(port), _PATIENCE, address=host)
    draft = Path(f"{file}.partial")
    draft.write_text(str(store.port))
    draft.replace(file)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
