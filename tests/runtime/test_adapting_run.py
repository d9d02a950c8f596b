"""``argosy run --adapt``: a job begins with a poor plan, finds a better one, and tells of it
everywhere."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from runtime.run_cases import PROGRAM, losses_alone, written_plan
from runtime.test_run_command import SECONDS, command, environment
from runtime.training_cases import Case

from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.lab.job import free_port
from argosy.plan.file import dumps_plan, load_plan
from argosy.report.decisions import read_decisions, tell_decisions
from argosy.runtime.job.metrics import Metrics
from argosy.workload.chain import Layer
from argosy.workload.profile import Profile, ProfileRow
from argosy.workload.profile_file import write_profile

STEPS = 40


def poor_plan(folder: Path) -> tuple[Path, Path]:
    """Three of four samples on one of two equal cores, and a profile of the layers that says so."""
    layers = tuple(
        Layer(
            name=f"layer{at}",
            kind="layer",
            forward_flop=0.0,
            backward_flop=0.0,
            parameters=2000,
            activation_bytes=4e3,
            output_bytes=400.0,
        )
        for at in range(6)
    )
    rows = tuple(
        ProfileRow(layer="layer", micro_batch=samples, tensor_width=1, dtype=Dtype.FP32,
                   forward_seconds=1e-3 * samples, backward_seconds=2e-3 * samples)
        for samples in (1, 8)
    )  # fmt: skip
    profile = folder / "profile.json"
    write_profile(
        Profile(device="CPU-core", model="small", sequence_length=1, rows=rows, layers=layers),
        profile,
    )
    path = written_plan(folder, Case(shares=((3, 1),), num_micro_batches=2))
    plan = load_plan(path)
    path.write_text(dumps_plan(replace(plan, model=replace(plan.model, name=str(profile)))))
    return path, profile


@pytest.mark.flaky(reruns=4)  # it measures real time
def test_a_run_adapts_and_tells_of_it_on_the_terminal_in_files_to_prometheus_and_in_the_report(
    tmp_path: Path,
) -> None:
    plan, profile = poor_plan(tmp_path)
    port, out = free_port(), tmp_path / "run"
    options = [
        "--steps",
        str(STEPS),
        "--adapt",
        "full",
        "--profile",
        str(profile),
        "--metrics-port",
        str(port),
    ]
    process = subprocess.Popen(
        command(plan, "--out", str(out), "--json", *options),
        env=environment("slow"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    page = ""
    while process.poll() is None:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1) as answer,
        ):
            page = answer.read().decode() or page
        time.sleep(0.1)
    stdout, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["losses"] == pytest.approx(losses_alone(STEPS), rel=1e-4)
    assert "# TYPE argosy_steps_total counter" in page
    told = tell_decisions(read_decisions(out / "decisions.jsonl"))
    assert told
    assert f"after step {told[0].step}: {told[0].what}" in stderr
    done = subprocess.run(
        [sys.executable, "-m", "argosy", "report", str(plan), "--profile", str(profile),
         "--decisions", str(out / "decisions.jsonl"), "-o", str(tmp_path / "page.html")],
        capture_output=True, text=True, check=False, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "What the run decided" in (tmp_path / "page.html").read_text()


def test_what_cannot_adapt_is_refused_before_anything_starts(tmp_path: Path) -> None:
    plan = written_plan(tmp_path)
    for option, sentence in (
        ("sometimes", "expected one of off, k, shares, full"),
        ("full", 'found "gpt"'),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "argosy", "run", str(plan), str(PROGRAM), "--adapt", option],
            capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 2
        assert sentence in done.stderr


def test_a_line_that_no_run_wrote_is_named(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    outcome = '{"event": "outcome", "step": 3, "measured_before": 1.5, "measured_after": 1.0}'
    path.write_text(outcome + '\n{"event": "decision", "step": 4}\n')
    with pytest.raises(
        InputError, match=r"decisions\.jsonl:2: what: expected a value: this field is required"
    ):
        read_decisions(path)


def test_metrics_are_prometheus_text() -> None:
    metrics = Metrics()
    metrics.step(0.5, 0.25, 8)
    metrics.decision({"event": "decision", "what": "full", "moved_bytes": 100})
    metrics.beliefs({'a"b': 1e6}, {"a0.0": 0.5})
    lines = metrics.text().splitlines()
    assert 'argosy_decisions_total{what="full"} 1' in lines
    assert 'argosy_link_bytes_per_second{link="a\\"b"} 1000000' in lines
    assert "argosy_moved_bytes_total 100" in lines
    assert "argosy_step_seconds 0.25" in lines
    assert sum(line.startswith("# HELP argosy_loss ") for line in lines) == 1
