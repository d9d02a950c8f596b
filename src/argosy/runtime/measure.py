"""What a rank did and when, written down as it happens.

A mark costs two readings of a clock and an append. On a GPU, where work is only queued, computation is marked by events
on its stream, which are read after the step. Times are seconds of the rank's own clock; ``timeline`` aligns the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

import torch

from argosy.schedule import Action, ActionKind
from argosy.timeline import SpanKind

SPAN_KIND = {
    ActionKind.FORWARD: SpanKind.FORWARD,
    ActionKind.BACKWARD: SpanKind.BACKWARD,
    ActionKind.INPUT_GRADIENT: SpanKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT: SpanKind.WEIGHT_GRADIENT,
}


class Mark(NamedTuple):
    """One thing on this rank."""

    what: str
    """A kind of span; or ``wait``, ``send``."""
    stage: int | None
    micro_batch: int | None
    gradient: bool
    step: int
    start: float
    end: float


class _Marking:
    """A context that appends a mark when it is left."""

    __slots__ = ("begin", "key", "recorder")

    def __init__(self, recorder: Recorder, key: tuple[str, int | None, int | None, bool]) -> None:
        self.recorder = recorder
        self.key = key

    def __enter__(self) -> None:
        self.begin = self.recorder.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self.recorder
        if recorder.enabled:
            recorder.raw.append((*self.key, recorder.step, self.begin, recorder.now()))


class Recorder:
    """The marks of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.enabled = True
        self.step = 0
        self.raw: list[tuple[object, ...]] = []
        self.device = device
        self.now: Callable[[], object] = time.perf_counter if device.type == "cpu" else self._event

    def _event(self) -> tuple[float, torch.cuda.Event]:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return time.perf_counter(), event

    def computing(self, action: Action) -> _Marking:
        return _Marking(self, (SPAN_KIND[action.kind], action.stage, action.micro_batch, False))

    def waiting(self, action: Action) -> _Marking:
        return _Marking(self, ("wait", action.stage, action.micro_batch, action.kind is not ActionKind.FORWARD))

    def sending(self, stage: int, micro_batch: int, *, gradient: bool) -> _Marking:
        return _Marking(self, ("send", stage, micro_batch, gradient))

    def reducing(self, stage: int | None = None) -> _Marking:
        return _Marking(self, (SpanKind.COLLECTIVE, stage, None, True))

    def updating(self) -> _Marking:
        return _Marking(self, (SpanKind.UPDATE, None, None, False))
