"""Study measured runs: fit constants on some of them, and report how far off the predictions are on
the others.

Runs that were fitted on are never judged: either a random share is held out, or, if runs are few,
each is predicted with constants that were fitted on all the others. The calibration that a study
returns is fitted on the runs that the figures allow: the share, or all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from argosy.calibrate.fit import (
    ABOUT_MEMORY,
    Errors,
    Fitted,
    check_names,
    errors,
    fit_to,
    leave_one_out,
    split_runs,
)
from argosy.calibrate.predict import exact_seconds, peak_bytes
from argosy.calibrate.run import MeasuredRun, Measurements
from argosy.cost.calibration import Calibration
from argosy.errors import bad_input

# Number of runs below which each is left out in turn.
FEW = 40
# Least number of runs that anything is fitted on.
LEAST = 4


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A run that is compared with its prediction."""

    run: MeasuredRun
    seconds: float
    peak_bytes: float

    @property
    def error(self) -> float:
        """Return the relative error of the seconds, signed."""
        return self.seconds / self.run.seconds - 1


@dataclass(frozen=True, kw_only=True)
class Study:
    """A result that a study returns."""

    measured: Measurements
    names: tuple[str, ...]
    """Constants that were fitted."""
    method: str
    """Description of the runs that were fitted on and judged, for people."""
    calibration: Calibration
    judged: tuple[Judged, ...]
    unidentified: tuple[str, ...] = ()
    """Constants that the runs do not identify; they stay as they were."""
    dropped: str = ""
    """Reason why fitted constants were dropped, for people; empty if they were not."""

    @property
    def seconds(self) -> Errors:
        """Return the errors of the seconds."""
        return errors(*_columns([(judged.seconds, judged.run.seconds) for judged in self.judged]))

    @property
    def memory(self) -> Errors | None:
        """Return the errors of the peak bytes; None if no run measured them."""
        weighed = [judged for judged in self.judged if judged.run.peak_bytes]
        pairs = [(judged.peak_bytes, judged.run.peak_bytes) for judged in weighed]
        return errors(*_columns(pairs)) if pairs else None

    def worst(self, count: int) -> list[Judged]:
        """Return the runs with the largest errors of the seconds."""
        return sorted(self.judged, key=lambda judged: -abs(judged.error))[:count]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures of the study for a file."""
        memory = self.memory
        return {
            "method": self.method,
            **({"unidentified": self.unidentified} if self.unidentified else {}),
            "seconds": asdict(self.seconds),
            **({"peak_bytes": asdict(memory)} if memory else {}),
        }


def _columns(pairs: Sequence[tuple[float, float | None]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, dtype=float)
    return table[:, 0], table[:, 1]


def default_names(measured: Measurements) -> tuple[str, ...]:
    """Return the constants that are worth fitting: none of the roofline if layer times were
    measured, none at all on a handful of runs, none about memory if memory was not measured."""
    if len(measured.runs) < LEAST:
        return ()
    kinds = {device.kind.name for run in measured.runs for device in run.cluster.devices}
    names = (
        ()
        if kinds <= measured.profiles.keys()
        else ("peak", "attention_peak", "passes", "forward_floor")
    )
    if any(len(run.plan.devices) > 1 for run in measured.runs):
        names = (*names, "bandwidth")
    if sum(run.peak_bytes is not None for run in measured.runs) >= LEAST:
        names = (*names, *ABOUT_MEMORY)
    return names


def study(
    measured: Measurements, names: Sequence[str] | None = None, *, share: float = 0.5, seed: int = 0
) -> Study:
    """Fit ``names`` (by default those worth fitting) and judge the runs that were not fitted on."""
    names = default_names(measured) if names is None else tuple(names)
    check_names(names)
    start = replace(Calibration(), blocking=measured.blocking, prefetch=measured.prefetch)
    runs = measured.runs
    if not names:
        return Study(
            measured=measured,
            names=(),
            method="nothing fitted",
            calibration=start,
            judged=tuple(_judged(measured, run, start) for run in runs),
        )
    if len(runs) < LEAST:
        raise bad_input(f"at least {LEAST} runs to fit on", len(runs), measured.source)
    if len(runs) < FEW:
        fit = fit_to(measured, runs, names, start)
        constants = [
            without_run.calibration if fit.is_kept else start
            for without_run in leave_one_out(measured, names, start)
        ]
        return Study(
            measured=measured,
            names=names,
            method=f"each of {len(runs)} runs left out in turn",
            calibration=fit.calibration,
            unidentified=fit.unidentified,
            dropped=_dropped(fit),
            judged=tuple(
                _judged(measured, run, calibration)
                for run, calibration in zip(runs, constants, strict=True)
            ),
        )
    fitted, held_out = split_runs(runs, share, seed)
    fit = fit_to(measured, fitted, names, start)
    return Study(
        measured=measured,
        names=names,
        method=f"fitted on {len(fitted)} runs (seed {seed}), judged on {len(held_out)} others",
        calibration=fit.calibration,
        unidentified=fit.unidentified,
        judged=tuple(_judged(measured, run, fit.calibration) for run in held_out),
    )


def _dropped(fit: Fitted) -> str:
    if fit.is_kept or fit.left_out is None or fit.before is None:
        return ""
    return (
        f"constants about seconds stay as they were: fitted ones miss a run that is left out by "
        f"{100 * fit.left_out:.1f} % in the mean, those before by {100 * fit.before:.1f} %"
    )


def _judged(measured: Measurements, run: MeasuredRun, calibration: Calibration) -> Judged:
    seconds = exact_seconds(measured, run, calibration)
    return Judged(run=run, seconds=seconds, peak_bytes=float(peak_bytes([run], calibration)[0]))
