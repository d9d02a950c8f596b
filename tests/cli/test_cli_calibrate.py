"""``argosy calibrate`` and what its file does to planning and simulating."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli.command_result import PLAN, Run
from support.measured_data import GH200, needs_sailor

from argosy.calibrate.file import read_runs
from argosy.calibrate.predict import quick_seconds
from argosy.cost.calibration import Calibration
from argosy.cost.calibration_file import dumps_calibration, read_calibration
from argosy.timeline.file import dumps_timeline
from argosy.timeline.timeline import Timeline

TRUE = Calibration(passes=4.0, bandwidth=0.5)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A file of runs that take what the cost model says under ``TRUE``, and two runs beside it."""
    path = tmp_path / "runs.json"
    even = {
        "model": "gpt2-xl",
        "cluster": "mixed-8",
        "dtype": "fp16",
        "global_batch": 32,
        "seconds": 1.0,
    }
    shapes = [
        (1, 2, 2, 1),
        (2, 1, 2, 2),
        (2, 2, 2, 1),
        (1, 4, 1, 2),
        (2, 1, 4, 2),
        (1, 1, 2, 4),
        (2, 4, 1, 1),
    ]
    entries = [
        even | dict(zip(("tensor", "data", "pipeline", "micro_batch"), shape, strict=True))
        for shape in shapes
    ]
    content = {
        "version": 1,
        "source": "imagined",
        "runs": [*entries, {"plan": PLAN, "seconds": 1.0}],
    }
    path.write_text(json.dumps(content))
    measured = read_runs(path)
    for entry, seconds in zip(
        content["runs"], quick_seconds(measured, measured.runs, TRUE), strict=True
    ):
        entry["seconds"] = float(seconds)  # type: ignore[index]
    path.write_text(json.dumps(content))
    return path


def test_constants_are_fitted_printed_and_written(run: Run, runs: Path, tmp_path: Path) -> None:
    result = run("calibrate", str(runs), "--fit", "passes,bandwidth", "-o", "constants.json")
    assert result.code == 0
    assert "each of 8 runs left out in turn" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    found = read_calibration(tmp_path / "constants.json")
    assert found.passes == pytest.approx(4.0, rel=0.1)
    assert found.bandwidth == pytest.approx(0.5, rel=0.1)


def test_a_run_may_name_the_timeline_that_argosy_run_ended_with(run: Run, tmp_path: Path) -> None:
    """The first step, which also prepares everything, does not count; the timeline's own memory
    does."""
    timeline = Timeline(
        clock="measured",
        devices=("a",),
        spans=(),
        iteration_ends=(9.0, 11.0, 13.5, 15.5),
        busy=(1.0,),
        memory=(("a", ((0.0, 3e9), (1.0, 5e9), (2.0, 1e9))),),
    )
    (tmp_path / "timeline.json").write_text(dumps_timeline(timeline))
    (tmp_path / "played.json").write_text(dumps_timeline(replace(timeline, clock="simulated")))

    def written(entry: dict[str, object]) -> Path:
        path = tmp_path / "own.json"
        path.write_text(json.dumps({"version": 1, "runs": [{"plan": PLAN, **entry}]}))
        return path

    (found,) = read_runs(written({"timeline": "timeline.json"})).runs
    assert (found.seconds, found.peak_bytes) == (2.0, 5e9)
    (found,) = read_runs(written({"timeline": "timeline.json", "peak_bytes": 7e9})).runs
    assert found.peak_bytes == 7e9
    result = run("calibrate", str(written({"timeline": "timeline.json"})), "--json", "-q")
    assert result.code == 0 and json.loads(result.out)["runs"] == 1
    for entry, says in (
        ({}, 'runs[0].seconds: expected given, or a "timeline" in its place'),
        (
            {"timeline": "played.json"},
            "played.json: found simulated, 4 iterations, expected a measured timeline",
        ),
        ({"timeline": "nowhere.json"}, "nowhere.json"),
    ):
        result = run("calibrate", str(written(entry)))
        assert result.code == 2 and says in result.err, result.err


def test_json_names_what_was_fitted(run: Run, runs: Path) -> None:
    result = run("calibrate", str(runs), "--fit", "none", "--json", "-q")
    content = json.loads(result.out)
    assert content["fitted"] == []
    assert content["constants"]["passes"] == Calibration().passes
    assert content["errors"]["seconds"]["count"] == 8


