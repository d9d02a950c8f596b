"""Members of tensor-parallel groups have speeds of their own: the slow one is found, who waits for
it is not slow."""

from __future__ import annotations

import pytest
from runtime.group_cases import (
    adapt_shares,
    chain,
    cluster,
    compute_model,
    group_and_one,
    timeline_of,
    train_alone,
    two_groups,
)
from runtime.rank_pool import RankPool

from argosy.adapt.recorded import seen_in
from argosy.plan.plan import Plan
from argosy.timeline.file import loads_timeline

SLOWER = 3.0
NEAR, LEAST = 0.15, 0.65
"""How far the slow one's speed may be off, and what others have at least: what a rank does beside
its naps is in it, some milliseconds of each micro-batch and more on busy cores. With what they wait
they would have 0.55 at most."""

pytestmark = pytest.mark.flaky(reruns=4)  # it measures real time


@pytest.mark.parametrize("plan", [group_and_one(), two_groups(zero=3)], ids=["beside-one", "zero3"])
def test_a_slow_member_is_told_from_those_that_wait_for_it(ranks: RankPool, plan: Plan) -> None:
    timeline = loads_timeline(ranks(len(plan.devices), timeline_of, plan, {1: SLOWER}, 3)[0])
    seen = seen_in(timeline, plan, chain(), cluster(), compute_model())
    assert seen.speeds.keys() == set(plan.devices)
    assert seen.speeds.pop("a0.1") == pytest.approx(1 / SLOWER, rel=NEAR)
    assert all(LEAST < speed < 1.01 for speed in seen.speeds.values()), "who waits is not slow"


def test_shares_follow_a_group_whose_member_is_slow(ranks: RankPool) -> None:
    steps = 6
    [(losses, events), *_] = ranks(4, adapt_shares, two_groups(zero=0), {2: SLOWER}, steps)
    assert losses == pytest.approx(train_alone(steps), abs=1e-7)
    decided = next(event for event in events if event["event"] == "decision")
    assert decided["what"] == "shares"
    assert decided["stages"][0]["samples"] == {"a0.0": 3, "a0.2": 1}
    assert decided["speeds"].pop("a0.2") == pytest.approx(1 / SLOWER, rel=NEAR)
    assert all(speed > LEAST for speed in decided["speeds"].values()), "who waits is not slow"
