"""Record how the best plan and the lower bound of a search approach each other over time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from argosy.plan.plan import Plan
from argosy.solve.settings import SearchProgress

# A plan stores at most this many moments of its search.
_MOST_MOMENTS = 200


class History:
    """A recorder that stores the progress of a search and forwards it."""

    def __init__(self, pass_on: Callable[[SearchProgress], None] | None) -> None:
        self._pass_on = pass_on
        self._begin = time.process_time()
        self._found: list[tuple[float, float, float]] = []

    def __call__(self, state: SearchProgress) -> None:
        if self._pass_on is not None:
            self._pass_on(state)
        now = (state.seconds, state.bound)
        if math.isfinite(state.seconds) and (not self._found or self._found[-1][1:] != now):
            self._found.append((round(time.process_time() - self._begin, 6), *now))

    def moments(self) -> tuple[tuple[float, float, float], ...]:
        """Return at most ``_MOST_MOMENTS`` recorded moments, always with the last one."""
        step = max(1, math.ceil(len(self._found) / _MOST_MOMENTS))
        return tuple(self._found[::-1][::step][::-1])


def with_history(plan: Plan, history: Callable[[SearchProgress], None] | None) -> Plan:
    """Return the plan with the history that was recorded during its search."""
    if plan.search is None or not isinstance(history, History):
        return plan
    return replace(plan, search=replace(plan.search, history=history.moments()))
