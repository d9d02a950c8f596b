"""Captured programs in an ordinary loop have the losses of one process: last short batches, and
evaluations in eval mode."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from runtime.loop_programs import loop_alone, loop_by_plan
from runtime.program_cases import plan_for, plan_of
from runtime.rank_pool import RankPool

from argosy.plan.file import dumps_plan, loads_plan
from argosy.plan.plan import Replica
from argosy.runtime.step.batch import check_as_captured

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


def test_a_short_batch_has_the_shapes_of_the_captured_samples() -> None:
    batch = {"x": torch.zeros(4, 5), "y": torch.zeros(4)}
    check_as_captured({"x": torch.zeros(2, 5), "y": torch.zeros(2)}, batch)


EVALUATED = [("evaluate", 6), ("train", 6), ("evaluate", 4), ("train", 6), ("evaluate", 6)]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("padded_lstm_with_last_state", "replicas"),
        ("experts_in_a_list", "saving"),
        ("images_with_batch_norm", "pipeline"),
    ],
)
def test_a_program_is_evaluated_as_in_one_process(ranks: RankPool, name: str, way: str) -> None:
    """Batch norm has its running statistics, and takes a short batch then."""
    plan = plan_for(name, way) if way == "saving" else pipeline(name) if way == "pipeline" else None
    count = 3 if plan is None else len(loads_plan(plan).devices)
    for kind, found in ranks(count, loop_by_plan, name, way, EVALUATED, plan):
        assert kind == "losses", found
        assert found == pytest.approx(loop_alone(name, EVALUATED), rel=1e-9)


def pipeline(name: str) -> str:
    """Two stages for the whole batch."""
    plan = plan_of(name, "stages")
    stages = [
        replace(stage, replicas=(Replica(devices=(f"n0.{at}",), samples=6),))
        for at, stage in enumerate(plan.stages)
    ]
    return dumps_plan(replace(plan, stages=tuple(stages), micro_batch_size=6, num_micro_batches=1))


@pytest.mark.parametrize("way", ["stages", "saving"])
def test_a_program_is_evaluated_without_dropout(ranks: RankPool, way: str) -> None:
    """Its weights are those of one process only before the first step."""
    plan = plan_for("dropout", way) if way == "saving" else None
    for _, found in ranks(3, loop_by_plan, "dropout", way, EVALUATED, plan):
        assert found[0] == pytest.approx(loop_alone("dropout", EVALUATED)[0], rel=1e-9)
        assert found[1] != pytest.approx(found[0], rel=1e-3), "dropout is back"


@pytest.mark.parametrize(
    ("name", "way", "message"),
    [
        ("teacher_of_averages", "stages", "a buffer that changes in eval mode"),
        ("dropout", "group", "found random numbers, expected .* for groups of devices"),
    ],
)
def test_a_program_that_cannot_be_evaluated_is_refused(
    ranks: RankPool, name: str, way: str, message: str
) -> None:
    for kind, found in ranks(3, loop_by_plan, name, way, [("evaluate", 6)]):
        assert kind == "refused"
        assert re.search(message, found)
