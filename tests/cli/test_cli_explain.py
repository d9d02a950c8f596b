"""``argosy explain`` and what ``argosy demo`` makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli.command_result import PLAN, Run

from argosy.plan.file import dumps_plan, load_plan, plan_from_document, read_plan
from argosy.plan.plan import LeftOut, Replica, RunnerUp

PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")


@pytest.fixture
def small_cards_left_out(tmp_path: Path) -> str:
    """A plan file in which one of two large cards and the small ones have nothing to do."""
    plan = plan_from_document(read_plan("gpt2-xl-on-two-cards"))
    stage = replace(plan.stages[0], end=50, replicas=(Replica(devices=("box0.0",), samples=4),))
    runner_up = RunnerUp(
        description="2 stages, 1f1b", iteration_seconds=9.5, reason="its pipeline is never full"
    )
    left = [LeftOut(device=f"box0.{index}", reason="nobody asked for it") for index in (1, 2, 3)]
    plan = replace(plan, stages=(stage,), runner_ups=(runner_up,), left_out=tuple(left))
    path = tmp_path / "left.json"
    path.write_text(dumps_plan(plan))
    return str(path)


def test_prints_memory_bottleneck_and_what_would_help_within_80_columns(run: Run) -> None:
    result = run("explain", PLAN, "-q")
    assert result.code == 0
    assert result.err == ""
    assert max(map(len, result.out.splitlines())) <= 80
    assert "\x1b" not in result.out
    for text in (
        "stage  layers",
        "bottleneck     stage 2: it computes for",
        "busiest link",
        "critical path",
    ):
        assert text in result.out
    assert (
        "device  weights  gradients  optimizer  activations  buffers  peak  of  free" in result.out
    )
    assert "1 GB/s more on v0.nic" in result.out
    assert "More memory buys this plan nothing" in result.out


def test_json_adds_up(run: Run) -> None:
    document = json.loads(run("explain", PLAN, "--json", "-q").out)
    assert document["version"] == 1
    assert document["command"] == "explain"
    assert list(document) == sorted(document)
    simulated = json.loads(run("simulate", PLAN, "--json", "-q").out)
    assert [document["iteration_seconds"]] == simulated["iterations"]["seconds"]
    assert document["samples_per_second"] == simulated["samples_per_second"]
    assert document["critical_path"] == simulated["critical_path"]
    peaks = {device["name"]: device["peak_memory_bytes"] for device in simulated["devices"]}
    for memory in document["memory"]:
        stacked = sum(memory[f"{part}_bytes"] for part in PARTS)
        assert stacked == pytest.approx(peaks[memory["device"]], rel=1e-12)
        assert memory["free_bytes"] == pytest.approx(memory["capacity_bytes"] - stacked)
    assert document["bottleneck"] == {"edge": "v0.nic", "stage": 2}
    assert {"change", "gain", "iteration_seconds", "missing_bytes"} == set(
        document["improvements"][0]
    )
    assert document["runner_ups"] == document["left_out"] == document["additions"] == []


def test_runner_ups_and_left_out_devices_are_told(run: Run, small_cards_left_out: str) -> None:
    result = run("explain", small_cards_left_out, "-q")
    assert result.code == 0, result.err
    assert "2 stages, 1f1b" in result.out
    assert "its pipeline is never full" in result.out
    assert "left out: box0.1..3: nobody asked for it" in result.out
    document = json.loads(run("explain", small_cards_left_out, "--json", "-q").out)
    large, small = document["additions"]
    assert large["change"] == "box0.1 as a further replica of stage 0"
    assert large["gain"] > 0.5
    assert large["missing_bytes"] == 0
    assert small["missing_bytes"] > 0
    assert [left["device"] for left in document["left_out"]] == ["box0.1", "box0.2", "box0.3"]


def test_changes_of_the_network_count(run: Run) -> None:
    calm = json.loads(run("explain", PLAN, "--json", "-q", "--trace", "none").out)
    Path("slow.csv").write_text("seconds,bandwidth\n0,1 Gbit/s\n")
    slow = json.loads(run("explain", PLAN, "--json", "-q", "--trace", "v1.nic=slow.csv").out)
    assert slow["iteration_seconds"] > 1.5 * calm["iteration_seconds"]
    assert slow["bottleneck"]["edge"] == "v1.nic"
    assert (
        max(slow["improvements"], key=lambda one: one["gain"])["change"] == "1 GB/s more on v1.nic"
    )


def test_a_plan_that_never_ends_is_infeasible(run: Run) -> None:
    Path("lost.csv").write_text("seconds,speed\n0,0\n")
    result = run("explain", PLAN, "--trace", "v1.2=lost.csv", "-q")
    assert result.code == 3
    assert result.err.startswith(
        "error: llama-3-8b on mixed-16: no iteration ends, because v1.2 is lost"
    )


def test_missing_plan(run: Run) -> None:
    result = run("explain", "missing.json")
    assert result.err == "error: missing.json: there is no such file\n"
    assert result.code == 2


def test_progress_is_one_plain_line_on_stderr(run: Run) -> None:
    told = run("explain", "gpt2-xl-on-two-cards").err
    assert told == (
        "simulating Plan: gpt2-xl on two-cards, 2 stages, 16 micro-batches of 4, 1f1b and changes to it\n"
    )


def test_help_has_its_example(run: Run) -> None:
    assert f"    argosy explain {PLAN}" in run("explain", "--help").out


def test_demo_plans_explains_and_simulates(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.cli.running.demo.SECONDS", 40.0)
    result = run("demo", "--no-train", "--out", "out")
    assert result.code == 0
    assert "By hand, with a stage per node, an iteration takes 8.9" in result.out
    for text in (
        "1. Which plan?",
        "2. Why is it no faster?",
        "3. And when the network changes?",
        "Most would help",
    ):
        assert text in result.out
    plan = load_plan(tmp_path / "out" / "demo-plan.json")
    assert plan.predicted is not None
    assert (tmp_path / "out" / "demo-trace.json.gz").is_file()
    assert "predicted, " in (tmp_path / "out" / "demo.html").read_text()
    assert "The preempted network makes iterations" in result.out
    assert "simulating 40 s with k=1" in result.err.splitlines()
    document = json.loads(run("demo", "--no-train", "-q", "--json").out)
    rows = document["cases"]
    assert [row["schedule"] for row in rows] == ["k=1", "k=2", "k=4", "eager"]
    assert all(
        row["first_stage_peak_memory_bytes"] <= row["first_stage_memory_bytes"] for row in rows
    )
    assert document["explanation"]["iteration_seconds"] < document["by_hand"]["iteration_seconds"]
    assert document["explanation"]["iteration_seconds"] == pytest.approx(
        plan.predicted.iteration_seconds
    )
    assert document["plan"] == "out/demo-plan.json"
