"""Log what happens to an elastic run, as lines of JSON. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.runtime.processes.run_folder import EVENTS, Log


class Events:
    """A log of decisions and observations that is written by leaders, one line of JSON each."""

    def __init__(self, folder: Path, host: str) -> None:
        self.log, self.host = Log(folder / EVENTS), host

    def write(self, event: str, **facts: Any) -> None:
        self.log.event(event, self.host, **facts)
