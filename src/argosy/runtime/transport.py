"""Tensors from rank to rank: sends that do not wait, receives that are posted long before they are needed.

A backend that knows tags (gloo) keeps messages apart by them. One that does not (NCCL) matches messages by their order,
so there every direction and kind of message has a communicator of its own, on which the schedule's order is the same
on both sides. Where several ranks share a GPU, which NCCL refuses, messages pass through pinned host memory and gloo.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.runtime.ledger import MOST_GRADIENTS
from argosy.runtime.world import patience_of_all

Key = tuple[int, int, bool]
"""Sending stage, micro-batch, whether it is a gradient."""


class Work(Protocol):
    """What an asynchronous call of torch.distributed returns."""

    def wait(self) -> bool: ...


@dataclass
class Arrival:
    """Tensors on their way here, in buffers of their own."""

    layers: list[list[Tensor]]
    """Buffers per tensor; several lists of them add up."""
    works: list[Work]
    device: torch.device
    posted: float = field(default_factory=time.perf_counter)
    """When room for them was offered."""

    def wait(self) -> list[Tensor]:
        """The tensors, on the device that computes."""
        for work in self.works:
            work.wait()
        buffers, *others = self.layers
        for layer in others:
            for total, part in zip(buffers, layer, strict=True):
                total += part
        if self.device.type == "cpu":
            return buffers
        return [buffer.to(self.device, non_blocking=True) for buffer in buffers]


@dataclass
class Transport:
    """Point-to-point messages of one rank."""

    device: torch.device
    """Where the tensors are that are sent and received."""
    groups: tuple[dist.ProcessGroup | None, ...]
    """By kind of message; all the default group where messages have tags."""
    staged: bool
    """Through host memory."""
    departures: dict[Key, list[tuple[Tensor, Work]]] = field(default_factory=dict)
    """Tensors that may not have left yet, oldest first. gloo only tells who waits, so they go when they must have."""

    @classmethod
    def open(cls, device: torch.device) -> Transport:
        """To be called by every rank of the default group at the same point."""
        if dist.get_backend() == "nccl":
            return cls(device, tuple(dist.new_group(timeout=patience_of_all()) for _ in range(4)), staged=False)
        return cls(device, (None,) * 4, staged=device.type != "cpu")

    def send(self, tensor: Tensor, peer: int, tag: int, key: Key) -> None:
        """Begin to send; the tensor is kept until it has left."""
        tensor = self._outgoing(tensor)
        work = dist.isend(tensor, peer, group=self._group(dist.get_rank(), peer, key[2]), tag=tag)
        assert work is not None
        self.departures.setdefault(key, []).append((tensor, work))

    def _outgoing(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not self.staged:
            return tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return host

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that a message may arrive in."""
        if self.staged:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def post(self, buffer: Tensor, peer: int, tag: int, *, gradient: bool) -> Work:
        """Begin to receive into ``buffer``."""
        work = dist.irecv(buffer, peer, group=self._group(peer, dist.get_rank(), gradient), tag=tag)
        assert work is not None
        return work

    def send_bytes(self, data: bytes, peer: int, tag: int, stage: int) -> None:
        """A message of unknown length: its length, then itself."""
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), content):
            self.send(tensor.to(self.device), peer, tag, (stage, 0, False))

    def receive_bytes(self, peer: int, tag: int) -> bytes:
        """Wait for what ``send_bytes`` sent."""
        length = self.buffer((1,), torch.int64)
        self.post(length, peer, tag, gradient=False).wait()
        content = self.buffer((int(length.item()),), torch.uint8)
        self.post(content, peer, tag, gradient=False).wait()
        return bytes(content.cpu().numpy())

    def departed(self, key: Key) -> None:
        """Let go of what has left: the answer to a forward shows that it has arrived."""
        for _, work in self.departures.pop(key, ()):
            work.wait()

    def limit_gradients(self) -> None:
        """Nobody answers a gradient, so the oldest of many are waited for."""
        waiting = [key for key in self.departures if key[2]]
        for key in waiting[:-MOST_GRADIENTS]:
            self.departed(key)

    def finish(self) -> None:
        """Wait until everything has left."""
        for key in list(self.departures):
            self.departed(key)

    def _group(self, source: int, target: int, gradient: bool) -> dist.ProcessGroup | None:
        return self.groups[2 * gradient + (source < target)]
