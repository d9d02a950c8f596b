"""Ranks that are threads of one process: the same conversation as over a network, without starting
processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from argosy.nbody.ranks import Occupancy

Result = TypeVar("Result")
Array = NDArray[Any]


class ThreadRanks:
    def __init__(
        self, rank: int, size: int, barrier: threading.Barrier, table: list[Sequence[Array]]
    ) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._table = barrier, table
        self.bytes_sent = 0
        self.occupancy = Occupancy()

    def exchange(self, parts: Sequence[Array], counts: Sequence[int] | None = None) -> list[Array]:
        assert len(parts) == self.size
        self._table[self.rank] = parts
        self.bytes_sent += sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        self._barrier.wait(60)
        received = [np.array(self._table[source][self.rank]) for source in range(self.size)]
        assert len({(part.dtype, part.shape[1:]) for part in received}) == 1, (
            "every rank sends one kind of array"
        )
        assert counts is None or list(counts) == [len(part) for part in received]
        self._barrier.wait(60)
        return received

    def barrier(self) -> None:
        self._barrier.wait(60)


def on_threads(size: int, work: Callable[[ThreadRanks, ThreadRanks], Result]) -> list[Result]:
    """Run ``work`` once per rank, with two groups of ranks; its results in rank order."""
    groups = [(threading.Barrier(size), [() for _ in range(size)]) for _ in range(2)]

    def one(rank: int) -> Result:
        try:
            return work(*(ThreadRanks(rank, size, barrier, table) for barrier, table in groups))
        except BaseException:
            for barrier, _ in groups:
                barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(one, rank) for rank in range(size)]
        failed = [done.exception() for done in running]
        causes = [error for error in failed if error is not None]
        for error in sorted(
            causes, key=lambda error: isinstance(error, threading.BrokenBarrierError)
        ):
            raise error
        return [done.result() for done in running]
