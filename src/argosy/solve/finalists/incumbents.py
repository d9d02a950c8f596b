"""Keep the best plans that a search has found so far, and plans whose bounds are still in doubt."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import replace

from argosy.solve.finalists.candidate import Candidate, diverse, neighbours, reshaped, shifted
from argosy.solve.finalists.judge import SAME, Complete, Judge, Key, plan_key
from argosy.solve.finalists.verdict import ExactTrial
from argosy.solve.search.shape import Shape
from argosy.space.enumerate import Scope
from argosy.space.option import Option, Vector

# At most this many plans are kept, the fastest ones.
_MOST = 32
# Neighbours that the judge finds slower than this factor times the best plan are dropped.
# This many plans are tried with micro-batches of all other sizes.
_RESHAPED = 16
_NEAR = 1.05


class Incumbents:
    """A list of the best few plans; every plan is judged once, and the exact engine simulates those
    that matter."""

    def __init__(self, judge: Judge, trial: ExactTrial, ceiling: float = math.inf) -> None:
        self.judge = judge
        self.trial = trial
        self.ceiling = ceiling
        """Seconds of a plan from elsewhere: slower plans are useless."""
        self.found: list[Candidate] = []
        """Incumbents, the best first."""
        self.known: dict[Key, float] = {}
        """Judged seconds of all plans."""
        self.suspects: list[tuple[float, int, Candidate]] = []
        """A heap of (bound, number, plan) with complete plans that a search has returned and that
        were not simulated."""
        self.cleared = math.inf
        """The least time of those that were simulated."""
        self.is_exact = False
        """Whether small plans are simulated as a whole, not folded along their symmetries."""

    @property
    def best(self) -> float:
        return min(self.ceiling, self.found[0].seconds) if self.found else self.ceiling

    def likely(self, most: float) -> list[Candidate]:
        """Return the plans that were played, and others within ``most`` times the best that the
        judge tells from it."""
        ratios = [incumbent.seconds / self.best for incumbent in self.found]
        is_near = [ratio <= most and abs(ratio - 1) > SAME for ratio in ratios]
        return [
            incumbent
            for incumbent, near in zip(self.found, is_near, strict=True)
            if incumbent.is_played or near
        ]

    def confirm(self, most: float = math.inf) -> None:
        """Simulate the best plan until the best one is a simulated one.

        After ``most`` plans that turn out slower than judged, the others are dropped, and so are
        plans as fast as the first simulated one.
        """
        plays = 0
        while self.found and not self.found[0].is_played:
            candidate = self.found.pop(0)
            played = next((incumbent for incumbent in self.found if incumbent.is_played), None)
            is_tie = (
                played is not None
                and most < math.inf
                and candidate.seconds >= played.seconds * (1 - SAME)
            )
            if played is None or (plays < most and not is_tie):
                self.add(candidate)
            plays += 1

    def stop_folding(self) -> None:
        """Simulate small plans as a whole from now on, also those that are known already.

        Folded transfers do not always share a slow line as the single ones do, so that plans may
        look faster than they are.
        """
        self.is_exact = True
        self.found = [replace(incumbent, is_played=False) for incumbent in self.found]

    def add(self, candidate: Candidate) -> None:
        """Add a plan with its simulated time."""
        if self.is_exact:
            (seconds,) = self.trial.exact_seconds([candidate], is_recorded=False)
        else:
            (seconds,) = self.trial.seconds([candidate])
        insort(self.found, replace(candidate, seconds=seconds, is_played=True))
        del self.found[_MOST:]

    def keep(
        self, shape: Shape, plans: Sequence[Complete], units: Vector, below: float = math.inf
    ) -> None:
        """Judge plans and add the best of them, if they are faster than ``below`` seconds."""
        fresh = {key: plan for plan in plans if (key := plan_key(shape, plan)) not in self.known}
        if not fresh:
            return
        judged = self.judge.seconds(shape, list(fresh.values()), below=below, best=self.best)
        for (key, plan), seconds, schedule in zip(fresh.items(), *judged, strict=True):
            if seconds < math.inf or below == math.inf:
                self.known[key] = seconds
            if seconds < math.inf:
                candidate = Candidate(
                    seconds=seconds,
                    number=len(self.known),
                    shape=shape,
                    schedule=schedule,
                    plan=plan,
                    units=units,
                )
                self.found.append(candidate)
        self.found.sort()
        del self.found[_MOST:]

    def settle(self, shape: Shape, plans: Sequence[Complete], units: Vector, bundle: int) -> None:
        """Judge plans whose cuts are ``bundle`` layers apart (``solve.search.grid``), then variants
        with cuts between.

        Half as many layers move to another stage while that helps, then a quarter, and finally
        single layers.
        """
        self.keep(shape, plans, units)
        for plan in plans if bundle > 1 else ():
            step = (bundle + 1) // 2
            while step:
                moved = list(shifted(plan, step))
                self.keep(shape, moved, units)
                best = min(
                    moved, key=lambda variant: self.known[plan_key(shape, variant)], default=plan
                )
                if self.known[plan_key(shape, best)] < self.known[plan_key(shape, plan)] * (
                    1 - 1e-9
                ):
                    plan = best
                else:
                    step //= 2

    def improve(self, best: Candidate, options: Mapping[Vector, Sequence[Option]]) -> None:
        """Make small moves from a plan while they help."""
        while True:
            known = len(self.known)
            self.keep(
                best.shape, list(neighbours(best.plan, options)), best.units, _NEAR * best.seconds
            )
            fresh = [
                candidate
                for candidate in self.found
                if candidate.number > known and candidate.shape is best.shape
            ]
            if not fresh or fresh[0].seconds >= best.seconds * (1 - 1e-9):
                return
            best = fresh[0]

    def reshape(self, shapes: Sequence[Shape], scope: Scope) -> None:
        """Judge the best plans with micro-batches of all other sizes: in their own shapes the
        bounds may lead to other plans."""
        for candidate in diverse(self.found, _RESHAPED):
            for shape in shapes:
                plan = reshaped(candidate, shape, scope)
                if plan is not None:
                    self.keep(shape, [plan], candidate.units)

    def suspect(self, shape: Shape, plans: Sequence[tuple[float, Complete]], units: Vector) -> None:
        """Add complete plans that a search of one schedule has returned, with their bounds; the
        judge alone closes none."""
        (schedule,) = shape.schedules
        for bound, plan in plans:
            if self.known[plan_key(shape, plan)] < math.inf:
                candidate = Candidate(
                    seconds=bound, number=0, shape=shape, schedule=schedule, plan=plan, units=units
                )
                heapq.heappush(self.suspects, (bound, len(self.suspects), candidate))

    @property
    def least_open_suspect(self) -> float:
        """Return a lower bound on the plans that a search has returned and that were not
        simulated."""
        return self.suspects[0][0] if self.suspects else math.inf

    @property
    def least_suspect(self) -> float:
        """Return a lower bound on all plans that a search has returned."""
        return min(self.cleared, self.least_open_suspect)

    def clear_suspect(self) -> None:
        """Simulate the suspect with the least bound: then its time is certain."""
        *_, candidate = heapq.heappop(self.suspects)
        (seconds,) = self.trial.exact_seconds([candidate], is_recorded=False)
        self.cleared = min(self.cleared, seconds)
        self.add(candidate)
