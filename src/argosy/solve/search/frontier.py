"""Keep the sub-problems that a search has left open, and split a sub-problem when it is next.

A shape is first bounded as a whole: all its schedules at once, all kinds of plans. Only if that
bound is the least of all is it split, by schedule and by kind (``solve.search.kinds``). If weights
are tied, such a part is split again by its last stages (``solve.search.tied``). Each part has
tighter bounds, and together they hold the same plans.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from argosy.schedule import ScheduleSpec
from argosy.solve.search.menu import Menu
from argosy.solve.search.pipeline import Choice, PlanSearch
from argosy.solve.search.shape import gate
from argosy.space.option import Vector

# One branch is searched for this many steps before the branch with the least bound is looked up
# again.
_STEPS = 64


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A search that covers a part of the space."""

    search: PlanSearch
    counts: Vector
    most_stages: int
    spans: bool = False
    """Whether all its plans have a tensor-parallel group across nodes."""
    is_whole: bool = True
    """Whether it has not been split by schedule and kind yet."""

    @property
    def bound(self) -> float:
        return self.search.bound

    def split(self, upper: float, slack: float | None) -> list[Branch]:
        """Return searches that hold the same plans below ``upper``; an empty list if splitting is
        not worth it."""
        if self.is_whole:
            parts = self._by_kind()
        else:
            parts = self.search.menu.by_last_site() if self.search.apart is not None else iter(())
        searches = (
            PlanSearch(menu, self.counts, self.most_stages, upper, slack=slack) for menu in parts
        )
        return [replace(self, search=search, is_whole=False) for search in searches]

    def advance(
        self, upper: float, goal: float
    ) -> tuple[list[tuple[float, tuple[Choice, ...]]], list[tuple[Choice, ...]]]:
        """Return the complete plans below ``upper`` that the next steps produce, with their bounds,
        and these and one that the next node leads to."""
        plans = self.search.advance(upper, goal, _STEPS)
        dived = self.search.dive(upper)
        return plans, [plan for _, plan in plans] + ([dived] if dived else [])

    def _by_kind(self) -> Iterator[Menu]:
        shape = self.search.shape
        by_gate: dict[float, list[ScheduleSpec]] = defaultdict(list)
        for schedule in shape.schedules:
            by_gate[gate(schedule)].append(schedule)
        for schedules in by_gate.values():
            menu = self.search.menu.under(replace(shape, schedules=tuple(schedules)))
            for part, schedule in itertools.product(menu.by_kind(), schedules):
                yield part.under(replace(shape, schedules=(schedule,)))
