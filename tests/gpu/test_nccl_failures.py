"""Ranks of NCCL that are killed or stop answering: the others end with a sentence, and elastic runs
go on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.gpu_ranks import need_ranks
from runtime.elastic_cases import PROGRAM, ElasticRun, losses_alone


def _run(
    folder: Path, program: Path, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    run = ElasticRun(folder, hosts=1, devices=2)
    command = [
        sys.executable,
        "-m",
        "argosy",
        "run",
        str(folder / "plan.json"),
        f"{program}:build",
        *options,
    ]
    command += ["--steps", "6", "--out", str(run.run), "--any-device", "--json"]
    own = {**os.environ, **run.environment, "STEP_SECONDS": "0", **environment}
    return subprocess.run(
        command, env=own, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_killed_rank_ends_the_run_with_its_name(tmp_path: Path) -> None:
    need_ranks(2)
    done = _run(tmp_path, PROGRAM, DEATH=str(tmp_path / "died"))
    assert done.returncode == 4, done.stderr
    assert "rank 1 (h0.1) was killed by SIGKILL" in done.stderr


def test_a_rank_that_stops_answering_is_reported_by_the_others(tmp_path: Path) -> None:
    need_ranks(2)
    done = _run(tmp_path, Path(__file__).parent / "programs_that_stop.py", "--patience", "8")
    assert done.returncode == 4, done.stderr
    assert re.search("lost contact .* 8 s", done.stderr), done.stderr


def test_an_elastic_run_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    need_ranks(2)
    done = _run(tmp_path, PROGRAM, "--elastic", "--here", DEATH=str(tmp_path / "died"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["losses"] == pytest.approx(losses_alone(6), rel=1e-7)
    assert "h0.1: was killed by SIGKILL" in done.stderr
