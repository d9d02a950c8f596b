"""Exchange arrays between the processes that share a box.

``Alone`` is one process, and needs no torch. ``TorchRanks`` are the processes of a
torch.distributed group; unequal parts are sent as bytes through ``all_to_all_single`` with split
sizes, the one collective that every backend offers for them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# An array of any dtype.
Array = NDArray[Any]


class Occupancy:
    """A clock of the time in which some thread of this process computes.

    A thread that waits for other ranks does not compute. The clock runs on while the system gives
    the process no core, so it measures the speed that the process really has.
    """

    def __init__(self) -> None:
        self._seconds = self._since = 0.0
        self._threads = 0
        self._lock, self._local = threading.Lock(), threading.local()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the calling thread as computing."""
        depth = getattr(self._local, "depth", 0)
        self._local.depth = depth + 1
        self._add(int(depth == 0))
        try:
            yield
        finally:
            self._local.depth = depth
            self._add(-int(depth == 0))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the calling thread as waiting, if it counts as computing."""
        computes = int(getattr(self._local, "depth", 0) > 0)
        self._add(-computes)
        try:
            yield
        finally:
            self._add(computes)

    def taken(self) -> float:
        """Return the seconds since the last call."""
        self._add(0)
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add(self, threads: int) -> None:
        with self._lock:
            now = time.perf_counter()
            self._seconds += (now - self._since) * (self._threads > 0)
            self._since = now
            self._threads += threads


class Ranks(Protocol):
    """A group of processes that exchange arrays.

    All members call the same methods in the same order, with arrays of the same dtype and trailing
    shape.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def occupancy(self) -> Occupancy: ...

    def exchange(self, parts: Sequence[Array], counts: Sequence[int] | None = None) -> list[Array]:
        """Send ``parts[r]`` to rank r; return what every rank sent here, in the order of ranks.

        ``counts`` are the rows that each rank sends here, if this rank knows them: then no sizes
        are exchanged first. All ranks give counts, or none does.
        """
        ...

    def barrier(self) -> None: ...


class Alone:
    """A group that consists of this process."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.occupancy = Occupancy()

    def exchange(self, parts: Sequence[Array], counts: Sequence[int] | None = None) -> list[Array]:
        return [parts[0]]

    def barrier(self) -> None:
        return None


class TorchRanks:
    """The processes of torch.distributed, which use CPU tensors and a group of their own."""

    def __init__(self, occupancy: Occupancy | None = None) -> None:
        import torch.distributed

        self.occupancy = occupancy or Occupancy()
        self.rank: int = torch.distributed.get_rank()
        self.size: int = torch.distributed.get_world_size()
        self._group = torch.distributed.new_group(backend="gloo")

    def exchange(self, parts: Sequence[Array], counts: Sequence[int] | None = None) -> list[Array]:
        assert len(parts) == self.size
        shape, dtype = parts[0].shape[1:], parts[0].dtype
        row = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        # Most rows stay on this rank, so they bypass the network's buffers.
        sends = [0 if rank == self.rank else len(part) * row for rank, part in enumerate(parts)]
        if counts is None:
            words = [8] * self.size
            sizes = self._all_to_all(np.array(sends).view(np.uint8), words, words)
            receives = sizes.view(np.int64).tolist()
        else:
            receives = [0 if rank == self.rank else n * row for rank, n in enumerate(counts)]
        leaving = [
            np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            for part, size in zip(parts, sends, strict=True)
            if size
        ]
        flat = np.concatenate(leaving) if len(leaving) > 1 else [*leaving, np.zeros(0, np.uint8)][0]
        inbox = self._all_to_all(flat, sends, receives)
        edges = np.cumsum([0, *receives]).tolist()
        received = [
            inbox[begin:end].view(dtype).reshape(-1, *shape)
            for begin, end in itertools.pairwise(edges)
        ]
        received[self.rank] = parts[self.rank]
        return received

    def _all_to_all(self, flat: Array, sends: list[int], receives: list[int]) -> Array:
        """Send consecutive runs of bytes to the ranks; return the runs that they sent here."""
        import torch
        import torch.distributed

        inbox = torch.empty(sum(receives), dtype=torch.uint8)
        with self.occupancy.waiting():
            torch.distributed.all_to_all_single(
                inbox, torch.from_numpy(flat), receives, sends, group=self._group
            )
        received: Array = inbox.numpy()
        return received

    def barrier(self) -> None:
        import torch.distributed

        torch.distributed.barrier(group=self._group)


def join_processes() -> tuple[TorchRanks, TorchRanks]:
    """Join the processes that torchrun started; return one group for the tree and one for the
    mesh.

    In a lab, this process gets its device's share of a core.
    """
    from argosy.runtime.processes.emulated import join_device, say_ready
    from argosy.runtime.processes.meeting import meet

    meet("gloo", patience=timedelta(minutes=30))
    join_device()
    say_ready()
    occupancy = Occupancy()
    return TorchRanks(occupancy), TorchRanks(occupancy)


def leave_processes() -> None:
    """Leave the group of processes."""
    import torch.distributed

    torch.distributed.destroy_process_group()


def gather(ranks: Ranks, part: Array, counts: Sequence[int] | None = None) -> list[Array]:
    """Return every rank's part, on every rank; ``counts`` are their rows, if they are known."""
    return ranks.exchange([part] * ranks.size, counts)


