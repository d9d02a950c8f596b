"""Exchange arrays between the processes that share a box.

``Alone`` is one process, and needs no torch. ``TorchRanks`` are the processes of a
torch.distributed group; unequal parts are sent as bytes through ``all_to_all_single`` with split
sizes, the one collective that every backend offers for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# An array of any dtype.
Array = NDArray[Any]


class Ranks(Protocol):
    """A group of processes that exchange arrays.

    All members call the same methods in the same order, with arrays of the same dtype and trailing
    shape.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, parts: Sequence[Array]) -> list[Array]:
        """Send ``parts[r]`` to rank r; return what every rank sent here, in the order of ranks."""
        ...

    def barrier(self) -> None: ...


class Alone:
    """A group that consists of this process."""

    rank = 0
    size = 1

    def exchange(self, parts: Sequence[Array]) -> list[Array]:
        return [parts[0]]

    def barrier(self) -> None:
        return None


class TorchRanks:
    """The processes of torch.distributed, which use CPU tensors and a group of their own."""

    def __init__(self) -> None:
        import torch.distributed

        self.rank: int = torch.distributed.get_rank()
        self.size: int = torch.distributed.get_world_size()
        self._group = torch.distributed.new_group(backend="gloo")

    def exchange(self, parts: Sequence[Array]) -> list[Array]:
        import torch
        import torch.distributed

        assert len(parts) == self.size
        shape, dtype = parts[0].shape[1:], parts[0].dtype
        row = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        # Most rows stay on this rank, so they bypass the network's buffers.
        sends = [0 if rank == self.rank else len(part) * row for rank, part in enumerate(parts)]
        sizes = torch.tensor(sends)
        received = torch.empty_like(sizes)
        torch.distributed.all_to_all_single(received, sizes, group=self._group)
        receives = received.tolist()
        leaving = [part if count else part[:0] for part, count in zip(parts, sends, strict=True)]
        flat = np.concatenate(
            [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in leaving]
        )
        inbox = torch.empty(sum(receives), dtype=torch.uint8)
        torch.distributed.all_to_all_single(
            inbox, torch.from_numpy(flat), receives, sends, group=self._group
        )
        edges = np.cumsum([0, *receives])
        whole = inbox.numpy()
        received_parts = [
            whole[begin:end].view(dtype).reshape(-1, *shape)
            for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ]
        received_parts[self.rank] = parts[self.rank]
        return received_parts

    def barrier(self) -> None:
        import torch.distributed

        torch.distributed.barrier(group=self._group)


def join_processes() -> tuple[TorchRanks, TorchRanks]:
    """Join the processes that torchrun started; return one group for the tree and one for the
    mesh."""
    from argosy.runtime.processes.meeting import meet

    meet("gloo", patience=timedelta(minutes=30))
    return TorchRanks(), TorchRanks()


def leave_processes() -> None:
    """Leave the group of processes."""
    import torch.distributed

    torch.distributed.destroy_process_group()


def gather(ranks: Ranks, part: Array) -> list[Array]:
    """Return every rank's part, on every rank."""
    return ranks.exchange([part] * ranks.size)


def total(ranks: Ranks, values: Array) -> Array:
    """Return the sum over ranks, in their order: the same bits everywhere."""
    parts = gather(ranks, values)
    result = parts[0].copy()
    for part in parts[1:]:
        result += part
    return result


def send_rows(ranks: Ranks, rows: Array, target: Array) -> list[Array]:
    """Send each row to the rank that ``target`` names; rows keep their order."""
    return ranks.exchange([rows[target == rank] for rank in range(ranks.size)])
