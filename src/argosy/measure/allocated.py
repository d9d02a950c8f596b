"""Measure the memory that torch allocates while code runs.

A card's allocator counts by itself. On a CPU torch's profiler records what the calling thread
allocates and frees; memory that libraries allocate for themselves (gloo's sockets, a product's
workspace) is not included, nor what was allocated before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Bytes of an allocation that no other code makes, which separates two segments.
_MARK = 12_347


@dataclass(frozen=True)
class MeasuredSegment:
    """A part of a program with its bytes, counted above what was held before the whole program."""

    start: float
    peak: float


class Allocations:
    """A context in which allocations are counted, in segments that ``mark`` separates."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.segments: list[MeasuredSegment] = []
        """The segments, known after the context."""

    def __enter__(self) -> Allocations:
        if self.device.type == "cuda":
            self.before = self.start = self._reset()
        else:
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.__enter__()
        return self

    def mark(self) -> None:
        """Begin the next segment."""
        if self.device.type == "cuda":
            self._end_segment()
            self.start = self._reset()
        else:
            torch.empty(_MARK, dtype=torch.uint8)

    def __exit__(self, *error: Any) -> None:
        if self.device.type == "cuda":
            self._end_segment()
            return
        self.profiler.__exit__(*error)
        results: Any = self.profiler.profiler
        events = [
            (event.start_ns(), event.nbytes())
            for event in results.kineto_results.events()
            if event.name() == "[memory]"
        ]
        level = start = peak = 0.0
        for _, change in sorted(events, key=lambda event: event[0]):
            if change == -_MARK:
                self.segments.append(MeasuredSegment(start, peak))
                start = peak = level - _MARK
            level += change
            if change != _MARK:
                peak = max(peak, level)
        self.segments.append(MeasuredSegment(start, peak))

    def _reset(self) -> float:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return float(torch.cuda.memory_allocated(self.device))

    def _end_segment(self) -> None:
        torch.cuda.synchronize(self.device)
        peak = float(torch.cuda.max_memory_allocated(self.device))
        self.segments.append(MeasuredSegment(self.start - self.before, peak - self.before))
