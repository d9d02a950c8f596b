"""The best plans that a search has found so far, judged or played, and plans whose bounds are still
in doubt."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import replace

from argosy.solve.finalists.candidate import Candidate, neighbours, shifted
from argosy.solve.finalists.judge import Complete, Judge, Key, plan_key
from argosy.solve.finalists.verdict import ExactTrial
from argosy.solve.search.shape import Shape
from argosy.space.option import Option, Vector

_MOST = 32
_SAME = 1e-6
"""Times that differ by less than this share are the same."""
_NEAR = 1.05
"""Neighbours that the judge finds slower than this times the best plan are forgotten."""


class Incumbents:
    """Every plan is judged once; the best few are remembered, and the exact engine plays those that
    matter."""

    def __init__(self, judge: Judge, trial: ExactTrial, ceiling: float = math.inf) -> None:
        self.judge = judge
        self.trial = trial
        self.ceiling = ceiling
        """The time of a plan from elsewhere: slower ones are of no use."""
        self.found: list[Candidate] = []
        """Best first."""
        self.known: dict[Key, float] = {}
        """Judged times."""
        self.suspects: list[tuple[float, int, Candidate]] = []
        """Complete plans that came out of a search and were not played, behind their bounds and a
        number, as a heap."""
        self.cleared = math.inf
        """The least time of those that were played."""

    @property
    def best(self) -> float:
        return min(self.ceiling, self.found[0].seconds) if self.found else self.ceiling

    def confirm(self, most: float = math.inf) -> None:
        """Play the best plan, until the best one is one that was played. Of more than ``most`` that
        turn out slower than judged, the others are forgotten, and so are those that are as fast as
        the first."""
        plays = 0
        while self.found and not self.found[0].is_played:
            candidate = self.found.pop(0)
            played = next((other for other in self.found if other.is_played), None)
            is_tie = (
                played is not None
                and most < math.inf
                and candidate.seconds >= played.seconds * (1 - _SAME)
            )
            if played is None or (plays < most and not is_tie):
                self.add(candidate)
            plays += 1

    def add(self, candidate: Candidate) -> None:
        """Remember a plan with its exact time."""
        (seconds,) = self.trial.seconds([candidate])
        insort(self.found, replace(candidate, seconds=seconds, is_played=True))
        del self.found[_MOST:]

    def keep(
        self, shape: Shape, plans: Sequence[Complete], units: Vector, below: float = math.inf
    ) -> None:
        """Judge plans and remember the best of them, as far as they are below a time."""
        fresh = {key: plan for plan in plans if (key := plan_key(shape, plan)) not in self.known}
        if not fresh:
            return
        judged = self.judge.seconds(shape, list(fresh.values()), below=below, best=self.best)
        for (key, plan), seconds, schedule in zip(fresh.items(), *judged, strict=True):
            if seconds < math.inf or below == math.inf:
                self.known[key] = seconds
            if seconds < math.inf:
                found = Candidate(
                    seconds=seconds,
                    number=len(self.known),
                    shape=shape,
                    schedule=schedule,
                    plan=plan,
                    units=units,
                )
                self.found.append(found)
        self.found.sort()
        del self.found[_MOST:]

    def settle(self, shape: Shape, plans: Sequence[Complete], units: Vector, bundle: int) -> None:
        """Judge plans whose cuts are so many layers apart (``solve.search.grid``), and then with
        cuts between: half as many layers move to another stage while that helps, then a quarter,
        and in the end single ones."""
        self.keep(shape, plans, units)
        for plan in plans if bundle > 1 else ():
            step = (bundle + 1) // 2
            while step:
                moved = list(shifted(plan, step))
                self.keep(shape, moved, units)
                best = min(moved, key=lambda one: self.known[plan_key(shape, one)], default=plan)
                if self.known[plan_key(shape, best)] < self.known[plan_key(shape, plan)] * (
                    1 - 1e-9
                ):
                    plan = best
                else:
                    step //= 2

    def improve(self, best: Candidate, options: Mapping[Vector, Sequence[Option]]) -> None:
        """Small moves from a plan while they help."""
        while True:
            known = len(self.known)
            self.keep(
                best.shape, list(neighbours(best.plan, options)), best.units, _NEAR * best.seconds
            )
            fresh = [one for one in self.found if one.number > known and one.shape is best.shape]
            if not fresh or fresh[0].seconds >= best.seconds * (1 - 1e-9):
                return
            best = fresh[0]

    def suspect(self, shape: Shape, plans: Sequence[tuple[float, Complete]], units: Vector) -> None:
        """Remember complete plans that have come out of a search of one schedule, with their
        bounds; the judge's word alone closes none."""
        (schedule,) = shape.schedules
        for bound, plan in plans:
            if self.known[plan_key(shape, plan)] < math.inf:
                found = Candidate(
                    seconds=bound, number=0, shape=shape, schedule=schedule, plan=plan, units=units
                )
                heapq.heappush(self.suspects, (bound, len(self.suspects), found))

    @property
    def least_open_suspect(self) -> float:
        """No plan that came out of a search and was not played is faster."""
        return self.suspects[0][0] if self.suspects else math.inf

    @property
    def least_suspect(self) -> float:
        """No plan that came out of a search is faster."""
        return min(self.cleared, self.least_open_suspect)

    def clear_suspect(self) -> None:
        """Play the suspect with the least bound: then its time is certain."""
        *_, candidate = heapq.heappop(self.suspects)
        (seconds,) = self.trial.exact_seconds([candidate])
        self.cleared = min(self.cleared, seconds)
        self.add(candidate)
