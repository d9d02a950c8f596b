"""Represent a quantity that changes over time as an exact step function: link bandwidth, link
latency, device speed.

A ``Trace`` v has knots 0 = T[0] < T[1] < ... and holds ``values[i]`` on [T[i], T[i+1]), the last
value without end. Work done since time 0 is the continuous, piecewise linear

    (1)  C(t) = integral of v from 0 to t,

so an amount x that starts at t0 is done at

    (2)  advance(t0, x) = the earliest t with C(t) = C(t0) + x,

infinity if there is none. No time step is involved anywhere. For a link x is bytes and v bytes/s;
for a device x is seconds of work at full speed and v its speed, 0 while it is lost.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from argosy.errors import bad_input

FloatArray = NDArray[np.float64]

# Seconds that stand for the end of time in (1), so that interpolation has a right end.
_FOREVER = 1e12


@dataclass(frozen=True)
class Trace:
    """A step function of time that is hashable, so that equal traces are shared."""

    times: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.times or len(self.times) != len(self.values):
            raise bad_input(
                "as many times as values, at least one", f"{len(self.times)} and {len(self.values)}"
            )
        if self.times[0] != 0:
            raise bad_input("a trace that starts at 0 s", f"{self.times[0]} s")
        if not all(map(operator.lt, self.times, self.times[1:])):
            raise bad_input("strictly increasing times", "times that do not increase")
        if self.times[-1] >= _FOREVER:
            raise bad_input(f"times below {_FOREVER:g} s", f"{self.times[-1]} s")
        wrong = next((value for value in self.values if not 0 <= value < math.inf), None)
        if wrong is not None:
            raise bad_input("finite values of at least 0", wrong)

    @classmethod
    def constant(cls, value: float) -> Trace:
        return cls((0.0,), (float(value),))

    @classmethod
    def from_steps(cls, steps: Iterable[tuple[float, float]], *, initial: float) -> Trace:
        """Return the trace of steps in time order; ``initial`` holds before the first. Steps that
        change nothing are dropped.

        >>> Trace.from_steps([(30, 4.0), (90, 25.0)], initial=25.0)
        Trace(25 until 30 s, 4 until 90 s, then 25)
        """
        times, values = [0.0], [float(initial)]
        for time, value in steps:
            if time == times[-1]:
                values[-1] = float(value)
                if len(values) > 1 and values[-2] == values[-1]:
                    times.pop()
                    values.pop()
            elif value != values[-1]:
                times.append(float(time))
                values.append(float(value))
        return cls(tuple(times), tuple(values))

    @property
    def is_constant(self) -> bool:
        return len(self.times) == 1

    def at(self, time: float) -> float:
        """Return the value that holds at ``time``; before 0 the first one does."""
        if len(self.values) == 1:
            return self.values[0]
        return self.values[max(bisect.bisect_right(self.times, time) - 1, 0)]

    def next_change(self, time: float) -> float:
        """Return the first knot after ``time``, or infinity."""
        index = bisect.bisect_right(self.times, time)
        return self.times[index] if index < len(self.times) else math.inf

    def knots_between(self, start: float, end: float) -> tuple[float, ...]:
        """Return the times after ``start`` and before ``end`` at which the value changes.

        >>> Trace.from_steps([(30, 4.0), (90, 25.0)], initial=25.0).knots_between(30, 91)
        (90.0,)
        """
        return self.times[
            bisect.bisect_right(self.times, start) : bisect.bisect_left(self.times, end)
        ]

    def integral(self, start: float, end: float) -> float:
        """Return the integral (1) between two times."""
        return self._cumulative_at(end) - self._cumulative_at(start)

    def advance(self, start: float, amount: float) -> float:
        """Return the time (2) at which ``amount`` is done if it starts at ``start``.

        >>> Trace.from_steps([(10, 0.0), (20, 1.0)], initial=2.0).advance(9, 4.0)
        22.0
        """
        if amount <= 0 or start == math.inf:
            return start
        index = max(bisect.bisect_right(self.times, start) - 1, 0)
        now = start
        while True:
            end = self.times[index + 1] if index + 1 < len(self.times) else math.inf
            value = self.values[index]
            if value > 0 and now + amount / value <= end:
                return now + amount / value
            if end == math.inf:
                return math.inf
            amount -= value * (end - now)
            now = end
            index += 1
            # By rounding: done at the knot, not after the outage that may begin there.
            if amount <= 0:
                return now

    def mean(self, start: float, end: float) -> float:
        """Return the average over an interval; the value itself if the interval is empty."""
        return self.integral(start, end) / (end - start) if end > start else self.at(start)

    def scaled(self, factor: float) -> Trace:
        return Trace(self.times, tuple(value * factor for value in self.values))

    def after(self, time: float) -> Trace:
        """Return the trace from ``time`` on, which becomes 0.

        >>> Trace.from_steps([(30, 4.0), (90, 25.0)], initial=25.0).after(40)
        Trace(4 until 50 s, then 25)
        """
        steps = [
            (at - time, value)
            for at, value in zip(self.times, self.values, strict=True)
            if at > time
        ]
        return Trace.from_steps(steps, initial=self.at(time))

    @cached_property
    def knots(self) -> tuple[FloatArray, FloatArray]:
        """Return T and C of (1) as arrays with a far right end, for vectorised inversion."""
        times = np.append(np.asarray(self.times), _FOREVER)
        done = np.concatenate(([0.0], np.cumsum(np.asarray(self.values) * np.diff(times))))
        return times, done

    @cached_property
    def steps(self) -> tuple[FloatArray, FloatArray]:
        """Return times and values as arrays."""
        return np.asarray(self.times), np.asarray(self.values)

    @cached_property
    def _code(self) -> int:
        return hash((self.times, self.values))

    def __hash__(self) -> int:
        """Return the hash, computed once, because a trace may have a million knots."""
        return self._code

    def _cumulative_at(self, time: float) -> float:
        index = max(bisect.bisect_right(self.times, time) - 1, 0)
        value = self.values[index]
        return float(self.knots[1][index]) + (value * (time - self.times[index]) if value else 0.0)

    def __repr__(self) -> str:
        parts = [f"{v:g} until {t:g} s" for v, t in zip(self.values, self.times[1:], strict=False)]
        if len(parts) > 4:
            parts = [*parts[:2], f"... {len(parts) - 3} more", parts[-1]]
        last = f"then {self.values[-1]:g}" if parts else f"{self.values[-1]:g}"
        return f"Trace({', '.join([*parts, last])})"


def total(traces: Iterable[Trace]) -> Trace:
    """Return the pointwise sum: the bandwidth of several links together, or the latency of crossing
    them all.

    >>> total([Trace.constant(3.0), Trace.from_steps([(5, 1.0)], initial=4.0)])
    Trace(7 until 5 s, then 4)
    """
    counted = Counter(traces)
    knots = sorted({time for trace in counted for time in trace.times})
    values = [sum(trace.at(time) * count for trace, count in counted.items()) for time in knots]
    return Trace.from_steps(zip(knots, values, strict=True), initial=values[0])


def minimum(traces: Iterable[Trace]) -> Trace:
    """Return the pointwise minimum: the bandwidth of a route is that of its narrowest link at every
    time.

    >>> minimum([Trace.constant(3.0), Trace.from_steps([(5, 1.0)], initial=4.0)])
    Trace(3 until 5 s, then 1)
    """
    traces = list(dict.fromkeys(traces))
    if len(traces) == 1:
        return traces[0]
    knots = sorted({time for trace in traces for time in trace.times})
    values = [min(trace.at(time) for trace in traces) for time in knots]
    return Trace.from_steps(zip(knots, values, strict=True), initial=values[0])
