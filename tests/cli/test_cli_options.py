"""Options that exclude each other, or mean nothing where they stand, are refused: nothing that is
asked is ignored.

What a command cannot finish is refused, too, before it takes the machine's memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.command_result import PLAN, Run

SEARCH = ("plan", "-m", "gpt2", "-c", "two-cards", "-b", "8")
SHARE = ("plan", "--program", "train.py:build", "-c", "two-cards")
WITH_PROGRAM = "cannot be combined with --program"
FOR_TRACE = "cannot be combined with --for-trace, which compares plans and chooses none"
LONG = "9" * 5000
"""More digits than Python reads as a number."""
ADAPTING = "cannot be combined with --adapt, which simulates everything until --until"

CASES = {
    (*SEARCH, "--for-trace", "box0.pcie=on-off", "-o", "plan.json"): f"--output {FOR_TRACE}",
    (
        *SEARCH,
        "--for-trace",
        "box0.pcie=on-off",
        "--scenario",
        "none",
    ): f"--scenario {FOR_TRACE}",
    (
        *SEARCH,
        "--for-trace",
        "box0.pcie=on-off",
        "--objective",
        "cost",
    ): f"--objective cost {FOR_TRACE}",
    (
        *SEARCH,
        "--scenario",
        "none",
        "--objective",
        "cost",
    ): "--objective cost cannot be combined with --scenario",
    (
        *SEARCH,
        "--robust",
        "p95",
    ): "--robust p95 needs --scenario",
    (
        *SEARCH,
        "--robust",
        "p99",
    ): '--robust: found "p99", expected one of the objectives mean, p95, worst, model; '
    'did you mean "p95"?',
    (
        *SEARCH,
        "--scenario",
        "foo",
    ): '--scenario: found "foo", expected LINK=FILE.csv, DEVICE=FILE.csv, '
    "a .toml with [[changes]], or none",
    (
        *SEARCH,
        "--scenario",
        "x9.nic=ok.csv",
    ): '--scenario: found "x9.nic", expected a link or device of two-cards, '
    "such as box0.pcie or box0.0",
    (*SHARE, "--global-batch", "8"): f"--global-batch {WITH_PROGRAM}",
    (*SHARE, "--max-expert", "2"): f"--max-expert {WITH_PROGRAM}",
    (*SHARE, "--lora", "rank=8"): f"--lora {WITH_PROGRAM}",
    (*SHARE, "--freeze", "block.0"): f"--freeze {WITH_PROGRAM}",
    (
        *SEARCH,
        "--train",
        "lora",
        "--base-weights",
        "fp4",
    ): '--base-weights: found "fp4", expected one of int8, nf4; did you mean "nf4"?',
    (
        *SEARCH,
        "--freeze",
        "layer9",
    ): '--freeze: found "layer9", expected a pattern of layer names of gpt2: embedding, '
    "block.0 to block.11, head",
    (
        "simulate",
        PLAN,
        "--adapt",
        "k",
        "--until",
        "3 s",
        "-o",
        "x.json",
    ): f"--output {ADAPTING}",
    ("simulate", PLAN, "--adapt", "k", "--until", "3 s", "--transfers"): f"--transfers {ADAPTING}",
    (
        "simulate",
        PLAN,
        "--adapt",
        "k",
        "--until",
        "3 s",
        "-n",
        "4",
    ): f"--iterations {ADAPTING}",
    (
        "simulate",
        PLAN,
        "-n",
        "99999999999",
    ): "--iterations: found 99999999999, expected at most 1,000,000",
    (
        "simulate",
        PLAN,
        "--trace",
        "none",
        "--until",
        "1e30 d",
    ): '--until: found "1e30 d", expected a time in which fewer than 1,000,000 iterations begin',
    (
        "simulate",
        PLAN,
        "--adapt",
        "k",
        "--until",
        "1e30 d",
    ): '--until: found "1e30 d", expected a time in which fewer than 1,000,000 iterations begin',
    (
        "trace",
        PLAN,
        "-n",
        "99999999999",
    ): "--iterations: found 99999999999, expected at most 1,000,000",
    (
        "explain",
        PLAN,
        "--dtype",
        "fp16",
    ): "--dtype cannot be combined with a plan, which has its own",
    (
        "explain",
        "train.py:build",
        "--trace",
        "none",
    ): "--trace does not apply to a program",
    ("explain", "folder"): "folder: found a folder, expected a file",
    (
        "profile",
        "binary.py:build",
    ): "binary.py: found SyntaxError (source code string cannot contain null bytes), "
    "expected a Python file that can be imported",
    ("lab", "run", "trial", "--timeout", "nan"): "--timeout: found nan, expected a number",
    (
        *SEARCH,
        "--schedule",
        f"kfkb:{LONG}",
    ): f'--schedule: found "kfkb:{LONG[:50]}..., expected one of the schedules '
    "1f1b, eager-1f1b, kfkb, gpipe, zero-bubble, interleaved, zero-bubble-v, dualpipe-v or kfkb:K with K of at least 1",
    (
        *SEARCH,
        "--schedule",
        "kfkb:9999",
    ): '--schedule: found "kfkb:9999", expected a k of at most 8, the batch',
    (
        *SEARCH,
        "--schedule",
        "kfkb",
        "-b",
        "1",
    ): '--schedule: found "kfkb", expected a k of at most 1, the batch',
    (
        *SEARCH,
        "--scenario",
        f"box0.pcie=on-off:seed={LONG}",
    ): f'--scenario seed: found "{LONG[:55]}..., expected a whole number',
    (
        "profile",
        "train.py:build",
        "--samples",
        "1,²",
    ): '--samples: found "1,²", expected whole numbers such as 1,2,4,8',
    (
        "init",
        "--node",
        f"{LONG} x 1 H200",
    ): f'--node: found "{LONG[:55]}..., expected at least 1 node and 1 device',
    (
        "trace",
        "timeline.json",
        "-n",
        "3",
    ): "--iterations does not apply to a timeline, which is not simulated again",
    (
        "probe",
        "--run",
        "folder",
        "--plan",
        PLAN,
        "-o",
        "x.toml",
    ): "--output cannot be combined with --run, which repeats no measurement",
    (
        "probe",
        "--profile",
        "x.json",
    ): "--profile needs --run",
    (
        "export",
        PLAN,
        "--to",
        "megatron",
        "--zone",
        "z",
    ): "--zone does not apply to megatron",
    (
        "simulate",
        "gravity.json",
        "--adapt",
        "x",
    ): '--adapt: found "x", expected one of off, k, shares, full',
    (
        "simulate",
        "gravity.json",
        "--transfers",
    ): "--transfers does not apply to a gravity plan",
    ("nbody", "power", "folder"): "folder: found a folder, expected a file",
    (
        "init",
        "-o",
        "folder",
        "--node",
        "1 x 1 H200",
    ): "Cannot write folder because it is a folder. Try the name of a file.",
}


@pytest.mark.parametrize(
    "arguments", CASES, ids=lambda arguments: " ".join(arguments).replace(LONG, "9...")
)
def test_refused(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    if arguments[0] == "profile":
        pytest.importorskip("torch")
    (tmp_path / "ok.csv").write_text("seconds,bandwidth\n0,25 Gbit/s\n")
    (tmp_path / "train.py").write_text("def build(): ...\n")
    (tmp_path / "binary.py").write_bytes(b"\x00\x01")
    (tmp_path / "timeline.json").write_text('{"spans": []}')
    (tmp_path / "gravity.json").write_text('{"kind": "gravity"}')
    (tmp_path / "folder").mkdir()
    quiet = ["--quiet"] if arguments[0] not in ("nbody", "init", "export") else []
    before = sorted(tmp_path.iterdir())
    result = run(*arguments, *quiet)
    assert (result.code, result.out, result.err) == (2, "", f"error: {CASES[arguments]}\n")
    assert sorted(path for path in tmp_path.iterdir() if path.name != "__pycache__") == before


@pytest.mark.parametrize(
    "arguments",
    [
        (*SEARCH, "--level", "2", "--gap", "nan"),
        ("calibrate", "runs.json", "--share", "nan"),
        ("run", PLAN, "train.py", "--clip", "nan"),
        ("run", PLAN, "train.py", "--patience", "inf"),
        ("simulate", PLAN, "--adapt", "k", "--min-gain", "nan"),
    ],
    ids=" ".join,
)
def test_what_is_no_number_is_within_no_limits(run: Run, arguments: tuple[str, ...]) -> None:
    """Typer says it in words of its own, where it knows."""
    result = run(*arguments)
    assert (result.code, result.out) == (2, "") and arguments[-2] in result.err
