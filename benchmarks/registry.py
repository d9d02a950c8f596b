"""What a benchmark is: a name, what it shows, and a function that measures rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured figure, and what it should reach."""

    what: str
    value: float
    unit: str
    target: str = ""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    name: str
    shows: str
    measure: Callable[[], list[Row]]


def cpu_seconds(work: Callable[[], object], *, repeats: int = 5) -> float:
    """Least CPU time of several runs: other work on the machine can only add to it."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best
