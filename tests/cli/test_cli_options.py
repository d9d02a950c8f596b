"""Options that exclude each other, or mean nothing where they stand, are refused: nothing that is asked is ignored.

What a command cannot finish is refused, too, before it takes the machine's memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command_result import PLAN, Run

SEARCH = ("plan", "-m", "gpt2", "-c", "two-cards", "-b", "8")
SHARE = ("plan", "--program", "train.py:build", "-c", "two-cards")
WITH_PROGRAM = "expected no such option with --program"
FOR_TRACE = "expected no such option with --for-trace, which compares plans and chooses none"
ADAPTING = "expected no such option with --adapt, which plays whole courses until --until"

CASES = {
    (*SEARCH, "--for-trace", "box0.pcie=on-off", "-o", "plan.json"): f"--output: {FOR_TRACE}",
    (*SEARCH, "--for-trace", "box0.pcie=on-off", "--scenario", "none"): f'--scenario: found "none", {FOR_TRACE}',
    (*SEARCH, "--for-trace", "box0.pcie=on-off", "--objective", "cost"): f'--objective: found "cost", {FOR_TRACE}',
    (*SEARCH, "--scenario", "none", "--objective", "cost"): "--scenario: expected either scenarios or prices, not both",
    (*SEARCH, "--robust", "p95"): '--robust: found "p95", expected a --scenario over which it counts',
    (*SEARCH, "--robust", "p99"): '--robust: found "p99", expected one of the objectives mean, p95, worst; '
    'did you mean "p95"?',
    (*SEARCH, "--scenario", "foo"): '--scenario: found "foo", expected LINK=FILE.csv, DEVICE=FILE.csv, '
    "a .toml with [[changes]], or none",
    (*SEARCH, "--scenario", "x9.nic=ok.csv"): '--scenario: found "x9.nic", expected a link or device of two-cards, '
    "such as box0.pcie or box0.0",
    (
        *SHARE,
        "--scenario",
        "none",
        "--scenario",
        "v0.nic=a.csv",
    ): f'--scenario: found "none, v0.nic=a.csv", {WITH_PROGRAM}',
    (*SHARE, "--no-mixed"): f"--no-mixed: {WITH_PROGRAM}",
    (*SHARE, "--runnable"): f"--runnable: {WITH_PROGRAM}",
    ("simulate", PLAN, "--adapt", "k", "--until", "3 s", "-o", "x.json"): f'--output: found "x.json", {ADAPTING}',
    ("simulate", PLAN, "--adapt", "k", "--until", "3 s", "--transfers"): f"--transfers: {ADAPTING}",
    ("simulate", PLAN, "--adapt", "k", "--until", "3 s", "-n", "4"): f'--iterations: found "4", {ADAPTING}',
    ("simulate", PLAN, "-n", "99999999999"): "--iterations: found 99999999999, expected at most 1,000,000",
    ("simulate", PLAN, "--trace", "none", "--until", "1e30 d"): '--until: found "1e30 d", expected a time in which '
    "fewer than 1,000,000 iterations begin",
    ("simulate", PLAN, "--adapt", "k", "--until", "1e30 d"): '--until: found "1e30 d", expected a time in which '
    "fewer than 1,000,000 iterations begin",
    ("trace", PLAN, "-n", "99999999999"): "--iterations: found 99999999999, expected at most 1,000,000",
    (
        "explain",
        PLAN,
        "--dtype",
        "fp16",
    ): '--dtype: found "fp16", expected no such option for a plan, which has its own',
    ("explain", "train.py:build", "--trace", "none"): '--trace: found "none", expected no such option for a program',
    ("explain", "folder"): "folder: found a folder, expected a file",
    ("profile", "binary.py:build"): "binary.py: found SyntaxError (source code string cannot contain null bytes), "
    "expected a Python file that can be imported",
    ("nbody", "power", "folder"): "folder: found a folder, expected a file",
    ("init", "-o", "folder", "--node", "1 x 1 H200"): "folder: found a folder, expected the name of a file to write",
}


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_refused(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    if arguments[0] == "profile":
        pytest.importorskip("torch")
    (tmp_path / "ok.csv").write_text("seconds,bandwidth\n0,25 Gbit/s\n")
    (tmp_path / "train.py").write_text("def build(): ...\n")
    (tmp_path / "binary.py").write_bytes(b"\x00\x01")
    (tmp_path / "folder").mkdir()
    quiet = ["--quiet"] if arguments[0] not in ("nbody", "init") else []
    before = sorted(tmp_path.iterdir())
    result = run(*arguments, *quiet)
    assert (result.code, result.out, result.err) == (2, "", f"error: {CASES[arguments]}\n")
    assert sorted(path for path in tmp_path.iterdir() if path.name != "__pycache__") == before
