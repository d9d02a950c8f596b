"""A job on real processes notices that a device has slowed down, and does what its reach allows,
without a trace in what it trains."""

from __future__ import annotations

import pytest
from runtime.adapting_cases import (
    Slowing,
    pipeline,
    share_and_adapt,
    side_by_side,
    train_alone,
    train_and_adapt,
)
from runtime.rank_pool import RankPool

STEPS = 16
SLOW = Slowing(rank=1, step=5, factor=3.0)

REAL_TIME = pytest.mark.flaky(reruns=4)


@REAL_TIME
def test_work_moves_away_from_a_device_that_slows_down(ranks: RankPool) -> None:
    [(losses, events, seconds), _] = ranks(2, train_and_adapt, pipeline(), "full", SLOW, STEPS)
    assert losses == pytest.approx(train_alone(STEPS), abs=1e-7)
    decided = [event for event in events if event["event"] == "decision"]
    assert any(event.get("moved_bytes") for event in decided), events
    answer = next(event for event in decided if event["step"] >= SLOW.step)
    assert answer["step"] <= SLOW.step + 4
    assert answer["speeds"]["b0.0"] == pytest.approx(1 / SLOW.factor, rel=0.15)
    assert answer["predicted_after"] < answer["predicted_before"]
    assert sum(seconds[-3:]) < 0.9 * sum(seconds[SLOW.step + 1 : SLOW.step + 4])
    assert any(event["event"] == "outcome" and event["measured_after"] > 0 for event in events)


@REAL_TIME
def test_shares_follow_a_device_that_slows_down(ranks: RankPool) -> None:
    [(losses, events, _), _] = ranks(2, train_and_adapt, side_by_side(), "shares", SLOW, STEPS)
    assert losses == pytest.approx(train_alone(STEPS), abs=1e-7)
    [decided] = [event for event in events if event["event"] == "decision"]
    assert decided["what"] == "shares"
    assert decided["stages"][0]["samples"] == {"a0.0": 3, "b0.0": 1}
    assert decided["predicted_after"] < decided["predicted_before"]


@pytest.mark.parametrize("model", ["llama", "mixture"])
def test_a_run_that_shares_a_sequence_or_experts_is_planned_again_with_unequal_parts(
    ranks: RankPool, model: str
) -> None:
    [(losses, alone, events, plan), _] = ranks(2, share_and_adapt, model, 8)
    assert losses == pytest.approx(alone, rel=1e-9)
    full = [event["event"] for event in events if event["what"] == "full"]
    assert full and set(full) <= {"decision", "outcome"}, events
    (stage,) = plan.stages
    if model == "llama":
        assert stage.context == 2
        assert stage.replicas[0].shares[0] > 0.55
    else:
        assert stage.expert == 2
        assert stage.experts[0] > stage.experts[1]
