"""Which parts of a sequence and of experts make sense, and what is said about the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.cluster.file import cluster_from_content
from argosy.errors import InputError
from argosy.plan.check import _differ, check_plan
from argosy.plan.file import dumps_plan, load_plan, loads_plan
from argosy.plan.plan import Plan, Replica, Stage
from argosy.workload.load import load_model


def plan_with(model: str, *, devices: int, length: int = 2048, **stage: object) -> Plan:
    """All layers in one stage on two cards, of which some count several times: only widths are
    asked about here."""
    plan = load_plan("gpt2-xl-on-two-cards")
    names = [device.name for device in cluster_from_content(plan.cluster.content).devices]
    replicas = (Replica(devices=tuple(names[:devices]), samples=plan.micro_batch_size),)
    layers = len(load_model(model).layers)
    settings = {"first": 0, "end": layers, "replicas": replicas, **stage}
    schedule = replace(plan.schedule, depth=None)
    named = replace(plan.model, name=model, sequence_length=length)
    return replace(plan, model=named, schedule=schedule, stages=(Stage(**settings),), left_out=())


def problems_of(plan: Plan) -> list[str]:
    chain = load_model(plan.model.name, sequence_length=plan.model.sequence_length)
    try:
        check_plan(plan, chain, cluster_from_content(plan.cluster.content))
    except InputError as error:
        return [str(problem) for problem in error.problems]
    return []


def pair(**one: object) -> tuple[Replica, ...]:
    plan = load_plan("gpt2-xl-on-two-cards")
    names = [device.name for device in cluster_from_content(plan.cluster.content).devices]
    half = plan.micro_batch_size // 2
    first = {"devices": (names[0],), "samples": half, **one}
    return Replica(**first), Replica(
        devices=(names[1],), samples=plan.micro_batch_size - first["samples"]
    )


def test_what_fits_passes_and_survives_a_file() -> None:
    plan = plan_with("llama-3-8b", devices=2, context=2)
    assert problems_of(plan) == []
    assert loads_plan(dumps_plan(plan)) == plan
    assert problems_of(plan_with("mixtral-8x7b", devices=2, context=2, expert=2)) == []
    assert problems_of(plan_with("mixtral-8x7b", devices=1, replicas=pair(), expert=2)) == []


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (
            plan_with("llama-3-8b", devices=2, length=2050, context=2),
            "stages[0].context: found 2, expected a number whose double divides the sequence length 2050",
        ),
        (
            plan_with("vit-base", devices=2, length=197, context=2),
            "stages[0].context: found 2, expected a number whose double divides the sequence length 197",
        ),
        (
            plan_with("llama-3-8b", devices=2, length=2, context=2),
            "stages[0].context: found 2, expected at most 1, the most parts that layers 0..33 allow",
        ),
        (
            plan_with("llama-3-8b", devices=1, context=2),
            "stages[0].replicas[0].devices: found 1 devices, expected a multiple of the 2 parts of the sequence",
        ),
        (
            plan_with("llama-3-8b", devices=1, expert=2, replicas=pair()),
            "stages[0].expert: found 2, expected 1, because layers 0..33 have no experts",
        ),
        (
            plan_with("mixtral-8x7b", devices=1, expert=3),
            "stages[0].expert: found 3, expected a divisor of the 8 experts of a layer",
        ),
        (
            plan_with("mixtral-8x7b", devices=2, expert=2),
            "stages[0].expert: found 2, expected a divisor of the 1 holders of the stage's weights",
        ),
        (
            plan_with("mixtral-8x7b", devices=1, expert=2, replicas=pair(), experts=(4, 3)),
            "stages[0].experts: found 7 experts, expected the 8 experts of every layer",
        ),
        (
            plan_with("mixtral-8x7b", devices=1, expert=2, replicas=pair(), experts=(4, 3, 1)),
            "stages[0].experts: found 3 numbers, expected one for each of 2 holders",
        ),
        (
            plan_with("mixtral-8x7b", devices=2, context=2, expert=2, experts=(5, 3)),
            "stages[0].experts: found replicas of several devices, expected replicas of one device each",
        ),
    ],
)
def test_what_does_not_fit_is_named(plan: Plan, problem: str) -> None:
    assert problem in problems_of(plan)


def test_parts_may_be_uneven_of_any_length_and_survive_a_file() -> None:
    plan = plan_with("llama-3-8b", devices=2, length=2051, context=2)
    (stage,) = plan.stages
    uneven = replace(stage, replicas=(replace(stage.replicas[0], ratios=(0.75, 0.25)),))
    plan = replace(plan, stages=(uneven,))
    assert problems_of(plan) == []
    assert loads_plan(dumps_plan(plan)) == plan


def test_experts_may_be_uneven_and_survive_a_file() -> None:
    plan = plan_with("mixtral-8x7b", devices=1, expert=2, replicas=pair(samples=1), experts=(5, 3))
    assert problems_of(plan) == []
    assert loads_plan(dumps_plan(plan)) == plan


def test_groups_share_all_parts_in_the_same_ratios() -> None:
    assert not _differ((0.4, 0.2, 0.2, 0.1, 0.08, 0.04), 2)
    assert _differ((0.4, 0.2, 0.2, 0.2), 2)
    assert _differ((1.0, 0.0), 1), "a part without tokens"
