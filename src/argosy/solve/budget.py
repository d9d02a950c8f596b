"""What a search may use: CPU time and memory, counted from its beginning."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PAGES = Path("/proc/self/statm")


class Budget:
    """Spent when either is; the best plan so far is the answer then."""

    def __init__(self, seconds: float, size: float) -> None:
        self._most_seconds, self._most_bytes = seconds, size
        self._began, self._held = time.process_time(), held_bytes()

    @property
    def seconds(self) -> float:
        """Used so far."""
        return time.process_time() - self._began

    @property
    def is_spent(self) -> bool:
        return self.seconds > self._most_seconds or held_bytes() - self._held > self._most_bytes


def held_bytes() -> int:
    """Memory that this process holds now; 0 where the system does not say."""
    try:
        return int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
