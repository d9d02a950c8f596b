"""The cost model against runs that others measured; the figures are in docs/validation.md."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.measured_data import GH200, MIXED, VTRAIN, needs_sailor, needs_vtrain

from argosy.calibrate.fit import errors, fit_to, leave_one_out, split_runs
from argosy.calibrate.predict import exact_seconds, peak_bytes
from argosy.calibrate.run import MeasuredRun, Measurements
from argosy.calibrate.sailor import read_sailor_runs
from argosy.calibrate.vtrain import read_vtrain
from argosy.cost.calibration import Calibration

CONSTANTS = ("passes", "forward_floor", "backward_floor", "bandwidth")
BLOCKING = Calibration(blocking=True)


def seconds_of(runs: tuple[MeasuredRun, ...]) -> np.ndarray:
    return np.array([run.seconds for run in runs])


@needs_vtrain
def test_vtrain_with_four_constants() -> None:
    """Fitted on a part of one half, judged by the exact engine on a part of the other; whole halves
    are a benchmark."""
    measured = read_vtrain(VTRAIN)
    assert len(measured.runs) == 1440
    fitted, held_out = split_runs(measured.runs, 0.5, seed=0)
    calibration = fit_to(measured, fitted[::6], CONSTANTS, Calibration()).calibration
    judged = held_out[::3]
    predicted = np.array([exact_seconds(measured, run, calibration) for run in judged])
    found = errors(predicted, seconds_of(judged))
    assert found.median <= 0.08
    assert found.rank >= 0.97


def left_out(measured: Measurements, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes of every run, by constants that were fitted on the others."""
    constants = [one.calibration for one in leave_one_out(measured, names, BLOCKING)]
    pairs = list(zip(measured.runs, constants, strict=True))
    seconds = np.array([exact_seconds(measured, run, one) for run, one in pairs])
    return seconds, np.array([peak_bytes([run], one)[0] for run, one in pairs])


@needs_sailor
def test_sailors_gh200_runs() -> None:
    measured = read_sailor_runs(GH200)
    assert len(measured.runs) == 15
    seconds, memory = left_out(measured, ("bandwidth", "process_bytes", "activation_factor"))
    assert errors(seconds, seconds_of(measured.runs)).mean <= 0.08
    assert (
        errors(memory, np.array([run.peak_bytes for run in measured.runs], dtype=float)).mean
        <= 0.15
    )


@needs_sailor
def test_sailors_mixed_runs_with_nothing_fitted() -> None:
    measured = read_sailor_runs(MIXED)
    predicted = np.array([exact_seconds(measured, run, BLOCKING) for run in measured.runs])
    assert errors(predicted, seconds_of(measured.runs)).mean <= 0.08


@needs_sailor
def test_waiting_for_transfers_is_what_explains_the_mixed_runs() -> None:
    measured = read_sailor_runs(MIXED)
    overlapped = replace(BLOCKING, blocking=False)
    predicted = np.array([exact_seconds(measured, run, overlapped) for run in measured.runs])
    assert errors(predicted, seconds_of(measured.runs)).mean > 0.15
