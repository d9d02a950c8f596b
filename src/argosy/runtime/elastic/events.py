"""What happens to an elastic run, as lines of JSON beside it. Needs no torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from argosy.runtime.folder import EVENTS, append


class Events:
    """What the leaders of a run decided and saw, one line of JSON each."""

    def __init__(self, folder: Path, host: str) -> None:
        self.path, self.host = folder / EVENTS, host

    def write(self, event: str, **facts: Any) -> None:
        append(self.path, {"event": event, "at": round(time.time(), 3), "by": self.host, **facts})
