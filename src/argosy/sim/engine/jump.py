"""Iterations that repeat others: the exact engine moves over them at once.

What happens next depends on the engine's *view* alone: what is under way and how long it still
takes, the bytes that flows have yet to move, what waits for how many; and on the traces. Iterations
follow one another without a barrier, so views are taken at the ends of iterations, each relative to
its own time and iteration. If the view at the end of iteration i is that of iteration i - p, and
every trace is constant from the earlier view on until a time H, all of it happens again P = e(i) -
e(i - p) later:

    (1)  e(i + n p - j) = e(i - j) + n P, 0 <= j < p, for all n with (last foreseen end) + n P < H
    (2)  what devices computed and links carried grows by n times what it grew by between the two
         views

H is the next knot of any trace, or the moment after which no iteration begins; the last iterations
are played. Times relative to a view are differences of large numbers, so they are equal up to
rounding: to 1e-12 of the clock. Where nothing comes back (a link that falls behind for ever is an
example) every iteration is played.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from argosy.sim.engine.network import ActiveFlow

if TYPE_CHECKING:
    from argosy.sim.engine.exact import Engine

_LONGEST = 8
"""Iterations after which a view may come back."""
_SAME = 1e-12


@dataclass(frozen=True)
class View:
    """The engine at the end of an iteration, relative to it."""

    finished: int
    """Iterations."""
    now: float
    marks: tuple[object, ...]
    """What is under way, in order, without times."""
    times: tuple[float, ...]
    """Seconds from now."""
    busy: tuple[float, ...]
    carried: tuple[float, ...]

    def is_like(self, other: View) -> bool:
        tolerance = _SAME * max(self.now, other.now)
        return self.marks == other.marks and all(
            abs(one - two) <= tolerance for one, two in zip(self.times, other.times, strict=True)
        )


class Repeats:
    """The last few views of an engine, and the jump when one comes back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        links, speeds = engine.cluster.links, engine.speeds
        traces = {*(trace for link in links for trace in (link.bandwidth, link.latency)), *speeds}
        self.traces = [trace for trace in traces if not trace.is_constant]
        self.views: deque[View] = deque(maxlen=_LONGEST)
        self.calm_until = 0.0

    def look(self) -> None:
        """Take a view, and jump if it is known."""
        engine = self.engine
        if engine.now >= self.calm_until:
            self.views.clear()
            self.calm_until = min(
                (trace.next_change(engine.now) for trace in self.traces), default=math.inf
            )
        open_iterations = [iteration for iteration, left in engine.left.items() if left]
        if (
            not open_iterations
            or min(open_iterations) < engine.record
            or engine.network.is_foreseen()
        ):
            return
        view = self._view()
        for earlier in reversed(self.views):
            if view.is_like(earlier):
                times = self._times(view, earlier, max(open_iterations))
                if times > 0:
                    self._jump(view, earlier, times)
                    self.views.clear()
                return
        self.views.append(view)

    def _view(self) -> View:
        engine = self.engine
        now, finished = engine.now, len(engine.iteration_ends)
        base = finished * engine.size

        def whose(flow: ActiveFlow) -> tuple[int, str]:
            instance, where = cast(tuple[int, str], flow.owner)
            return instance - base, where

        events = sorted(event for event in engine.heap if _is_foreseen(event))
        flows = engine.network.under_way()
        marks = (
            *((act.__name__, _subject(what[0], base)) for _, _, act, what in events),
            *((*whose(flow), flow.route) for flow in flows),
            *(whose(flow) for flow in engine.network.waiting),
            *(
                frozenset((key - base, count) for key, count in table.items())
                for table in (engine.waiting, engine.flows_left)
            ),
            frozenset((key - finished, count) for key, count in engine.left.items() if count),
            frozenset(key - base for key in engine.started),
            tuple(key - base for key in engine.arrival),
        )
        times = (
            *(time - now for time, *_ in events),
            *(
                flow.remaining / flow.rate - (now - flow.settled) if flow.rate else flow.remaining
                for flow in flows
            ),
            *(time - now for time in engine.arrival.values()),
        )
        return View(
            finished,
            now,
            marks,
            times,
            tuple(engine.busy),
            tuple(engine.network.carried_until(now)),
        )

    def _times(self, view: View, earlier: View, last_open: int) -> int:
        """How many periods may be left out: n of (1)."""
        engine, period = self.engine, view.now - earlier.now
        times = (engine.iterations - 1 - last_open) // (view.finished - earlier.finished)
        horizon = min(self.calm_until, engine.until)
        foreseen = max((event[0] for event in engine.heap if _is_foreseen(event)), default=math.inf)
        if horizon < math.inf and period > 0:
            times = min(times, math.ceil((horizon - foreseen) / period) - 1)
        return times if period > 0 and foreseen < math.inf else 0

    def _jump(self, view: View, earlier: View, times: int) -> None:
        engine = self.engine
        period, every = view.now - earlier.now, view.finished - earlier.finished
        seconds, iterations = times * period, times * every
        more = iterations * engine.size
        ends = engine.iteration_ends[-every:]
        engine.iteration_ends += [
            end + (time + 1) * period for time in range(times) for end in ends
        ]
        engine.busy = [
            now + times * (now - then) for now, then in zip(view.busy, earlier.busy, strict=True)
        ]
        engine.network.shift(
            seconds,
            [times * (now - then) for now, then in zip(view.carried, earlier.carried, strict=True)],
        )
        for flow in (*engine.network.under_way(), *engine.network.waiting):
            instance, where = cast(tuple[int, str], flow.owner)
            flow.owner = (instance + more, where)
        knots = [event for event in engine.heap if event[2] == engine.network.change]
        engine.heap = [
            (time + seconds, number, act, (what[0] + more,) if isinstance(what[0], int) else what)
            for time, number, act, what in filter(_is_foreseen, engine.heap)
        ]
        engine.heap += knots
        heapq.heapify(engine.heap)
        engine.waiting = {key + more: count for key, count in engine.waiting.items()}
        engine.flows_left = {key + more: count for key, count in engine.flows_left.items()}
        engine.started = {key + more: time + seconds for key, time in engine.started.items()}
        engine.arrival = {key + more: time + seconds for key, time in engine.arrival.items()}
        engine.left = {key + iterations: count for key, count in engine.left.items() if count}
        engine.begun = {key + iterations for key in engine.begun}
        engine.now += seconds
        engine.repeated += iterations


def _is_foreseen(event: tuple[float, int, object, tuple[object, ...]]) -> bool:
    """Whether it is an end that still holds: no knot of a trace, no end of a flow whose rate has
    changed since."""
    what = event[3]
    if isinstance(what[0], ActiveFlow):
        return what[1] == what[0].version
    return len(what) == 1


def _subject(what: object, base: int) -> object:
    """Of an event, without its place in time."""
    if isinstance(what, ActiveFlow):
        instance, where = cast(tuple[int, str], what.owner)
        return instance - base, where
    assert isinstance(what, int)
    return what - base
