"""``argosy simulate``: what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

from cli.command_result import PLAN, Run

from argosy.timeline.file import load_timeline


def test_prints_figures_devices_links_and_a_chart_within_80_columns(run: Run) -> None:
    result = run("simulate", PLAN, "-n", "2", "--transfers", "--quiet")
    assert result.code == 0
    assert result.err == ""
    assert max(map(len, result.out.splitlines())) <= 80
    for text in (
        "iteration  ",
        "throughput",
        "bubble",
        "critical path",
        "a0.0..3",
        "v0.nic.in",
        "|0 s",
        "a1>v0",
    ):
        assert text in result.out
    assert "\x1b" not in result.out


def test_json_is_versioned_and_sorted(run: Run) -> None:
    result = run("simulate", PLAN, "--json", "--until", "10 s")
    document = json.loads(result.out)
    assert document["version"] == 1
    assert document["schedule"] == {"kind": "kfkb", "k": 2}
    assert document["iterations"]["finished"] == 2
    assert len(document["devices"]) == 16
    assert list(document) == sorted(document)


def test_timeline_round_trips(run: Run, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    result = run("simulate", PLAN, "-n", "2", "-o", "made/timeline.json", "--json", "-q")
    timeline = load_timeline(tmp_path / "made" / "timeline.json")
    assert json.loads(result.out)["iterations"]["seconds"] == list(timeline.iteration_seconds)


def test_progress_is_one_plain_line_on_stderr(run: Run) -> None:
    assert run("simulate", PLAN).err.startswith("simulating Plan: llama-3-8b on mixed-16")
    assert run("simulate", PLAN, "-q").err == ""


def test_width_is_honoured(run: Run) -> None:
    chart = run("simulate", PLAN, "--width", "120", "-q").out.split("iteration 0\n")[1]
    assert max(map(len, chart.splitlines())) == 120


def test_schedule_and_k_replace_the_plan_s(run: Run) -> None:
    assert "kfkb (k=4)" in run("simulate", PLAN, "--k", "4", "-q").out
    assert "micro-batches of 4, 1f1b\n" in run("simulate", PLAN, "--schedule", "1f1b", "-q").out
    over = run("simulate", PLAN, "--schedule", "gpipe", "-q")
    assert "OVER by" in over.out
    assert over.code == 0


def test_trace_of_a_link_replaces_the_cluster_s_changes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "slow.csv").write_text("seconds,bandwidth\n0,1 Gbit/s\n")
    calm = seconds(run, "--trace", "none")
    assert seconds(run, "--trace", "v1.nic=slow.csv") > 1.5 * calm
    (tmp_path / "slow.toml").write_text('[[changes]]\nlink = "v1.nic"\ntrace = "slow.csv"\n')
    assert seconds(run, "--trace", "slow.toml") == seconds(run, "--trace", "v1.nic=slow.csv")


def test_traces_add_up(run: Run, tmp_path: Path) -> None:
    (tmp_path / "half.csv").write_text("seconds,speed\n0,0.5\n")
    (tmp_path / "slow.csv").write_text("seconds,bandwidth\n0,1 Gbit/s\n")
    one = seconds(run, "--trace", "v1.nic=slow.csv")
    both = seconds(run, "--trace", "v1.nic=slow.csv", "--trace", "v1.?=half.csv")
    assert both > one


def test_lost_device_is_told_and_is_no_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lost.csv").write_text("seconds,speed\n0,1\n10,0\n")
    result = run("simulate", PLAN, "-n", "3", "--trace", "v1.2=lost.csv", "-q")
    assert result.code == 0
    assert "STALLED, 1 iteration finished: v1.2 is lost:" in result.out
    (tmp_path / "dead.csv").write_text("seconds,speed\n0,0\n")
    document = json.loads(run("simulate", PLAN, "--trace", "a0.?=dead.csv", "--json").out)
    assert document["iterations"]["finished"] == 0
    assert document["stalled"].startswith("a0.0 is lost")
    assert "STALLED, 0 iterations finished" in run("simulate", PLAN, "--trace", "a0.?=dead.csv").out


def test_same_command_same_bytes(run: Run) -> None:
    assert run("simulate", PLAN, "--json").out == run("simulate", PLAN, "--json").out


def seconds(run: Run, *options: str) -> float:
    mean = json.loads(run("simulate", PLAN, "--json", "-q", *options).out)["iterations"][
        "mean_seconds"
    ]
    assert isinstance(mean, float)
    return mean


def test_policies_are_told_in_json(run: Run) -> None:
    arguments = ("simulate", "gpt2-xl-on-two-cards", "--adapt", "k", "--until", "20 s", "-q")
    told = json.loads(run(*arguments, "--json").out)
    assert told["adapt"] == "k"
    policies = [course["policy"] for course in told["courses"]]
    assert policies[-1] == "oracle" and len(policies) >= 3
    assert all(course["samples_per_second"] > 0 and course["steps"] for course in told["courses"])
    shown = run(*arguments).out
    assert all(policy in shown for policy in policies)
    endless = run("simulate", "gpt2-xl-on-two-cards", "--adapt", "k")
    assert (endless.code, endless.out) == (2, "")
    assert '--adapt needs --until with a time, such as --until "10 min"' in endless.err
