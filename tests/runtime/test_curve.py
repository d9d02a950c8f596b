"""A small GPT learns real text along the same curve under a plan as in one process."""

from __future__ import annotations

import pytest
from runtime.rank_pool import RankPool
from runtime.text_case import CASE, curve_alone, curve_by_plan


def test_fifty_steps_follow_the_curve_of_one_process(ranks: RankPool) -> None:
    alone = curve_alone()
    for curve in ranks(CASE.num_ranks, curve_by_plan):
        assert curve == pytest.approx(alone, rel=1e-3)
    assert alone[-1] < 0.75 * alone[0], "it learns"
