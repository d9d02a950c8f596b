"""The best plans that a search has judged so far, and those that it has closed on the judge's word alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from argosy.solve.candidate import Candidate, neighbours
from argosy.solve.frontier import Branch
from argosy.solve.judge import Complete, Judge
from argosy.solve.shape import Shape
from argosy.space.option import Option, Vector

_MOST = 32
Key = tuple[object, ...]


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

    def keep(self, shape: Shape, plans: Sequence[Complete], units: Vector) -> None:
        """Judge plans and remember the best of them."""
        fresh = [plan for plan in plans if _key(shape, plan) not in self.known]
        if not fresh:
            return
        for plan, seconds, schedule in zip(fresh, *self.judge.seconds(shape, fresh), strict=True):
            self.known[_key(shape, plan)] = seconds
            if seconds < math.inf:
                found = Candidate(
                    seconds=seconds, number=len(self.known), shape=shape, schedule=schedule, plan=plan, units=units
                )
                self.found.append(found)
        self.found.sort()
        del self.found[_MOST:]

    def improve(self, best: Candidate, options: Mapping[Vector, Sequence[Option]]) -> None:
        """Small moves from a plan while they help."""
        while True:
            self.keep(best.shape, list(neighbours(best.plan, options)), best.units)
            if self.found[0].seconds >= best.seconds * (1 - 1e-9) or self.found[0].shape is not best.shape:
                return
            best = self.found[0]

    def suspect(self, branch: Branch, plans: Sequence[tuple[float, Complete]]) -> None:
        """Remember the bounds of plans that have come out of a search, where the judge is no lower bound."""
        is_certain = branch.is_even and not self.judge.prices.model.blocking
        for bound, plan in plans:
            if not is_certain or any(choice.option.zero > 1 for choice in plan):
                key = _key(branch.search.shape, plan)
                self.suspects[key] = min(bound, self.suspects.get(key, math.inf))

    def doubtful(self) -> Iterator[float]:
        """The bounds of the suspects that fit."""
        return (bound for key, bound in self.suspects.items() if self.known[key] < math.inf)


def _key(shape: Shape, plan: Complete) -> Key:
    return (shape, *((c.option.parts, c.option.recompute, c.option.zero, c.first, c.end) for c in plan))
