"""The plans and clusters in the package are what they say, fit, and tell the story of the demo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli.bundled_plans import PLANS

import argosy
from argosy.cli.inputs import ScenarioInputs, load_scenario
from argosy.cluster.file import cluster_from_content, load_cluster
from argosy.plan.file import bundled_plans, dumps_plan, read_plan
from argosy.report.summary import Summary, summarise
from argosy.sim.simulate import simulate

FOLDER = Path(argosy.__file__).parent / "data" / "plans"


@pytest.mark.parametrize("name", PLANS)
def test_file_is_what_the_code_writes(name: str) -> None:
    text = dumps_plan(PLANS[name]())
    if os.environ.get("ARGOSY_UPDATE_GOLDEN"):
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
    assert (FOLDER / f"{name}.json").read_text(encoding="utf-8") == text


def test_all_files_come_from_the_code() -> None:
    assert bundled_plans() == sorted(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_embedded_cluster_is_the_bundled_one(name: str) -> None:
    plan = PLANS[name]()
    assert plan.cluster.hash == load_cluster(plan.cluster.name).hash
    assert cluster_from_content(plan.cluster.content).hash == plan.cluster.hash


@pytest.mark.parametrize("name", PLANS)
def test_plan_fits_memory(name: str) -> None:
    assert figures(name).fits


def test_larger_groups_hide_the_preempted_link_and_cost_memory() -> None:
    calm, preempted = [], []
    for k in (1, 2, 4):
        calm.append(figures("llama-3-8b-on-mixed-16", k=k, traces=["none"]))
        preempted.append(figures("llama-3-8b-on-mixed-16", k=k, until=100.0))
    assert all(summary.fits for summary in (*calm, *preempted))
    cost = [p.mean_seconds / c.mean_seconds - 1 for p, c in zip(preempted, calm, strict=True)]  # type: ignore[operator]
    assert cost[0] > 0.12
    assert cost[0] > 2 * max(cost[1:])
    memory = [max(device.peak_memory for device in summary.devices) for summary in calm]
    assert memory[0] < memory[1] < memory[2]


def figures(
    name: str, *, k: int | None = None, traces: list[str] | None = None, until: float | None = None
) -> Summary:
    scenario = load_scenario(read_plan(name), ScenarioInputs(k=k, trace=traces))
    plan, chain, cluster = scenario.plan, scenario.chain, scenario.cluster
    if until is None:
        timeline = simulate(plan, chain, cluster)
    else:
        timeline = simulate(plan, chain, cluster, iterations=1000, record=1, until=until)
    return summarise(plan, cluster, timeline)
