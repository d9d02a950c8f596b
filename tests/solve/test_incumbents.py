"""Which times the incumbents of a search have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from argosy.planner import SCHEDULES
from argosy.solve.finalists.candidate import Candidate
from argosy.solve.finalists.incumbents import Incumbents
from argosy.solve.finalists.judge import Judge
from argosy.solve.finalists.verdict import ExactTrial
from argosy.solve.search.shape import Shape


class Trial:
    """A trial in which the first plan looks faster than it is if it is folded."""

    def seconds(self, candidates: Sequence[Candidate]) -> list[float]:
        return [1.0 if candidate.number == 1 else 2.0 for candidate in candidates]

    def exact_seconds(
        self, candidates: Sequence[Candidate], *, is_recorded: bool = True
    ) -> list[float]:
        return [3.0 if candidate.number == 1 else 2.0 for candidate in candidates]


def test_a_plan_that_only_looks_faster_when_folded_is_not_the_best_of_a_proof() -> None:
    incumbents = Incumbents(cast(Judge, None), cast(ExactTrial, Trial()))
    shape = Shape(num_micro_batches=1, micro_batch_size=1, schedules=SCHEDULES)
    for number in (1, 2):
        candidate = Candidate(
            seconds=0.0,
            number=number,
            shape=shape,
            schedule=SCHEDULES[0],
            plan=(),
            units=(1,),
        )
        incumbents.add(candidate)
    assert incumbents.best == 1.0
    incumbents.stop_folding()
    incumbents.confirm()
    assert (incumbents.best, incumbents.found[0].number) == (2.0, 2)
