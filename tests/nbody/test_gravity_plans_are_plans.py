"""A gravity plan opens where a plan of training does: ``simulate -o``, ``explain`` and
``report``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argosy.cli import main
from argosy.cluster.file import load_cluster
from argosy.nbody.planning.plan import plan_step
from argosy.nbody.planning.pricing import typical_box
from argosy.nbody.planning.reasons import explain_step
from argosy.timeline.file import load_timeline


def argosy(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "gravity.json"
    assert (
        argosy(
            "nbody", "plan", "-c", "two-cards", "-n", "448^3", "--steps", "1", "-o", str(path), "-q"
        )
        == 0
    )
    return path


def test_a_simulation_writes_its_timeline(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "timeline.json"
    assert argosy("simulate", str(plan), "--iterations", "3", "-o", str(target), "-q") == 0
    timeline = load_timeline(target)
    assert len(timeline.iteration_ends) == 3
    assert {span.where for span in timeline.spans} >= set(timeline.devices)
    capsys.readouterr()
    assert argosy("simulate", str(plan), "--json", "-q") == 0
    step = json.loads(capsys.readouterr().out)["runs"][0]["step_seconds"][0]
    assert timeline.iteration_ends[0] == pytest.approx(step)


def test_an_explanation_says_what_holds_a_step_up(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert argosy("explain", str(plan), "--json", "-q") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["workload"] == "gravity"
    assert told["computing_seconds"] + told["waiting_seconds"] == pytest.approx(
        told["step_seconds"]
    )
    assert [row["step_seconds"] for row in told["improvements"]] == sorted(
        row["step_seconds"] for row in told["improvements"]
    )
    assert argosy("explain", str(plan), "-q", "--width", "120") == 0
    shown = capsys.readouterr().out
    assert f"{told['slowest_device']} computes longest" in shown and "twice as fast" in shown
    assert argosy("explain", str(plan), "--profile", "x.json", "-q") == 2
    assert "--profile" in capsys.readouterr().err


def test_faster_devices_never_make_a_step_longer() -> None:
    cluster, box = load_cluster("two-cards"), typical_box(64**3)
    best = plan_step(cluster, box).best
    reasons = explain_step(cluster, box, best.domains)
    assert all(
        found.step_seconds <= best.step_seconds * (1 + 1e-9) for found in reasons.improvements
    )


def test_a_page_shows_the_step_and_a_measured_timeline(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline, page = tmp_path / "timeline.json", tmp_path / "page.html"
    assert argosy("simulate", str(plan), "-o", str(timeline), "-q") == 0
    assert argosy("report", str(plan), str(timeline), "-o", str(page), "-q") == 0
    text = page.read_text()
    assert text.count("<svg") == 2 and "Other cuts" in text and "http" not in text
    devices = {device.name for device in load_cluster("two-cards").devices}
    assert all(device in text for device in devices)
    capsys.readouterr()
    assert argosy("report", str(plan), "--scenario", "none", "-o", str(page), "-q") == 2
    assert "--scenario" in capsys.readouterr().err