def test_a_calibration_changes_what_is_simulated_and_planned(run: Run, tmp_path: Path) -> None:
    slow = replace(Calibration(), passes=10.0, bandwidth=0.2)
    (tmp_path / "slow.json").write_text(dumps_calibration(slow))

    def seconds(*more: str) -> float:
        return float(
            json.loads(run("simulate", PLAN, "--json", "-q", *more).out)["iterations"][
                "mean_seconds"
            ]
        )

    assert seconds("--calibration", "slow.json") > 1.2 * seconds()
    call = (
        "plan",
        "-m",
        "gpt2-xl",
        "-c",
        "two-cards",
        "-b",
        "16",
        "--dtype",
        "fp16",
        "--json",
        "-q",
    )
    usual, calibrated = (
        json.loads(run(*call, *more).out) for more in ((), ("--calibration", "slow.json"))
    )
    assert (
        calibrated["predicted"]["iteration_seconds"] > 1.2 * usual["predicted"]["iteration_seconds"]
    )
    assert calibrated["plan"]["cluster"]["hash"] == usual["plan"]["cluster"]["hash"]


def test_a_process_leaves_less_memory_for_plans(run: Run, tmp_path: Path) -> None:
    (tmp_path / "fat.json").write_text(dumps_calibration(Calibration(process_bytes=10.9 * 2**30)))
    call = (
        "plan",
        "-m",
        "gpt2-xl",
        "-c",
        "two-cards",
        "-b",
        "16",
        "--dtype",
        "fp16",
        "--json",
        "-q",
    )
    content = json.loads(run(*call, "--calibration", "fat.json").out)
    used = {
        device
        for stage in content["plan"]["stages"]
        for replica in stage["replicas"]
        for device in replica["devices"]
    }
    assert used == {"box0.0", "box0.1"}


def test_blocking_counts_in_simulate(run: Run, tmp_path: Path) -> None:
    (tmp_path / "waits.json").write_text(dumps_calibration(Calibration(blocking=True)))
    call = ("simulate", "gpt2-xl-on-two-cards", "--schedule", "1f1b", "--json", "-q")
    free, waiting = (
        json.loads(run(*call, *more).out) for more in ((), ("--calibration", "waits.json"))
    )
    assert waiting["iterations"]["mean_seconds"] > free["iterations"]["mean_seconds"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"version": 1, "runs": []}, "runs"),
        (
            {"version": 1, "runs": [{"plan": "x.json", "seconds": 0}]},
            "seconds of an iteration, above 0",
        ),
        ({"version": 1, "runs": [{"model": "gpt2", "seconds": 1}]}, 'a "plan" in place of degrees'),
        ({"version": 1, "runs": [{"plan": PLAN, "secs": 1}]}, "seconds"),
    ],
)
def test_broken_runs_are_named(
    run: Run, tmp_path: Path, content: dict[str, object], says: str
) -> None:
    (tmp_path / "runs.json").write_text(json.dumps(content))
    result = run("calibrate", "runs.json")
    assert result.code == 2
    assert says in result.err


@pytest.mark.parametrize(
    ("constants", "says"),
    [
        ({"bandwidth": 1.5}, "a share above 0, at most 1"),
        ({"pases": 2}, "passes"),
        ({"passes": 0}, "above 0"),
    ],
)
def test_broken_calibrations_are_named(
    run: Run, tmp_path: Path, constants: dict[str, float], says: str
) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"version": 1, "constants": constants}))
    result = run("simulate", PLAN, "--calibration", "c.json")
    assert result.code == 2
    assert says in result.err


def test_files_that_are_not_there(run: Run) -> None:
    assert "a file of measured runs" in run("calibrate", "nowhere.json").err
    assert run("calibrate", PLAN, "--fit", "pases").code == 2


@needs_sailor
def test_a_folder_of_sailors_runs(run: Run) -> None:
    result = run("calibrate", str(GH200), "--fit", "none", "--json", "-q")
    content = json.loads(result.out)
    assert content["runs"] == 15
    assert content["constants"]["blocking"] is True
    assert content["errors"]["seconds"]["mean"] < 0.1
