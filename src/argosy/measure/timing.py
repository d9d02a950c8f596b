"""Time repeated forwards and backwards, as they run in training.

On a GPU the host queues one repeat after the other and waits for none, as it does for the layers of
a stage: launches are hidden behind the kernels before them unless the host is the slower of the
two. Events on the stream record when each part ended. Gradients add up, as they do over the
micro-batches of a step.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

Between = Callable[[], None]
"""A function that is called between a forward and its backward."""
Run = Callable[[Between], None]
"""A function that runs a forward and its backward."""
Times = list[tuple[float, float]]
"""Seconds of forward and backward, repeat by repeat."""

# The least and most repeats of a measurement.
FEWEST, MOST = 4, 100
# Cycles per second of a GPU's clock, approximately, to set how long it waits for the host.
_CYCLES_PER_SECOND = 2e9


def typical_seconds(
    run: Run, device: torch.device, seconds: float, *, wait: float = 0.0
) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward, from about ``seconds`` of repeats.

    On a CPU this is the mean: a throttled CPU is idle for part of every period. On a GPU it is the
    median. With ``wait``, a GPU waits that long before each repeat, so that the host has queued all
    of it and the device alone is timed.
    """
    if device.type != "cuda":
        ways = zip(*_on_host(run, seconds), strict=True)
        forward, backward = (statistics.fmean(way) for way in ways)
    else:
        times = (
            [_after_waiting(run, wait) for _ in _repeats(seconds)]
            if wait
            else _in_a_row(run, seconds)
        )
        forward, backward = (statistics.median(way) for way in zip(*times, strict=True))
    return forward, backward


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: a collection takes as long as several layers."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _repeats(seconds: float) -> Iterator[int]:
    """Yield the numbers of repeats until their time is over."""
    with _no_collection():
        begin = time.perf_counter()
        number = 0
        while number < FEWEST or (time.perf_counter() - begin < seconds and number < MOST):
            yield number
            number += 1


def _on_host(run: Run, seconds: float) -> Times:
    times: Times = []
    middles: list[float] = []
    for _ in _repeats(seconds):
        begin = time.perf_counter()
        run(lambda: middles.append(time.perf_counter()))
        times.append((middles[-1] - begin, time.perf_counter() - middles[-1]))
    return times


def _in_a_row(run: Run, seconds: float) -> Times:
    """Return the times of all repeats but the first, before which the device was idle.

    The host is one repeat ahead of the device.
    """
    torch.cuda.synchronize()
    repeats: list[Sequence[torch.cuda.Event]] = []
    for number in _repeats(seconds):
        repeats.append(_queued(run))
        if number:
            repeats[number - 1][-1].synchronize()
    torch.cuda.synchronize()
    return [_seconds_between(events) for events in repeats[1:]]


def _after_waiting(run: Run, wait: float) -> tuple[float, float]:
    torch.cuda._sleep(int(wait * _CYCLES_PER_SECOND))
    events = _queued(run)
    torch.cuda.synchronize()
    return _seconds_between(events)


def _queued(run: Run) -> Sequence[torch.cuda.Event]:
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    run(middle.record)
    end.record()
    return begin, middle, end


def _seconds_between(events: Sequence[torch.cuda.Event]) -> tuple[float, float]:
    begin, middle, end = events
    return begin.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3
