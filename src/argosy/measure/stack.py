"""Measure time and memory of one layer of a transformer as a device of a tensor-parallel group
would run it.

A block is measured in a stack of several, because neighbours hide each other's launches; all
figures are per layer, except the peak, which is the stack's:

    (1)  forward, backward   seconds as they come, one step queued after the other (``timing``)
    (2)  on the device       seconds if the device waits until the host has launched everything; on
                             a CPU (1)
    (3)  kept                bytes that the forward leaves for the backward
    (4)  peak                highest memory of the stack in a step that adds to existing gradients:
                             weights, gradients, (3), and temporary memory

Links are not included (``slices``). Memory is counted on a GPU only.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from argosy.measure.slices import build_layer
from argosy.measure.timing import typical_seconds
from argosy.runtime.stages.compiling import compiled
from argosy.workload.architecture import Architecture, TokenEmbedding

# The number of blocks in a stack; embeddings and heads are measured alone.
BLOCKS = 4


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A description of the layer that is measured."""

    architecture: Architecture
    kind: str
    """``embedding``, ``block`` or ``head``."""
    samples: int
    """Samples of a micro-batch."""
    tokens: int
    width: int
    """The width of the tensor-parallel group, of which one device is measured."""
    dtype: torch.dtype
    device: torch.device
    is_compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class StackRow:
    """The figures that were measured of one layer."""

    layers: int
    """The number of layers in the stack."""
    forward_seconds: float
    backward_seconds: float
    forward_device_seconds: float
    """Seconds with every launch made ahead, which the device alone needs."""
    backward_device_seconds: float
    weight_bytes: int
    """Bytes of one layer's slice."""
    kept_bytes: float | None
    """Bytes of one layer; None if they are not counted on this device."""
    peak_bytes: float | None
    """Bytes of the whole stack."""


def measure_stack(stack: Stack, *, seconds: float = 0.25) -> StackRow:
    """Measure (1) to (4) of a stack."""
    device = stack.device
    _empty(device, stack.dtype)
    before = _memory(device)
    step = _Step(stack)
    kept, peak = _bytes(step, device, before)
    ahead, back = _layer_seconds(step, device, seconds)
    alone = (ahead, back)
    if device.type == "cuda":
        alone = _layer_seconds(step, device, seconds, wait=2 * step.layers * (ahead + back) + 5e-3)
    weights = sum(
        parameter.numel() * parameter.element_size() for parameter in step.module.parameters()
    )
    return StackRow(
        layers=step.layers,
        forward_seconds=ahead,
        backward_seconds=back,
        forward_device_seconds=alone[0],
        backward_device_seconds=alone[1],
        weight_bytes=weights // step.layers,
        kept_bytes=None if kept is None else kept / step.layers,
        peak_bytes=peak,
    )


def stack_seconds(stack: Stack, *, seconds: float = 0.25) -> tuple[float, float]:
    """Return the seconds of forward and backward of one layer, by (1).

    A host's pace drifts; a row measured again at another time shows by how much.
    """
    return _layer_seconds(_Step(stack), stack.device, seconds)


class _Step:
    """A forward and backward that runs repeatedly; gradients add up, as they do over
    micro-batches."""

    def __init__(self, stack: Stack) -> None:
        """Build a stack and run it a few times."""
        self.layers = BLOCKS if stack.kind == "block" else 1
        with stack.device:
            layers = [
                build_layer(stack.architecture, stack.kind, width=stack.width)
                for _ in range(self.layers)
            ]
            self.module = nn.Sequential(*layers).to(stack.dtype)
            self.given = _given(stack)
        self.call = compiled(self.module) if stack.is_compiled else self.module
        with torch.no_grad():
            result = self.module(self.given)
        self.handed = torch.ones_like(result)
        """The gradient that comes from the next stage."""
        for _ in range(3):
            self.run(lambda: None)

    def run(self, between: Callable[[], None]) -> None:
        result = self.call(self.given)
        between()
        result.backward(self.handed)


def _given(stack: Stack) -> Tensor:
    """Return the input of the first layer of the stack."""
    architecture = stack.architecture
    if stack.kind == "embedding":
        assert isinstance(architecture.embedding, TokenEmbedding)
        return torch.randint(architecture.embedding.vocabulary, (stack.samples, stack.tokens))
    shape = (stack.samples, stack.tokens // stack.width, architecture.hidden)
    return torch.randn(shape, dtype=stack.dtype, requires_grad=True)


def _bytes(
    step: _Step, device: torch.device, before: float | None
) -> tuple[float | None, float | None]:
    """Return (3) and (4) in bytes; the result that is sent on is not kept."""
    if before is None:
        return None, None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    kept = []
    given = step.given.numel() * step.given.element_size()
    handed = step.handed.numel() * step.handed.element_size()
    step.run(lambda: kept.append(torch.cuda.memory_allocated(device) - start + given - handed))
    torch.cuda.synchronize(device)
    return float(kept[0]), torch.cuda.max_memory_allocated(device) - before


def _layer_seconds(
    step: _Step, device: torch.device, seconds: float, *, wait: float = 0.0
) -> tuple[float, float]:
    """Return the seconds of one layer by (1), or by (2) if ``wait`` is given.

    With ``wait``, the device waits that many seconds before each step.
    """
    forward, backward = typical_seconds(step.run, device, seconds, wait=wait)
    return forward / step.layers, backward / step.layers


def _empty(device: torch.device, dtype: torch.dtype) -> None:
    """Free what earlier measurements left, and make the libraries allocate their workspace before
    memory is measured."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        small = nn.Linear(64, 64, device=device, dtype=dtype)
        small(torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)).sum().backward()
        torch.cuda.synchronize(device)


def _memory(device: torch.device) -> float | None:
    return float(torch.cuda.memory_allocated(device)) if device.type == "cuda" else None
