"""Limit the CPU time and memory of a search, counted from its beginning."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Linux reports the memory of this process here, in pages.
_PAGES = Path("/proc/self/statm")
# The memory of the process is read again after this many CPU seconds.
_WEIGHED = 0.02


class TimeIsUpError(Exception):
    """Raised inside a search if its budget is spent and it has a plan; the search catches it."""


class Budget:
    """A budget that is spent when its time or its memory is; a search then returns the best plan so
    far."""

    def __init__(self, seconds: float, size: float) -> None:
        self._most_seconds, self._most_bytes = seconds, size
        self._began, self._held = time.process_time(), held_bytes()
        self._weighed, self._is_full = 0.0, False

    @property
    def seconds(self) -> float:
        """Return the CPU seconds used so far."""
        return time.process_time() - self._began

    @property
    def is_spent(self) -> bool:
        seconds = self.seconds
        if seconds >= self._weighed + _WEIGHED:
            self._weighed = seconds
            self._is_full = held_bytes() - self._held > self._most_bytes
        return seconds > self._most_seconds or self._is_full


def never() -> bool:
    """Return that a search without a budget is not late."""
    return False


def held_bytes() -> int:
    """Return the bytes of memory that this process holds now, or 0 if the system does not report
    them."""
    try:
        return int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
