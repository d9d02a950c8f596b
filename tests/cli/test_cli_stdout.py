"""``-o -``: the result on stdout, alone; what is told beside it on stderr; refused where stdout
cannot take it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from cli.command_result import PLAN, Run

from argosy.cluster.file import load_cluster
from argosy.plan.file import load_plan
from argosy.timeline.file import load_timeline

SMALL = "gpt2-xl-on-two-cards"
SEARCH = ("plan", "-m", "gpt2", "-c", "two-cards", "-b", "8", "--sequence-length", "128")
NODE = ("--node", "1 x 2 A100-80GB, intra 300 GB/s, nic 100 Gbit/s")
IMPORT = (
    "import",
    "hosts.txt",
    "--from",
    "hostfile",
    "--kind",
    "A100-80GB",
    "--intra",
    "300 GB/s",
    "--nic",
    "1 GB/s",
)
REFUSED = {
    (
        *SEARCH,
        "-o",
        "-",
        "--json",
    ): "--output - cannot be combined with --json, which prints to stdout",
    (
        "simulate",
        SMALL,
        "-o",
        "-",
        "--json",
    ): "--output - cannot be combined with --json, which prints to stdout",
    (
        "export",
        SMALL,
        "--to",
        "sailor",
        "-o",
        "-",
        "--json",
    ): "--output - cannot be combined with --json, which prints to stdout",
    (
        "run",
        PLAN,
        "train.py",
        "--out",
        "-",
    ): "Cannot write a folder to stdout because --out is -. Try a name.",
    ("demo", "--out", "-"): "Cannot write a folder to stdout because --out is -. Try a name.",
    (
        "trace",
        SMALL,
        "--per-rank",
        "-",
    ): "Cannot write a folder to stdout because --per-rank is -. Try a name.",
    (
        "profile",
        "train.py:build",
        "-o",
        "-",
        "--resume",
    ): "Cannot write a profile to resume to stdout because --output is -. Try a name.",
    (
        "nbody",
        "ic",
        "-o",
        "-",
    ): "Cannot write an HDF5 file to stdout because --output is -. Try a name.",
    (
        "nbody",
        "picture",
        "x.hdf5",
        "-o",
        "-",
    ): "Cannot write a PNG file to stdout because --output is -. Try a name.",
    (
        "nbody",
        "run",
        "x.hdf5",
        "-o",
        "-",
    ): "Cannot write a folder to stdout because --output is -. Try a name.",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_stdout_cannot_take_is_refused(
    run: Run, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    result = run(*arguments)
    assert result.err == f"error: {REFUSED[arguments]}\n"
    assert result.code == 2
    assert not list(tmp_path.iterdir())


def test_a_plan_and_a_timeline_go_through_a_pipe(run: Run, tmp_path: Path) -> None:
    found = run(*SEARCH, "-o", "-", "-q")
    assert found.code == 0
    assert "iteration" in found.err and "wrote" not in found.err
    (tmp_path / "plan.json").write_text(found.out)
    assert load_plan("plan.json").model.name == "gpt2"
    played = run("simulate", "plan.json", "-o", "-", "-q")
    (tmp_path / "timeline.json").write_text(played.out)
    assert load_timeline("timeline.json").spans
    assert "throughput" in played.err


def test_pages_traces_clusters_and_scripts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("one slots=2\n")
    assert run("report", SMALL, "-o", "-", "-q").out.startswith("<!doctype html>")
    assert json.loads(run("trace", SMALL, "-o", "-", "-q").out)["traceEvents"]
    made = run("init", *NODE, "-o", "-")
    assert tomllib.loads(made.out)["name"] == "mine" and not made.err
    assert run(*IMPORT, "-o", "-").out == run(*IMPORT).out
    sailor = ("export", SMALL, "--to", "sailor")
    assert run(*sailor, "-o", "-").out == run(*sailor).out
    assert {path.name for path in tmp_path.iterdir()} == {"hosts.txt"}
    (tmp_path / "mine.toml").write_text(made.out)
    assert len(load_cluster("mine.toml").devices) == 2


def test_a_missing_folder_is_not_made_for_a_snapshot(run: Run, tmp_path: Path) -> None:
    result = run("nbody", "ic", "--per-side", "4", "-o", "missing/ic.hdf5")
    reason = "because the folder missing does not exist. Try creating it."
    assert result.err == f"error: Cannot write missing/ic.hdf5 {reason}\n"
    assert result.code == 2
    assert not list(tmp_path.iterdir())
