"""What ``find_plan`` returns is complete: the command that shows a plan adds nothing to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from argosy.choose.money import find_front
from argosy.choose.robust import find_robust_plan
from argosy.cli import main
from argosy.cluster.file import load_cluster
from argosy.cost.calibration import Calibration
from argosy.cost.remembered import remembered
from argosy.explain import explain_plan
from argosy.plan.file import load_plan
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan, kept_plans
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.load import load_model

INTERLEAVED = ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2)
SETTINGS = {
    "level 1": Settings(),
    "level 2": Settings(level=2, time_budget=2.0),
    "even shares": Settings(even_shares=True),
    "interleaved": Settings(schedules=(INTERLEAVED,)),
}


def check_complete(plan: Plan) -> None:
    assert plan.predicted is not None
    held = dict(plan.predicted.peak_memory_bytes)
    assert set(held) == set(plan.devices)
    assert all(amount > 0 for amount in held.values())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_plan_has_memory_bottleneck_and_cost_model(settings: Settings) -> None:
    chain, cluster = load_model("gpt2-xl", dtype="fp16"), load_cluster("two-cards")
    plan = find_plan(chain, cluster, global_batch=16, settings=settings)
    check_complete(plan)
    explanation = explain_plan(plan, chain, cluster)
    assert plan.predicted is not None and plan.certificate is not None
    assert plan.predicted.bottleneck == f"stage {explanation.bottleneck.stage}"
    assert plan.predicted.iteration_seconds == pytest.approx(explanation.seconds, rel=1e-9)
    assert plan.certificate.cost_model == "default cost model"


def test_a_level_2_search_leaves_its_history_and_still_reports_progress() -> None:
    seen: list[float] = []
    settings = Settings(level=2, time_budget=2.0, progress=lambda state: seen.append(state.bound))
    plan = find_plan(
        load_model("gpt2-xl", dtype="fp16"),
        load_cluster("two-cards"),
        global_batch=16,
        settings=settings,
    )
    assert plan.search is not None and plan.search.history
    assert seen and {bound for _, _, bound in plan.search.history} <= set(seen)


def test_the_command_writes_the_plan_as_it_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = (
        "plan",
        "-m",
        "gpt2-xl",
        "-c",
        "two-cards",
        "-b",
        "16",
        "--dtype",
        "fp16",
        "-q",
        "-o",
        "plan.json",
    )
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 0
    found = find_plan(
        load_model("gpt2-xl", dtype="fp16"), load_cluster("two-cards"), global_batch=16
    )
    assert without_clock(load_plan("plan.json")) == without_clock(found)


def without_clock(plan: Plan) -> Plan:
    assert plan.search is not None
    return replace(plan, search=replace(plan.search, cpu_seconds=0.0, history=()))


def test_plans_for_scenarios_and_for_money_are_complete_and_remember_a_calibration() -> None:
    calibration = Calibration(bandwidth=0.5, forward_peak=0.3, activation_factor=1.2)
    chain = calibration.chain(load_model("gpt2-xl", dtype="fp16"))
    cluster, model = calibration.cluster(load_cluster("two-cards")), calibration.compute_model()
    choice = find_robust_plan(chain, cluster, [cluster], global_batch=16, model=model)
    check_complete(choice.plan)
    kept = kept_plans(chain, cluster, global_batch=16, settings=Settings(), model=model)
    priced = replace(
        cluster, devices=tuple(replace(device, price_per_hour=1.0) for device in cluster.devices)
    )
    front = [point.plan for point in find_front(chain, priced, global_batch=16, model=model)]
    for plan in front:
        check_complete(plan)
    for plan in (choice.plan, *kept, *front):
        assert remembered(plan).calibration == calibration
