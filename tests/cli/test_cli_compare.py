"""``argosy compare``: the table, its JSON, and what it refuses."""

from __future__ import annotations

import json

import pytest
from cli.command_result import Run

from argosy.baselines import BASELINES

SMALL = (
    "compare",
    "-m",
    "gpt2",
    "-c",
    "two-cards",
    "-b",
    "16",
    "--dtype",
    "fp16",
    "--sequence-length",
    "512",
)


def test_json_has_a_row_for_everybody(run: Run) -> None:
    result = run(*SMALL, "--json", "--quiet")
    assert (result.code, result.err) == (0, "")
    content = json.loads(result.out)
    rows = {row["name"]: row for row in content["rows"]}
    assert set(rows) == {"argosy", *BASELINES}
    assert (content["command"], content["version"], content["global_batch"]) == ("compare", 1, 16)
    for row in rows.values():
        if row["feasible"]:
            assert row["samples_per_second"] == pytest.approx(16 / row["iteration_seconds"])
            assert sum(row["losses"].values()) == pytest.approx(1, abs=1e-6)
            assert row["iteration_seconds"] >= rows["argosy"]["iteration_seconds"] * (1 - 1e-9)
        else:
            assert row["iteration_seconds"] is None and row["reason"].startswith("no plan: ")


def test_table_fits_into_a_terminal_and_says_why(run: Run) -> None:
    result = run(*SMALL)
    assert result.code == 0
    assert max(map(len, result.out.splitlines()[2:])) <= 80
    assert "argosy" in result.out and "the fastest" in result.out
    assert "planning with megatron" in result.err


def test_wide_table_says_what_each_plan_is(run: Run) -> None:
    assert " x " in run(*SMALL, "--only", "megatron", "--width", "140", "-q").out


def test_changes_are_played(run: Run) -> None:
    """A cluster with a changing link is played from several moments; without the changes it is
    faster."""
    options = (
        "compare",
        "-m",
        "gpt2",
        "-c",
        "geo-8",
        "-b",
        "16",
        "--only",
        "megatron",
        "--json",
        "-q",
    )
    changing, calm = (
        json.loads(run(*options, *more).out)["rows"] for more in ((), ("--trace", "none"))
    )
    times = [{row["name"]: row["iteration_seconds"] for row in rows} for rows in (changing, calm)]
    assert times[0]["megatron"] > times[1]["megatron"] * 1.01


def test_plan_and_compare_agree_or_say_why_they_do_not(run: Run) -> None:
    """A plan has one time in both where nothing changes; where something does, the table says what
    counts."""
    planned = json.loads(run("plan", "-m", "gpt2", "-c", "geo-8", "-b", "16", "--json", "-q").out)
    options = ("compare", "-m", "gpt2", "-c", "geo-8", "-b", "16", "--only", "megatron", "-q")
    content = json.loads(run(*options, "--trace", "none", "--json").out)
    ours = next(row for row in content["rows"] if row["name"] == "argosy")
    assert (content["moments"], ours["iteration_seconds"]) == (
        1,
        planned["predicted"]["iteration_seconds"],
    )
    assert "predicts" not in run(*options, "--trace", "none").out
    told = " ".join(run(*options).out.split())
    assert (
        "each time is the mean over iterations that begin at 8 moments. argosy plan plans for time 0"
        in told
    )
    assert json.loads(run(*options, "--json").out)["moments"] == 8


def test_scenarios_are_played_and_counted_as_asked(run: Run) -> None:
    """What counts is no less at worst than on average; one scenario is its own trace; a calm one
    changes nothing."""
    options = (
        "compare",
        "-m",
        "gpt2",
        "-c",
        "geo-8",
        "-b",
        "16",
        "--only",
        "megatron",
        "--json",
        "-q",
    )
    jolt = ("--scenario", "west0.nic=on-off:on=2 s,off=2 s,low=0.05,horizon=20 s")
    seconds = []
    for more in (("--trace", "none"), ("--scenario", "none"), jolt, (*jolt, "--robust", "worst")):
        content = json.loads(run(*options, *more).out)
        seconds.append({row["name"]: row["iteration_seconds"] for row in content["rows"]})
    assert (content["scenarios"], content["robust"]) == ([jolt[1]], "worst")
    calm, none, mean, worst = seconds
    assert none == calm
    assert calm["megatron"] * 1.01 < mean["megatron"] < worst["megatron"]
    assert worst["argosy"] <= worst["megatron"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--robust", "median"),
            '--robust: found "median", expected one of the objectives mean, p95, worst',
        ),
        (("--trace", "none", "--scenario", "none"), "--trace cannot be combined with --scenario"),
        (("--only", "megatrn"), '--only: found "megatrn", expected one of megatron'),
        (("-b", "0"), "--global-batch: found 0, expected a whole number of at least 1"),
        (("-c", "nowhere.toml"), "nowhere.toml: there is no such file"),
    ],
)
def test_bad_input_is_refused(run: Run, options: tuple[str, ...], message: str) -> None:
    result = run(*SMALL, *options)
    assert result.code == 2
    assert message in result.err


def test_a_model_that_fits_nowhere(run: Run) -> None:
    result = run("compare", "-m", "llama-3-8b", "-c", "two-cards", "--dtype", "fp16", "-q")
    assert result.code == 3
    assert "no plan of llama-3-8b" in result.err


def test_a_plan_has_its_own_model_cluster_and_batch(run: Run) -> None:
    result = run("compare", "gpt2-xl-on-two-cards", "--only", "megatron", "--json", "-q")
    content = json.loads(result.out)
    assert content["model"] == "gpt2-xl" and content["cluster"]["name"] == "two-cards"
    refused = run("compare", "gpt2-xl-on-two-cards", "-b", "8")
    assert (refused.code, refused.err) == (
        2,
        "error: --global-batch cannot be combined with a plan, which has its own\n",
    )
    refused = run("compare", "-m", "gpt2")
    assert "argosy compare needs --model and --cluster, or a plan" in refused.err
