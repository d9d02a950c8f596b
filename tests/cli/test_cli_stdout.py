"""``-o -``: the result on stdout, alone; what is told beside it on stderr; refused where stdout
cannot take it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from command_result import PLAN, Run

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
    (*SEARCH, "-o", "-", "--json"): "--output: the name of a file: --json has stdout to itself",
    (
        "simulate",
        SMALL,
        "-o",
        "-",
        "--json",
    ): "--output: the name of a file: --json has stdout to itself",
    (
        "export",
        SMALL,
        "--to",
        "sailor",
        "-o",
        "-",
        "--json",
    ): "--output: the name of a file: --json has stdout to itself",
    (
        "run",
        PLAN,
        "train.py",
        "--out",
        "-",
    ): "--out: the name of a folder, which cannot go to stdout",
    ("demo", "--out", "-"): "--out: the name of a folder, which cannot go to stdout",
    (
        "trace",
        SMALL,
        "--per-rank",
        "-",
    ): "--per-rank: the name of a folder, which cannot go to stdout",
    (
        "profile",
        "train.py:build",
        "-o",
        "-",
        "--resume",
    ): "--output: the name of a file to go on from, which cannot go to stdout",
    ("nbody", "ic", "-o", "-"): "--output: the name of an HDF5 file, which cannot go to stdout",
    (
        "nbody",
        "picture",
        "x.hdf5",
        "-o",
        "-",
    ): "--output: the name of a PNG file, which cannot go to stdout",
    (
        "nbody",
        "run",
        "x.hdf5",
        "-o",
        "-",
    ): "--output: the name of a folder, which cannot go to stdout",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_stdout_cannot_take_is_refused(
    run: Run, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    result = run(*arguments)
    option, _, expected = REFUSED[arguments].partition(": ")
    assert result.err == f'error: {option}: found "-", expected {expected}\n'
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
    assert (
        result.err == "error: missing/ic.hdf5: expected an existing folder missing to write into\n"
    )
    assert result.code == 2
    assert not list(tmp_path.iterdir())
