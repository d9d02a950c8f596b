"""What a benchmark is: a name, what it shows, and a function that measures rows; and how one is
made of a sweep.

(1)  a sweep builds something at each of several sizes and puts it through phases
(2)  growth of a phase between two sizes = log(ratio of its CPU times) / log(ratio of the sizes): 1
     is linear
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_Built = TypeVar("_Built")


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


@dataclass(frozen=True, kw_only=True)
class Sweep(Generic[_Built]):
    """(1)"""

    over: str
    """What the sizes count."""
    sizes: Sequence[int]
    build: Callable[[int], _Built]
    phases: Mapping[str, Callable[[_Built], object]]

    def measure(self) -> list[Row]:
        """CPU seconds of every phase at every size, and how they grow."""
        rows: list[Row] = []
        for phase, work in self.phases.items():
            taken = []
            for size in self.sizes:
                built = self.build(size)
                taken.append(cpu_seconds(lambda b=built, w=work: w(b), repeats=3))
                rows.append(
                    Row(what=f"{phase}, {size:,} {self.over}", value=1e3 * taken[-1], unit="ms")
                )
            rows.append(
                Row(
                    what=f"{phase}: growth in {self.over}", value=growth(self.sizes, taken), unit=""
                )
            )
        return rows


def growth(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """(2) between the first size and the last.

    >>> round(growth([10, 100], [1.0, 100.0]), 3)
    2.0
    """
    return math.log(seconds[-1] / seconds[0]) / math.log(sizes[-1] / sizes[0])


def cpu_seconds(work: Callable[[], object], *, repeats: int = 5) -> float:
    """Least CPU time of several runs: other work on the machine can only add to it."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best
