"""Captured programs in an ordinary loop have the losses of one process: last short batches."""

from __future__ import annotations

import re

import pytest
from runtime.loop_programs import loop_alone, loop_by_plan
from runtime.program_cases import plan_for
from runtime.rank_pool import RankPool

from argosy.plan.file import loads_plan

SHORT = [("train", 6), ("train", 4), ("train", 1), ("train", 6)]
"""The last batches leave ranks without samples."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("sum_loss", "replicas"),
        ("labels_that_do_not_count", "stages"),
        ("padded_lstm_with_last_state", "stages"),
        ("gradient_penalty", "saving"),
        ("experts_in_a_list", "saving"),
    ],
)
def test_a_short_batch_of_a_program_counts_its_own_samples(
    ranks: RankPool, name: str, way: str
) -> None:
    plan = plan_for(name, way) if way == "saving" else None
    count = 3 if plan is None else len(loads_plan(plan).devices)
    for kind, found in ranks(count, loop_by_plan, name, way, SHORT, plan):
        assert kind == "losses", found
        assert found == pytest.approx(loop_alone(name, SHORT), rel=1e-9)


def test_masks_of_a_short_batch_are_those_of_one_process(ranks: RankPool) -> None:
    (alone,) = ranks(1, loop_by_plan, "dropout", "alone", SHORT)
    for found in ranks(3, loop_by_plan, "dropout", "stages", SHORT):
        assert found[1] == pytest.approx(alone[1], rel=1e-9)


@pytest.mark.parametrize(("name", "way"), [("contrastive", "alone"), ("sum_loss", "group")])
def test_a_short_batch_is_refused_if_samples_mix_or_devices_share_operations(
    ranks: RankPool, name: str, way: str
) -> None:
    for kind, found in ranks(1 if way == "alone" else 3, loop_by_plan, name, way, SHORT):
        assert kind == "refused"
        assert re.search("mix samples, and programs on groups of devices, take whole", found)
