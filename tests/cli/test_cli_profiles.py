"""Planning with the profiles that come with Argosy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.command_result import Run

CLUSTER = """
name = "pair"
[[nodes]]
name = "h"
count = 2
devices = { kind = "H200" }
nic = { bandwidth = "100 Gbit/s" }
"""
OPTIONS = ("-c", "pair.toml", "-b", "16", "--profile", "h200-llama-2-7b", "--json", "-q")


def test_plans_by_a_shipped_profile(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pair.toml").write_text(CLUSTER)
    measured = json.loads(run("plan", "-m", "llama-2-7b", *OPTIONS).out)
    roofline = json.loads(
        run("plan", "-m", "llama-2-7b", "-c", "pair.toml", "-b", "16", "--json", "-q").out
    )
    times = [found["plan"]["predicted"]["iteration_seconds"] for found in (measured, roofline)]
    assert times[0] != times[1]
    assert 0.7 < times[0] / times[1] < 1.5


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_a_profile_of_something_else_is_refused(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "pair.toml").write_text(CLUSTER)
    other = run(command, "-m", "llama-3-8b", *OPTIONS)
    assert (other.code, other.out) == (2, "")
    assert '--profile: found "llama-2-7b", expected a profile of llama-3-8b' in other.err
    longer = run(command, "-m", "llama-2-7b", "--sequence-length", "2048", *OPTIONS)
    assert longer.code == 2
    assert "expected a profile with 2048 tokens per sample" in longer.err
    unknown = run(
        command, "-m", "llama-2-7b", "-c", "pair.toml", "-b", "16", "--profile", "h100-llama"
    )
    assert unknown.code == 2
    assert "one of the profiles" in unknown.err


def test_a_profile_without_times_for_what_fits_is_what_binds(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pair.toml").write_text(CLUSTER)
    found = run("plan", "-m", "llama-2-7b", "--dtype", "fp16", *OPTIONS)
    assert found.code == 3
    assert (
        "because measured times are missing, not memory: a plan fits that needs fp16 times on H200"
        in found.err
    )
    answer = json.loads(found.out)["infeasible"]
    assert answer["reason"] in found.err
    assert {(change["kind"], change["value"]) for change in answer["changes"]} == {
        ("profile", "H200 at tensor width 1 for 8 samples"),
        ("dtype", "bf16"),
    }


def test_a_profile_of_a_kind_that_is_not_there_is_told_of_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pair.toml").write_text(CLUSTER)
    plan, profile = "gpt2-xl-on-two-cards", ("--profile", "h200-gpt2-xl")
    kinds = "RTX-2080Ti, RTX-A6000"
    note = f"note: two-cards has no H200, but {kinds}: --profile changes nothing for a kind that is not there\n"
    search = ("-m", "gpt2-xl", "-c", "two-cards", "-b", "8", "--dtype", "fp16")
    for command in (
        ("simulate", plan),
        ("explain", plan),
        ("plan", *search),
        ("compare", *search, "--only", "dp-ev"),
    ):
        told = run(*command, *profile)
        assert (told.code, told.err.count(note), told.err.count("note:")) == (0, 1, 1), told.err
    assert run("simulate", plan, *profile, "-q").err == ""
    there = run("plan", "-m", "gpt2-xl", "-c", "pair.toml", "-b", "8", *profile)
    assert there.code == 0 and "note:" not in there.err
