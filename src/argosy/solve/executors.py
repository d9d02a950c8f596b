"""Run simulations in parallel, on processes or threads, as a ``concurrent.futures.Executor``.

Results never depend on the executor or on the number of workers, because they are taken in the
order of the calls. Modules are imported when they are needed, because starting a pool is rare and
importing one costs as much as a search.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor
from enum import StrEnum


class ExecutorKind(StrEnum):
    PROCESS = "process"
    THREAD = "thread"


@contextlib.contextmanager
def workers(kind: ExecutorKind, count: int) -> Iterator[Executor | None]:
    """Yield an executor with ``count`` workers, or None for a single process, which is this one."""
    if count == 1:
        yield None
        return
    with _open(kind, count) as executor:
        yield executor


def _open(kind: ExecutorKind, count: int) -> Executor:
    match kind:
        case ExecutorKind.PROCESS:
            from concurrent.futures import ProcessPoolExecutor

            return ProcessPoolExecutor(count)
        case ExecutorKind.THREAD:
            from concurrent.futures import ThreadPoolExecutor

            return ThreadPoolExecutor(count)
