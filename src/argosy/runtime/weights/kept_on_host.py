"""Keep activations in host memory from the forward of a micro-batch to its backward.

Autograd passes every tensor that it saves to a pair of hooks. Its storage is copied to host memory,
once even if it is saved several times, and copied back before the backward needs it: copies run on
streams of their own, beside computation.

    (1)  in a forward at most ``limit`` bytes stay on the device while they are copied; beyond that
         the device waits for the oldest copy
    (2)  in a backward at most ``limit`` bytes are copied back before they are needed, the last
         saved first
    (3)  limit = bytes that a forward of the stage saves / layers of the stage; 0 in the first
         forward

Weights, the inputs of the stage and tensors of a few KiB stay on the device. Under autocast a
tensor of a weight's shape is assumed to be the cast weight, which autocast keeps for all its users.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from argosy.runtime.weights.host_memory import CopyStream, HostBuffers

# Bytes below which a storage stays on the device, since copying it would save little memory.
_SMALL = 8 * 1024


@dataclass(eq=False, slots=True)
class Kept:
    """A storage that was copied to host memory."""

    host: Tensor
    memory: HostBuffers
    handles: int = 0
    """Saved tensors that are views of it and not yet used."""
    here: Tensor | None = None
    """Its bytes on the device, once they are copied back."""
    arrived: torch.cuda.Event | None = None

    def release(self) -> None:
        """Count one saved tensor less; the last one returns the memory to the pool."""
        self.handles -= 1
        if not self.handles:
            self.here = None
            self.memory.give(self.host)


class Handle:
    """An object that autograd keeps in place of a tensor."""

    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.kept = kept
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.stride, self.offset = tensor.stride(), tensor.storage_offset()
        kept.handles += 1

    def __del__(self) -> None:
        self.kept.release()


@dataclass(slots=True)
class Saved:
    """The storages that the forward of one micro-batch has copied to host memory, in order."""

    kept: list[Kept] = field(default_factory=list)
    num_bytes: int = 0


class Leaving:
    """The storages of a forward that are being copied to host memory (1), and those that stay on
    the device."""

    def __init__(self, owner: HostActivations, limit: int, staying: Iterable[Tensor]) -> None:
        self.owner = owner
        self.limit = limit
        self.saved = Saved()
        staying = list(staying)
        self.staying = {tensor.untyped_storage()._cdata for tensor in staying}
        self.shapes = {tuple(tensor.shape) for tensor in staying if tensor.dim() == 2}
        self.known: dict[tuple[int, int], Kept] = {}
        """Copies by storage and version, as long as the storage is on the device."""
        self.window: deque[tuple[tuple[int, int], Tensor, torch.cuda.Event | None, int]] = deque()
        self.held = 0
        """Bytes in the window."""

    def pack(self, tensor: Tensor) -> Any:
        """Copy a tensor that autograd saves to host memory, and return a handle to it."""
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if (
            num_bytes < _SMALL
            or tensor.device != self.owner.device
            or storage._cdata in self.staying
        ):
            return tensor
        if torch.is_autocast_enabled(tensor.device.type) and self._looks_like_a_weight(tensor):
            return tensor
        key = (storage._cdata, tensor._version)
        kept = self.known.get(key)
        if kept is None:
            kept = Kept(self.owner.memory.take(num_bytes), self.owner.memory)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            done = self.owner.outward.copy(kept.host, whole)
            self.known[key] = kept
            self.saved.kept.append(kept)
            self.saved.num_bytes += num_bytes
            self.window.append((key, whole, done, num_bytes))
            self.held += num_bytes
            self.shrink(self.limit)
        return Handle(kept, tensor)

    def _looks_like_a_weight(self, tensor: Tensor) -> bool:
        shape = tuple(tensor.shape)
        return shape in self.shapes or shape[::-1] in self.shapes

    def shrink(self, limit: int) -> None:
        """Free storages on the device, the oldest first, until at most ``limit`` bytes are held."""
        while self.held > limit:
            key, _, done, num_bytes = self.window.popleft()
            self.owner.outward.await_copy(done)
            self.known.pop(key, None)
            self.held -= num_bytes


class HostActivations:
    """Activations of the stages of a rank that are kept in host memory."""

    def __init__(
        self,
        device: torch.device,
        memory: HostBuffers,
        stages: frozenset[int],
        weights: Callable[[], Iterable[Tensor]],
    ) -> None:
        self.device = device
        self.memory = memory
        self.stages = stages
        """The stages whose activations are kept in host memory."""
        self.weights = weights
        """A function that returns the tensors that stay on the device besides the inputs of a
        stage."""
        self.outward, self.inward = CopyStream(device), CopyStream(device)
        self.limits: dict[int, int] = {}
        """The limit (3) in bytes, by stage."""
        self.saved: dict[tuple[int, int], Saved] = {}
        """Saved storages by stage and micro-batch."""
        self.coming: list[Kept] = []
        """Storages that the current backward has not yet copied back, the next one last."""
        self.ahead: list[Kept] = []
        """Storages that were copied back and not yet used."""
        self.limit = 0

    @contextlib.contextmanager
    def keeping(
        self, stage: int, micro_batch: int, inputs: Iterable[Tensor], num_layers: int
    ) -> Iterator[None]:
        """Save the tensors that autograd keeps of a forward in host memory."""
        if stage not in self.stages:
            yield
            return
        leaving = Leaving(self, self.limits.get(stage, 0), [*self.weights(), *inputs])
        with saved_tensors_hooks(leaving.pack, self.unpack):
            yield
        leaving.shrink(0)
        self.limits[stage] = leaving.saved.num_bytes // max(1, num_layers)
        self.saved[stage, micro_batch] = leaving.saved

    @contextlib.contextmanager
    def returning(self, stage: int, micro_batch: int) -> Iterator[None]:
        """Copy back the tensors of a backward before it needs them."""
        if stage not in self.stages:
            yield
            return
        self.coming = self.saved.pop((stage, micro_batch)).kept
        self.ahead, self.limit = [], self.limits.get(stage, 0)
        self._fetch_ahead()
        yield
        self.inward.await_all()
        self.coming, self.ahead = [], []

    def unpack(self, packed: Any) -> Tensor:
        """Return to autograd a tensor that it has saved."""
        if isinstance(packed, Tensor):
            return packed
        handle: Handle = packed
        kept = handle.kept
        if kept.here is None:
            self._fetch(kept)
        self.inward.await_copy(kept.arrived)
        assert kept.here is not None
        tensor = torch.empty(0, dtype=handle.dtype, device=self.device)
        tensor.set_(kept.here.untyped_storage(), handle.offset, handle.shape, handle.stride)
        self.ahead = [waiting for waiting in self.ahead if waiting is not kept]
        self._fetch_ahead()
        return tensor

    def _fetch_ahead(self) -> None:
        """Copy back storages before they are needed (2)."""
        held = sum(kept.host.numel() for kept in self.ahead)
        while self.coming and held <= self.limit:
            kept = self.coming.pop()
            if kept.here is None and kept.handles:
                self._fetch(kept)
                self.ahead.append(kept)
                held += kept.host.numel()

    def _fetch(self, kept: Kept) -> None:
        kept.here = torch.empty(kept.host.numel(), dtype=torch.uint8, device=self.device)
        kept.arrived = self.inward.copy(kept.here, kept.host)
