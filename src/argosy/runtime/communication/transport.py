"""Send tensors from rank to rank without waiting, into receives that are posted long before they
are needed.

A backend with tags (gloo) keeps messages apart by them. NCCL matches messages by their order, and
runs the calls of a communicator one after the other. So every channel of NCCL (sender, receiver,
activations or gradients) has a communicator with a stream of its own: the schedule's order is the
same on both sides of a channel, and a waiting receive blocks only later receives of its channel.
Communicators are opened before training, by all ranks in the same order, because opening one blocks
until both sides have joined. All tensors of a message are one batch.

If ranks share a GPU and NCCL cannot, messages pass through pinned host memory and gloo.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.runtime.communication.ledger import MOST_GRADIENTS
from argosy.runtime.processes.failure import in_contact
from argosy.runtime.processes.ranks import Channel
from argosy.runtime.processes.world import patience_of_all

Key = tuple[int, int, bool]
"""Sending stage, micro-batch, and whether the message is a gradient."""


class AsyncWork(Protocol):
    """The handle that an asynchronous call of torch.distributed returns."""

    def wait(self) -> bool: ...


@dataclass
class Arrival:
    """Tensors that are being received, in buffers of their own."""

    layers: list[list[Tensor]]
    """Lists of one buffer per tensor; if there are several lists, they are summed."""
    works: list[AsyncWork]
    device: torch.device
    posted: float = field(default_factory=time.perf_counter)
    """The time at which the receive was posted, in seconds of the host's clock."""

    def wait(self) -> list[Tensor]:
        """Wait, and return the tensors on the device that computes."""
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
    """The point-to-point messages that one rank sends and receives."""

    device: torch.device
    """The device of the tensors that are sent and received."""
    staged: bool
    """True if messages pass through host memory."""
    in_order: bool = False
    """True if messages are matched by their order instead of by tags."""
    channels: dict[Channel, dist.ProcessGroup | None] = field(default_factory=dict)
    """Communicators; None for channels of other ranks, and empty if messages have tags."""
    departures: dict[Key, list[tuple[list[Tensor], AsyncWork]]] = field(default_factory=dict)
    """Tensors that may not have been sent yet, oldest first. gloo reports completion only to a call
    that waits, so they are freed when they must have been sent."""

    @classmethod
    def open(cls, device: torch.device) -> Transport:
        in_order = dist.get_backend() == "nccl"
        return cls(device, staged=device.type != "cpu" and not in_order, in_order=in_order)

    def connect(self, channels: Iterable[Channel]) -> None:
        """Open new channels; every rank calls this at the same point with the same channels."""
        if not self.in_order:
            return
        new = sorted(set(channels) - self.channels.keys())
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        for channel in new:
            group = dist.new_group(
                sorted(channel[:2]), timeout=patience_of_all(), pg_options=options
            )
            self.channels[channel] = group if isinstance(group, dist.ProcessGroup) else None
        rank, token = dist.get_rank(), torch.zeros(1, device=self.device)
        for source, target, gradient in new:
            if rank == source:
                self.send([(token, 0)], target, (0, 0, gradient))
            elif rank == target:
                with in_contact(f"with rank {source} while a channel was opened"):
                    for work in self.post([(token, 0)], source, gradient=gradient):
                        work.wait()
        self.finish()

    def send(self, tensors: Sequence[tuple[Tensor, int]], peer: int, key: Key) -> None:
        """Begin to send tensors, each with its tag; they are kept until they have been sent."""
        own = [(self._outgoing(tensor), tag) for tensor, tag in tensors]
        works = self._begin(dist.isend, own, peer, (dist.get_rank(), peer, key[2]))
        kept = [tensor for tensor, _ in own]
        self.departures.setdefault(key, []).extend((kept, work) for work in works)

    def _begin(
        self,
        call: Callable[..., Any],
        tensors: Sequence[tuple[Tensor, int]],
        peer: int,
        channel: Channel,
    ) -> list[AsyncWork]:
        if not tensors:
            return []
        if self.in_order:
            group = self.channels[channel]
            return list(
                dist.batch_isend_irecv(
                    [dist.P2POp(call, tensor, peer, group) for tensor, _ in tensors]
                )
            )
        return [call(tensor, peer, tag=tag) for tensor, tag in tensors]

    def _outgoing(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not self.staged:
            return tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return host

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory that a message may arrive in."""
        if self.staged:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def post(
        self, buffers: Sequence[tuple[Tensor, int]], peer: int, *, gradient: bool
    ) -> list[AsyncWork]:
        """Begin to receive into buffers, each with its tag."""
        return self._begin(dist.irecv, buffers, peer, (peer, dist.get_rank(), gradient))

    def send_bytes(self, data: bytes, peer: int, tag: int, stage: int) -> None:
        """Send a message of unknown length: its length, then its content."""
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), content):
            self.send([(tensor.to(self.device), tag)], peer, (stage, 0, False))

    def receive_bytes(self, peer: int, tag: int) -> bytes:
        """Wait for a message that ``send_bytes`` sent."""
        length = self._received((1,), torch.int64, peer, tag)
        content = self._received((int(length.item()),), torch.uint8, peer, tag)
        return bytes(content.numpy())

    def _received(self, shape: Sequence[int], dtype: torch.dtype, peer: int, tag: int) -> Tensor:
        buffer = self.buffer(shape, dtype)
        for work in self.post([(buffer, tag)], peer, gradient=False):
            work.wait()
        return buffer.cpu()

    def departed(self, key: Key) -> None:
        """Free a message that has been sent: the answer to a forward shows that it has arrived."""
        for _, work in self.departures.pop(key, ()):
            work.wait()

    def limit_gradients(self) -> None:
        """Wait for the oldest gradients if many are in flight, since gradients are not answered."""
        waiting = [key for key in self.departures if key[2]]
        for key in waiting[:-MOST_GRADIENTS]:
            self.departed(key)

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for key in list(self.departures):
            self.departed(key)
