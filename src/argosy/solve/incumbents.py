"""The best plans that a search has judged so far, and those that it has closed on the judge's word alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from argosy.solve.candidate import Candidate, Key, neighbours, plan_key, shifted
from argosy.solve.frontier import Branch
from argosy.solve.judge import Complete, Judge
from argosy.solve.shape import Shape
from argosy.space.option import Option, Vector

_MOST = 32
_NEAR = 1.05
"""Times the best: neighbours that are worth remembering."""


class Incumbents:
    """Every plan is judged once; the best few are remembered."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.found: list[Candidate] = []
        """Best first."""
        self.known: dict[Key, float] = {}
        """Judged times."""
        self.suspects: dict[Key, float] = {}
        """Bounds of plans that are closed though the exact engine may find them faster than the judge."""

    @property
    def best(self) -> float:
        return self.found[0].seconds if self.found else math.inf

    def keep(self, shape: Shape, plans: Sequence[Complete], units: Vector, below: float = math.inf) -> None:
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
                    seconds=seconds, number=len(self.known), shape=shape, schedule=schedule, plan=plan, units=units
                )
                self.found.append(found)
        self.found.sort()
        del self.found[_MOST:]

    def settle(self, shape: Shape, plans: Sequence[Complete], units: Vector, bundle: int) -> None:
        """Judge plans whose cuts are so many layers apart (``solve.grid``), and then with cuts between: half as many
        layers move to another stage while that helps, then a quarter, and in the end single ones."""
        self.keep(shape, plans, units)
        for plan in plans if bundle > 1 else ():
            step = (bundle + 1) // 2
            while step:
                moved = list(shifted(plan, step))
                self.keep(shape, moved, units)
                best = min(moved, key=lambda one: self.known[plan_key(shape, one)], default=plan)
                if self.known[plan_key(shape, best)] < self.known[plan_key(shape, plan)] * (1 - 1e-9):
                    plan = best
                else:
                    step //= 2

    def improve(self, best: Candidate, options: Mapping[Vector, Sequence[Option]]) -> None:
        """Small moves from a plan while they help."""
        while True:
            self.keep(best.shape, list(neighbours(best.plan, options)), best.units, _NEAR * best.seconds)
            if self.found[0].seconds >= best.seconds * (1 - 1e-9) or self.found[0].shape is not best.shape:
                return
            best = self.found[0]

    def suspect(self, branch: Branch, plans: Sequence[tuple[float, Complete]]) -> None:
        """Remember the bounds of plans that have come out of a search, if the judge is no lower bound."""
        is_certain = branch.is_even and not self.judge.prices.model.blocking
        shape = branch.search.shape
        for bound, plan in plans:
            is_guessed = (shape, plan) in self.judge.guessed
            if not is_certain or is_guessed or any(choice.option.zero > 1 for choice in plan):
                key = plan_key(shape, plan)
                self.suspects[key] = min(bound, self.suspects.get(key, math.inf))

    def doubtful(self) -> Iterator[float]:
        """The bounds of the suspects that fit."""
        return (bound for key, bound in self.suspects.items() if self.known[key] < math.inf)
