"""What the runtime executes: the table, and the sentences about what it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.cluster.host import Tier
from argosy.plan.file import load_plan
from argosy.plan.offload import Offload
from argosy.plan.plan import Plan, PolicyRule, Recompute, Replica
from argosy.plan.runnable import SplitLimits, splits_after, unsupported
from argosy.schedule import ScheduleKind, ScheduleSpec


@pytest.fixture(scope="module")
def plain() -> Plan:
    """Stages of single devices."""
    plan = load_plan("llama-3-8b-on-mixed-16")
    stages = [replace(stage, recompute=Recompute.NONE, zero=0) for stage in plan.stages]
    return replace(plan, stages=tuple(stages))


def test_every_schedule_runs(plain: Plan) -> None:
    for kind in ScheduleKind:
        assert unsupported(replace(plain, schedule=ScheduleSpec(kind=kind, k=3))) == ()


@pytest.mark.parametrize(
    "runs", [*({"zero": level} for level in range(4)), *({"recompute": what} for what in Recompute)]
)
def test_settings_that_run(plain: Plan, runs: dict[str, object]) -> None:
    assert (
        unsupported(replace(plain, stages=tuple(replace(stage, **runs) for stage in plain.stages)))
        == ()
    )  # type: ignore[arg-type]


def test_groups_run_and_runs_that_have_them_may_get_others(plain: Plan) -> None:
    groups = tuple(
        Replica(devices=(f"a0.{at}", f"a0.{at + 1}"), samples=4, ratios=(0.7, 0.3)) for at in (0, 2)
    )
    plan = replace(
        plain, stages=(plain.stages[0], replace(plain.stages[1], replicas=groups, zero=3))
    )
    assert unsupported(plan) == ()
    four = Replica(devices=tuple(f"a0.{at}" for at in range(4)), samples=8)
    parts = replace(plain.stages[1], replicas=(four,), context=2)
    assert unsupported(replace(plain, stages=(plain.stages[0], parts, *plain.stages[2:]))) == ()
    assert splits_after(plan) == SplitLimits(width=None)
    assert splits_after(replace(plain, model=replace(plain.model, content="{}"))).width is None
    assert splits_after(plain) == splits_after(plan, is_compiled=True) == SplitLimits()


def test_runs_that_share_sequences_or_experts_may_go_on_sharing_them(plain: Plan) -> None:
    first, second, *_ = plain.stages
    parts = replace(second, replicas=(Replica(devices=("a0.0", "a0.1"), samples=8),), context=2)
    alone = tuple(Replica(devices=(f"a0.{at}",), samples=4) for at in range(2))
    experts = replace(second, replicas=alone, expert=2)
    plan = replace(plain, stages=(first, parts))
    assert splits_after(plan) == SplitLimits(width=None, context=len(plan.devices))
    assert splits_after(replace(plain, stages=(first, experts))) == SplitLimits(expert=None)


def test_experts_are_shared_by_groups_by_parts_and_beside_them(plain: Plan) -> None:
    first, second, *rest = plain.stages
    groups = tuple(
        Replica(devices=(f"a0.{at}", f"a0.{at + 1}"), samples=4, ratios=(0.7, 0.3)) for at in (0, 2)
    )
    alone = tuple(Replica(devices=(f"a0.{at}",), samples=4) for at in range(4, 6))
    for changes in (
        {"replicas": groups, "expert": 2},
        {"replicas": groups, "context": 2, "expert": 4},
        {"replicas": alone, "expert": 2},
    ):
        stages = (replace(first, replicas=groups[:1]), replace(second, **changes), *rest)  # type: ignore[arg-type]
        assert unsupported(replace(plain, stages=stages)) == ()


def test_a_sentence_names_stage_and_feature(plain: Plan) -> None:
    stages = (plain.stages[0], replace(plain.stages[1], offload=Offload(weights=Tier.HOST)))
    assert unsupported(replace(plain, stages=(*stages, *plain.stages[2:]))) == (
        "Stage 1 asks for offload of weights, and the runtime executes only nothing, optimizer, "
        "activations and optimizer,activations.",
    )


def test_policies_keep_to_schedules_of_as_many_stages_per_worker(plain: Plan) -> None:
    woven, other = (
        ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2),
        ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
    )
    rule = PolicyRule(edge="v0.nic", below=1e9, schedule=woven)
    plan = replace(plain, schedule=other, policy=(replace(rule, schedule=ScheduleSpec()), rule))
    assert unsupported(plan) == (
        "Rule 1 of the policy switches from kfkb to interleaved below 1 GB/s on v0.nic, and the runtime switches "
        "between others only.",
    )
