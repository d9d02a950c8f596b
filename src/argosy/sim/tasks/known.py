"""Keep what plans on one cluster have in common, so that it is found once for all of them.

The plans that a search compares differ in few stages: most have replicas that a plan before them
had, too. On thousands of devices, listing who sends to whom takes longer than everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, cast

from argosy.plan.plan import Replica
from argosy.space.place import PlacedStages

# After this many facts, those known so far are dropped.
_MOST = 4096
_Fact = TypeVar("_Fact")


class Known:
    """A cache that holds facts about the replicas of stages.

    Replicas are those of an earlier plan if they are the same object (``space.place`` returns it
    again), because hashing thousands of devices takes as long as finding a fact.
    """

    def __init__(self) -> None:
        self._facts: dict[Hashable, tuple[Sequence[tuple[Replica, ...]], object]] = {}
        """Facts, with the replicas: as long as these are kept, no others have their ids."""
        self.placed: PlacedStages = {}
        """Replicas of stages, for ``space.place``."""

    def of(
        self,
        replicas: Sequence[tuple[Replica, ...]],
        what: Hashable,
        find: Callable[[], _Fact],
    ) -> _Fact:
        """Return a fact about replicas, which ``find`` returns if it is not known yet."""
        key = (what, *map(id, replicas))
        if key not in self._facts:
            if len(self._facts) >= _MOST:
                self._facts.clear()
                self.placed.clear()
            self._facts[key] = (replicas, find())
        return cast(_Fact, self._facts[key][1])
