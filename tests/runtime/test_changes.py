"""Schedule and shares change between two steps of a running job, and nothing in the result does."""

from __future__ import annotations

from dataclasses import replace

from rank_pool import RankPool
from training_cases import Case, differences, train_with_changes

from argosy.schedule import ScheduleKind, ScheduleSpec

CHANGES = [
    ScheduleSpec(kind=ScheduleKind.KFKB, k=3),
    (0, (1, 3)),
    ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE),
    (1, (3, 1)),
    ScheduleSpec(kind=ScheduleKind.GPIPE),
    ScheduleSpec(kind=ScheduleKind.EAGER, depth=(4, 2)),
]


def test_schedule_and_shares_change_without_a_restart(ranks: RankPool) -> None:
    case = Case(shares=((3, 1), (2, 2)), zero=3, clip=False)
    outcomes = ranks(4, train_with_changes, case, CHANGES)
    assert not differences(replace(case, steps=1 + len(CHANGES)), outcomes)
