"""Allocate host memory for copies of a rank: pinned for a GPU, and not counted by torch as memory
of a CPU device."""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor


class HostBuffers:
    """A pool of host memory whose buffers are used again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_pinned = device.type == "cuda"
        self.free: dict[int, list[Tensor]] = defaultdict(list)
        """Free buffers by size in bytes."""
        self.num_bytes = 0
        """Bytes of all buffers, used and free."""

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer of ``num_bytes`` bytes."""
        if self.free[num_bytes]:
            return self.free[num_bytes].pop()
        self.num_bytes += num_bytes
        array = np.empty(num_bytes, dtype=np.uint8)
        buffer = torch.from_numpy(array)
        if self.is_pinned:
            place = buffer.data_ptr()
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(place, num_bytes, 0))
            weakref.finalize(array, torch.cuda.cudart().cudaHostUnregister, place)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        self.free[buffer.numel()].append(buffer)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in host memory."""
        return self.take(shape.numel() * dtype.itemsize).view(dtype).view(shape)

    def holds(self, tensor: object) -> bool:
        """Return whether a tensor is in memory that can be copied from and to while the device
        computes."""
        return (
            isinstance(tensor, Tensor)
            and tensor.device.type == "cpu"
            and tensor.is_pinned() == self.is_pinned
        )


class CopyStream:
    """A separate stream for copies on a GPU; on a CPU copies are done at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Begin a copy after all work queued for the device; return the event of its completion,
        None if it is already done."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self.stream.record_event()
            return event

    def await_copy(self, event: torch.cuda.Event | None) -> None:
        """Make work queued for the device from now on wait until a copy is done."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def await_all(self) -> None:
        """Make work queued for the device from now on wait until all copies are done."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def finish(self) -> None:
        """Wait until all copies are done."""
        if self.stream is not None:
            self.stream.synchronize()