def gather_equal(ranks: Ranks, part: Array) -> list[Array]:
    """Return every rank's part, on every rank; all have the same number of rows."""
    return gather(ranks, part, [len(part)] * ranks.size)


def total(ranks: Ranks, values: Array) -> Array:
    """Return the sum over ranks, in their order: the same bits everywhere."""
    parts = gather_equal(ranks, values)
    result = parts[0].copy()
    for part in parts[1:]:
        result += part
    return result


def send_rows(
    ranks: Ranks,
    columns: Sequence[Array],
    chosen: Sequence[Any],
    counts: Sequence[int] | None = None,
) -> list[list[Array]]:
    """Send the rows ``chosen[r]`` of all columns to rank r, in one message.

    Returns the columns that each rank sent here. Columns have one length; ``counts`` are the rows
    that each rank sends here, if they are known.
    """
    own = [column[chosen[ranks.rank]] for column in columns]
    if ranks.size == 1:
        return [own]
    widths = [column.dtype.itemsize * int(np.prod(column.shape[1:])) for column in columns]
    nothing = np.zeros(0, np.uint8)
    parts = [
        nothing if rank == ranks.rank else _packed([column[rows] for column in columns])
        for rank, rows in enumerate(chosen)
    ]
    sizes = None if counts is None else [count * sum(widths) for count in counts]
    received = [_unpacked(part, columns, widths) for part in ranks.exchange(parts, sizes)]
    received[ranks.rank] = own
    return received


def _packed(columns: Sequence[Array]) -> Array:
    """Return columns one after the other, as bytes."""
    return np.concatenate(
        [np.ascontiguousarray(column).reshape(-1).view(np.uint8) for column in columns]
    )


def _unpacked(part: Array, columns: Sequence[Array], widths: Sequence[int]) -> list[Array]:
    """Return the columns of a message; their types are those of ``columns``."""
    count = len(part) // sum(widths)
    edges = np.cumsum([0, *(count * width for width in widths)]).tolist()
    return [
        part[begin:end].view(column.dtype).reshape(count, *column.shape[1:])
        for column, (begin, end) in zip(columns, itertools.pairwise(edges), strict=True)
    ]


def joined(parts: Sequence[Sequence[Array]]) -> list[Array]:
    """Return the columns of all ranks, one after the other."""
    filled = [part for part in parts if len(part[0])] or parts[:1]
    if len(filled) == 1:
        return list(filled[0])
    return [np.concatenate(column) for column in zip(*filled, strict=True)]
