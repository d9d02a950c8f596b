"""``argosy run`` of island plans: an island that is killed comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.island_cases import IslandCase, written_islands
from runtime.training_cases import Case

from argosy.runtime.processes.run_folder import read_lines
from argosy.runtime.state.checkpoint import read_state_dict

PROGRAM = Path(__file__).parent / "programs" / "lost_island.py"
CASE = IslandCase(
    islands=(
        Case(shares=((2,), (2,)), num_micro_batches=3),
        Case(shares=((1,),), num_micro_batches=2),
    ),
    every=2,
)


def argosy(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "argosy", *map(str, arguments)]
    environment = {**os.environ, "ISLANDS": str(folder)}
    return subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=600
    )


@pytest.mark.exhaustive
def test_an_island_that_is_killed_comes_back_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    plan, out, steps = written_islands(tmp_path, CASE), tmp_path / "run", 150
    options = (
        "--steps",
        steps,
        "--out",
        out,
        "--any-device",
        "--lost-after",
        5,
        "--quiet",
        "--json",
    )
    done = argosy("run", plan, PROGRAM, *options, folder=out)
    assert done.returncode == 0, done.stderr
    lines = read_lines(out / "island-0" / "exchanges.jsonl")
    exchanges = [line for line in lines if "exchange" in line]
    members = [line["islands"] for line in exchanges]
    assert [one for at, one in enumerate(members) if at == 0 or one != members[at - 1]] == [
        [0, 1],
        [0],
        [0, 1],
    ]
    assert [line["exchange"] for line in exchanges] == list(range(len(exchanges)))
    _check_counts(exchanges, steps)
    returned = read_lines(out / "island-1" / "exchanges.jsonl")
    (caught_up,) = [line["caught_up"] for line in returned if "caught_up" in line]
    trained = [line["step"] for line in read_lines(out / "island-1" / "progress.jsonl")]
    assert trained == [*range(trained.index(caught_up)), *range(caught_up, steps)]
    weights = [
        read_state_dict(out / f"island-{at}" / "checkpoints" / f"step-{steps:08d}") for at in (0, 1)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    figures = json.loads(done.stdout)
    assert [island["steps"] for island in figures["islands"]] == [steps, len(trained)]


def test_an_island_whose_input_is_refused_is_not_started_again(tmp_path: Path) -> None:
    plan, out = written_islands(tmp_path, CASE, kind="T4"), tmp_path / "run"
    done = argosy("run", plan, PROGRAM, "--steps", 2, "--out", out, folder=out)
    assert done.returncode == 2, done.stderr
    assert "--any-device runs it anyway" in done.stderr
    assert "started again" not in done.stderr
    assert not [path for path in out.rglob("*") if path.stat().st_mode & 0o007]


def _check_counts(exchanges: Sequence[dict[str, Any]], steps: int) -> None:
    """Every island that takes part in an exchange counts its share of the steps since the last one,
    once."""
    before = 0
    for line in exchanges:
        shares = [CASE.shares[island] for island in line["islands"]]
        assert line["samples"] == [share * (line["step"] - before) for share in shares]
        before = line["step"]
    assert before == steps
