"""The demo's training: by both plans, in a lab and on plain processes, with the losses of a plain
loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from argosy.cli.running import demo_training
from argosy.lab.system import why_not


@pytest.mark.flaky(reruns=4)  # it measures real time
@pytest.mark.parametrize(
    "in_lab", [pytest.param(True, marks=pytest.mark.exhaustive), False], ids=["lab", "processes"]
)
def test_the_demo_trains_as_a_plain_loop_does(
    tmp_path: Path, in_lab: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    if in_lab and why_not() is not None:
        pytest.skip(f"no lab here: {why_not()}")
    monkeypatch.setattr(demo_training, "STEPS", 2)
    monkeypatch.setattr(demo_training, "_SECONDS", 2e-3)
    console = Console(record=True, width=200)
    told = demo_training.train(console, tmp_path, in_lab=in_lab, quiet=True)
    assert told["hosts"] == ("lab" if in_lab else "processes")
    assert told["largest_difference_to_one_process"] < 1e-4
    assert [plan["name"] for plan in told["plans"]] == ["argosy", "even"]
    ours, even = (plan["predicted_seconds"] for plan in told["plans"])
    assert ours < even / 1.5
    page = (tmp_path / "tiny-gpt" / "report.html").read_text()
    assert "measured, argosy plan" in page
    assert "measured, even plan" in page
    said = console.export_text()
    assert (
        "four hosts of a lab"
        if in_lab
        else "four plain processes, their links not shaped (no lab: --no-lab)"
    ) in said
