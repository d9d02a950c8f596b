"""Skip iterations that repeat earlier ones.

The future of a simulation depends only on the engine's *view* and on the traces. The view is what
is under way and how long it still takes, the bytes that flows have yet to move, and how many tasks
each task waits for. Iterations follow one another without a barrier, so views are taken at the ends
of iterations, each relative to its own time and iteration. If the view at the end of iteration i
equals that of iteration i - p, and every trace is constant from the earlier view until a time H,
everything happens again P = e(i) - e(i - p) later:

    (1)  e(i + n p - j) = e(i - j) + n P, 0 <= j < p, for all n with (last foreseen end) + n P < H
    (2)  what devices computed and links carried grows by n times what it grew by between the two
         views

H is the next knot of any trace, or the time after which no iteration begins; the last iterations
are simulated. Times relative to a view are differences of large numbers, so they are equal only up
to rounding: to 1e-12 of the clock. If no view returns (for example because a link falls behind
permanently), every iteration is simulated.
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

# The largest period p, in iterations, after which a repeated view is recognised.
_LONGEST = 8
# The tolerance of equal times, as a share of the clock.
_SAME = 1e-12


@dataclass(frozen=True)
class View:
    """The state of the engine at the end of an iteration, with times that are relative to it."""

    finished: int
    """The number of iterations that have ended."""
    now: float
    marks: tuple[object, ...]
    """Everything that is under way, in order, without times."""
    times: tuple[float, ...]
    """Times of what is under way, in seconds from ``now``."""
    busy: tuple[float, ...]
    carried: tuple[float, ...]

    def is_like(self, view: View) -> bool:
        """Return whether two views are equal up to rounding."""
        tolerance = _SAME * max(self.now, view.now)
        return self.marks == view.marks and all(
            abs(mine - theirs) <= tolerance
            for mine, theirs in zip(self.times, view.times, strict=True)
        )


class Repeats:
    """The last few views of an engine, which detect repeated iterations and skip them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        links, speeds = engine.cluster.links, engine.speeds
        traces = {*(trace for link in links for trace in (link.bandwidth, link.latency)), *speeds}
        self.traces = [trace for trace in traces if not trace.is_constant]
        self.views: deque[View] = deque(maxlen=_LONGEST)
        self.calm_until = 0.0

    def look(self) -> None:
        """Take a view, and skip iterations if it equals an earlier one."""
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
        """Return the engine's view at the present time."""
        engine = self.engine
        now, finished = engine.now, len(engine.iteration_ends)
        base = finished * engine.size

        def whose(flow: ActiveFlow) -> tuple[int, str]:
            """Return the relative instance and the place of a flow."""
            instance, where = cast(tuple[int, str], flow.owner)
            return instance - base, where

        events = sorted(event for event in engine.heap if _is_foreseen(event))
        flows = engine.network.under_way()
        marks = (
            *((act.__name__, _subject(arguments[0], base)) for _, _, act, arguments in events),
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
        """Return how many periods may be skipped: n of (1)."""
        engine, period = self.engine, view.now - earlier.now
        times = (engine.iterations - 1 - last_open) // (view.finished - earlier.finished)
        horizon = min(self.calm_until, engine.until)
        foreseen = max((event[0] for event in engine.heap if _is_foreseen(event)), default=math.inf)
        if horizon < math.inf and period > 0:
            times = min(times, math.ceil((horizon - foreseen) / period) - 1)
        return times if period > 0 and foreseen < math.inf else 0

    def _jump(self, view: View, earlier: View, times: int) -> None:
        """Move the engine ``times`` periods ahead (1), (2)."""
        engine = self.engine
        period, period_iterations = view.now - earlier.now, view.finished - earlier.finished
        seconds, iterations = times * period, times * period_iterations
        offset = iterations * engine.size
        ends = engine.iteration_ends[-period_iterations:]
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
            flow.owner = (instance + offset, where)
        knots = [event for event in engine.heap if event[2] == engine.network.change]
        engine.heap = [
            (
                time + seconds,
                number,
                act,
                (arguments[0] + offset,) if isinstance(arguments[0], int) else arguments,
            )
            for time, number, act, arguments in filter(_is_foreseen, engine.heap)
        ]
        engine.heap += knots
        heapq.heapify(engine.heap)
        engine.waiting = {key + offset: count for key, count in engine.waiting.items()}
        engine.flows_left = {key + offset: count for key, count in engine.flows_left.items()}
        engine.started = {key + offset: time + seconds for key, time in engine.started.items()}
        engine.arrival = {key + offset: time + seconds for key, time in engine.arrival.items()}
        engine.left = {key + iterations: count for key, count in engine.left.items() if count}
        engine.begun = {key + iterations for key in engine.begun}
        engine.now += seconds
        engine.repeated += iterations


def _is_foreseen(event: tuple[float, int, object, tuple[object, ...]]) -> bool:
    """Return whether an event is an end that is still valid.

    It is neither a knot of a trace, nor the end of a flow whose rate has changed since.
    """
    arguments = event[3]
    if isinstance(arguments[0], ActiveFlow):
        return arguments[1] == arguments[0].version
    return len(arguments) == 1


def _subject(argument: object, base: int) -> object:
    """Return the instance of an event relative to ``base``, and the place of a flow."""
    if isinstance(argument, ActiveFlow):
        instance, where = cast(tuple[int, str], argument.owner)
        return instance - base, where
    assert isinstance(argument, int)
    return argument - base
