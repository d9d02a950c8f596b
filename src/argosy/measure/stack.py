"""Time and weigh one layer of a transformer as a device of a tensor-parallel group would run it.

A block is measured in a stack of several, because neighbours hide each other's launches; all
figures are per layer, except the peak, which is the stack's:

    (1)  forward, backward   median seconds as they come, a host launching kernels one by one
    (2)  on the device       the same with the device kept waiting until the host has launched everything; on a CPU (1)
    (3)  kept                bytes that the forward leaves for the backward
    (4)  peak                highest memory of the stack in a step that adds to gradients that are there already:
                             weights, gradients, (3), and what comes and goes

Links are no part of it (``slices``). Memory is counted on a GPU only.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from argosy.measure.slices import build_layer
from argosy.runtime.stages.compiling import compiled
from argosy.workload.architecture import Architecture, TokenEmbedding

BLOCKS = 4
"""Blocks in a stack; embeddings and heads stand alone."""
_FEWEST, _MOST = 5, 100
"""Repeats of a measurement."""
_CYCLES_PER_SECOND = 2e9
"""About a GPU's clock: how long to keep it waiting for the host."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What to measure."""

    architecture: Architecture
    kind: str
    """``embedding``, ``block`` or ``head``."""
    samples: int
    """Of a micro-batch."""
    tokens: int
    width: int
    """Of the tensor-parallel group, of which one device is measured."""
    dtype: torch.dtype
    device: torch.device
    is_compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class StackRow:
    """What was measured of one layer."""

    layers: int
    """In the stack."""
    forward_seconds: float
    backward_seconds: float
    forward_device_seconds: float
    """With every launch made ahead: what the device alone needs."""
    backward_device_seconds: float
    weight_bytes: int
    """Of one layer's slice."""
    kept_bytes: float | None
    """Of one layer; None: not counted on this device."""
    peak_bytes: float | None
    """Of the whole stack."""


def measure_stack(stack: Stack, *, seconds: float = 0.25) -> StackRow:
    """(1) to (4)."""
    device = stack.device
    _empty(device, stack.dtype)
    before = _memory(device)
    step = _Step(stack)
    kept, peak = _bytes(step, device, before)
    ahead, back = _median_seconds(step, device, seconds, wait=0.0)
    alone = (ahead, back)
    if device.type == "cuda":
        alone = _median_seconds(step, device, seconds, wait=2 * step.layers * (ahead + back) + 5e-3)
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
    """(1) alone, forward and backward of one layer: a host's pace drifts, and a row measured again
    at another time tells by how much."""
    return _median_seconds(_Step(stack), stack.device, seconds, wait=0.0)


class _Step:
    """One forward and backward; gradients add up, as they do over micro-batches."""

    def __init__(self, stack: Stack) -> None:
        """Of a stack that has run a few times already."""
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
    """What the first layer of the stack reads."""
    architecture = stack.architecture
    if stack.kind == "embedding":
        assert isinstance(architecture.embedding, TokenEmbedding)
        return torch.randint(architecture.embedding.vocabulary, (stack.samples, stack.tokens))
    shape = (stack.samples, stack.tokens // stack.width, architecture.hidden)
    return torch.randn(shape, dtype=stack.dtype, requires_grad=True)


def _bytes(
    step: _Step, device: torch.device, before: float | None
) -> tuple[float | None, float | None]:
    """(3) and (4); the result that is handed on is not kept."""
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


def _median_seconds(
    step: _Step, device: torch.device, seconds: float, *, wait: float
) -> tuple[float, float]:
    """(1) of one layer, or (2) where the device is kept waiting for ``wait`` seconds before each
    step. No garbage is collected meanwhile: a collection takes as long as several layers."""
    times: list[tuple[float, float]] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        began = time.perf_counter()
        while len(times) < _FEWEST or (
            time.perf_counter() - began < seconds and len(times) < _MOST
        ):
            times.append(_on_card(step, wait) if device.type == "cuda" else _on_host(step))
    finally:
        if collecting:
            gc.enable()
    forward, backward = (statistics.median(way) / step.layers for way in zip(*times, strict=True))
    return forward, backward


def _on_card(step: _Step, wait: float) -> tuple[float, float]:
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    if wait:
        torch.cuda._sleep(int(wait * _CYCLES_PER_SECOND))
    begin.record()
    step.run(middle.record)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3


def _on_host(step: _Step) -> tuple[float, float]:
    between: list[float] = []
    begin = time.perf_counter()
    step.run(lambda: between.append(time.perf_counter()))
    return between[0] - begin, time.perf_counter() - between[0]


def _empty(device: torch.device, dtype: torch.dtype) -> None:
    """Let go what earlier measurements left, and have the libraries take their workspace before
    anything is weighed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        small = nn.Linear(64, 64, device=device, dtype=dtype)
        small(torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)).sum().backward()
        torch.cuda.synchronize(device)


def _memory(device: torch.device) -> float | None:
    return float(torch.cuda.memory_allocated(device)) if device.type == "cuda" else None
