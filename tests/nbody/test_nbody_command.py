"""``argosy nbody`` as people use it: from initial conditions to a picture, on several processes,
killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from argosy.cli import main
from argosy.cli.gravity.plan import parse_count
from argosy.errors import InputError
from argosy.nbody.files.snapshot import read_snapshot


def argosy(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["nbody", *arguments])
    return int(stop.value.code or 0)


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nbody") / "ic.hdf5"
    assert (
        argosy("ic", "--box", "50", "--per-side", "16", "-z", "24", "-o", str(path), "--quiet") == 0
    )
    return path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "gpu"], '--device: found "gpu", expected cpu, cuda, or cuda and a number'),
        (["--resume"], "run.json:1: found"),
        (["--softening", "-1"], "softening: found -1.0, expected a number of at least 0"),
        (
            ["--force-error", "nan"],
            "force_error: found nan, expected a relative error of at least 0.0015",
        ),
        (
            ["--force-error", "1e-6"],
            "force_error: found 1e-06, expected a relative error of at least 0.0015",
        ),
        (["--softening", "30"], "softening: found 30.0, expected at most"),
    ],
)
def test_what_is_wrong_is_named(
    arguments: list[str],
    says: str,
    initial: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run").mkdir()
    if "--resume" in arguments:
        (tmp_path / "run" / "run.json").write_text(
            '{"version": 1, "bo'
        )  # a kill can leave half of it
    assert (
        argosy("run", str(initial), "-o", str(tmp_path / "run"), "--steps", "1", "-q", *arguments)
        == 2
    )
    assert says in capsys.readouterr().err


def test_a_run_is_gone_on_with_from_its_own_particles_only(
    initial: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, run = tmp_path / "ic.hdf5", ["-o", str(tmp_path / "run"), "--steps", "1", "-q"]
    assert (
        argosy(
            "ic",
            "--box",
            "50",
            "--per-side",
            "16",
            "-z",
            "24",
            "--seed",
            "9",
            "-o",
            str(other),
            "--quiet",
        )
        == 0
    )
    assert argosy("run", str(initial), *run) == 0
    assert argosy("run", str(initial), *run, "--resume") == 0
    assert argosy("run", str(other), *run, "--resume") == 2
    assert "because the run there has another initial." in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["ic", "--redshift", "1e400", "-o", "x.hdf5"],
        ["ic", "--index", "1e9", "-o", "x.hdf5"],
        ["ic", "--seed", "-1", "-o", "x.hdf5"],
        ["ic", "--box", "inf", "-o", "x.hdf5"],
        ["plan", "-c", "two-cards", "-n", "1000", "--mesh", "-4"],
        ["plan", "-c", "two-cards", "-n", "1000", "--seed", "-1"],
        ["picture", "{initial}", "-o", "x.png", "--begin", "nan"],
        ["halos", "{initial}", "--least", "-1"],
    ],
    ids=" ".join,
)
def test_numbers_that_are_none_are_refused(
    arguments: list[str], initial: Path, tmp_path: Path
) -> None:
    given = [
        str(tmp_path / word) if word.startswith("x.") else word.format(initial=initial)
        for word in arguments
    ]
    assert argosy(*given, "-q") == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["9^99999999999", "0^-1", "1e400", "nan", "2^3^4", "-8^3", "10^2"])
def test_numbers_that_no_box_has_are_refused_at_once(text: str) -> None:
    with pytest.raises(InputError, match="--particles"):
        parse_count(text)
    assert (parse_count("512^3"), parse_count("1e9")) == (512**3, 10**9)


def run_process(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "argosy", "nbody", "run", *arguments, "--quiet"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, start_new_session=True, env=environment, stderr=subprocess.DEVNULL
    )


def state(folder: Path, number: int = 0) -> tuple[np.ndarray, np.ndarray]:
    particles = read_snapshot(folder / f"snapshot_{number:03d}.hdf5").particles
    return particles.positions, particles.momenta


def test_from_initial_conditions_to_a_picture(
    initial: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert (
        argosy(
            "run",
            str(initial),
            "-o",
            str(folder),
            "--steps",
            "6",
            "--snapshot",
            "1",
            "--json",
            "--quiet",
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == [str(folder / f"snapshot_00{number}.hdf5") for number in (0, 1)]
    assert read_snapshot(folder / "snapshot_000.hdf5").redshift == pytest.approx(1)
    last = str(folder / "snapshot_001.hdf5")
    assert argosy("power", last, "--quiet") == 0
    assert "(Mpc/h)^3" in capsys.readouterr().out
    assert argosy("power", last, "--json", "--quiet") == 0
    power = json.loads(capsys.readouterr().out)
    assert len(power["k"]) == len(power["power"]) == len(power["linear"]) > 8
    assert argosy("halos", last, "--least", "8", "--json", "--quiet") == 0
    assert all(size >= 8 for size in json.loads(capsys.readouterr().out)["sizes"])
    assert argosy("halos", last, "--least", "8", "--quiet") == 0
    assert "halos of at least 8 particles at z = 0" in capsys.readouterr().out
    assert (
        argosy("picture", last, "-o", str(tmp_path / "web.png"), "--pixels", "64", "--quiet") == 0
    )
    assert (tmp_path / "web.png").read_bytes()[1:4] == b"PNG"


def test_progress_says_how_long_it_will_take(
    initial: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        argosy(
            "run", str(initial), "-o", str(tmp_path / "run"), "--steps", "2", "--block-levels", "1"
        )
        == 0
    )
    assert "step 2 of 2, z = 0.00" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--order", "3lpt"],
            'error: --order: found "3lpt", expected one of zeldovich, 2lpt; did you mean "2lpt"?',
        ),
        (["--per-side", "2"], "error: per_side: found 2, expected 4 to 100,000 particles per side"),
        (
            ["--per-side", "9999999"],
            "error: per_side: found 9999999, expected 4 to 100,000 particles per side",
        ),
        (["--box", "-1"], "error: box: found -1.0, expected a size from 1e-06 to 1e+06 Mpc/h"),
    ],
)
def test_bad_options_are_told(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert argosy("ic", "-o", str(tmp_path / "ic.hdf5"), "--quiet", *arguments) == 2
    assert capsys.readouterr().err.strip() == message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(
    initial: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert (
        argosy("run", str(initial), "-o", str(tmp_path / "file" / "run"), "--steps", "1", "-q") == 2
    )
    assert "Cannot create the folder" in capsys.readouterr().err


def test_nothing_is_overwritten(
    initial: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run = ("run", str(initial), "-o", str(folder), "--quiet")
    assert argosy(*run, "--steps", "2") == 0
    before = (folder / "snapshot_000.hdf5").read_bytes()
    assert argosy(*run, "--steps", "2") == 2
    assert (
        "because the folder contains a run. Try another folder, or --resume"
        in capsys.readouterr().err
    )
    assert argosy(*run, "--steps", "3", "--resume") == 2
    assert (
        "the run there has another steps. Try the same options, or a new folder"
        in capsys.readouterr().err
    )
    assert argosy("ic", "-o", str(initial), "--quiet") == 2
    assert (folder / "snapshot_000.hdf5").read_bytes() == before


def test_a_killed_run_goes_on_to_the_same_bits(initial: Path, tmp_path: Path) -> None:
    common = [str(initial), "--steps", "30", "--restart-every", "1"]
    assert run_process(*common, "-o", str(tmp_path / "whole")).wait(300) == 0
    victim = run_process(*common, "-o", str(tmp_path / "killed"))
    mark = tmp_path / "killed" / "restart" / "restart.json"
    deadline = time.monotonic() + 120
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    assert not (tmp_path / "killed" / "snapshot_000.hdf5").exists(), "killed before its end"
    assert run_process(*common, "-o", str(tmp_path / "killed"), "--resume").wait(300) == 0
    for one, other in zip(state(tmp_path / "whole"), state(tmp_path / "killed"), strict=True):
        assert np.array_equal(one, other)


def test_processes_compute_the_same_box(initial: Path, tmp_path: Path) -> None:
    """1, 2 and 4 processes, one of the runs killed and resumed: all to the same bits."""
    pytest.importorskip("torch")
    common = [str(initial), "--steps", "12", "--restart-every", "1"]
    assert run_process(*common, "-o", str(tmp_path / "1")).wait(300) == 0
    assert run_process(*common, "-o", str(tmp_path / "4"), "--processes", "4").wait(300) == 0
    victim = run_process(*common, "-o", str(tmp_path / "2"), "--processes", "2")
    mark = tmp_path / "2" / "restart" / "restart.json"
    deadline = time.monotonic() + 120
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    assert (
        run_process(*common, "-o", str(tmp_path / "2"), "--processes", "2", "--resume").wait(300)
        == 0
    )
    for processes in ("2", "4"):
        for one, other in zip(state(tmp_path / "1"), state(tmp_path / processes), strict=True):
            assert np.array_equal(one, other)


def test_the_example_draws_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as it stands, with fewer particles and steps."""
    import runpy

    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "06_cosmic_web.py"))
    smaller = {"64": "12", "40": "3", "1000": "64"}
    steps = tuple(tuple(smaller.get(part, part) for part in step) for step in example["STEPS"])
    monkeypatch.setitem(example["draw"].__globals__, "STEPS", steps)
    assert example["draw"](tmp_path / "web") == 0
    assert (tmp_path / "web" / "web.png").stat().st_size > 500
    assert example["draw"](tmp_path / "web") == 2, "nothing is overwritten"
