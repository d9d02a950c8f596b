"""Fit constants of the cost model to measured runs, and report the errors on the other runs.

    (1)  error of a run    = | predicted / measured - 1 |
    (2)  what is minimised = the mean of | log predicted - log measured | over the runs to fit on,
         by the simplex of Nelder and Mead over the logarithms of the constants: no derivatives, no
         step size to choose, and a kink in the floor of a layer does not disturb it
    (3)  rank correlation  = Spearman's: how far the order of the predictions is that of the
         measurements
    (4)  to few runs many constants fit about as well. So (2) is weighed against prior knowledge:
         errors of 5 % are usual, and so are changes by 10 % of a constant that the catalogue has,
         or by a factor e of others. What is minimised is the sum of the errors over 0.05 and of
         half the squares of the constants' changes, in logarithms, over 0.1 or 1; with many runs
         the errors dominate
    (5)  a constant is *identified* by runs if doubling it would change their predictions by at
         least 1 %, root mean square, beyond what the other fitted constants can undo. One that is
         not identified stays as it was
    (6)  with few runs each is left out in turn. Constants that predict such a run no better than
         those before the fit are dropped

A prediction in closed form has errors of its own. So before a fit every run is simulated once in
the exact engine, and the closed form is scaled to that result at the start. A constant is kept
inside what is physically possible (``LIMITS``). Runs are split by a seed; with few runs each is
left out in turn (``leave_one_out``), so that no figure is of a run that was fitted on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from argosy.calibrate.predict import exact_seconds, peak_bytes, quick_seconds
from argosy.calibrate.run import MeasuredRun, Measurements
from argosy.cluster.trace import FloatArray
from argosy.cost.calibration import Calibration
from argosy.cost.compute import BACKWARD_OVER_MEAN, FORWARD_OVER_MEAN
from argosy.errors import bad_input, closest

LIMITS = {
    "peak": (0.05, 1.0),
    "forward_peak": (0.05, 1.0),
    "backward_peak": (0.05, 1.0),
    "attention_peak": (0.02, 1.0),
    "passes": (0.5, 20.0),
    "forward_floor": (1e-6, 0.1),
    "backward_floor": (1e-6, 0.1),
    "split_launches": (0.5, 5.0),
    "gathered": (0.1, 100.0),
    "forward_start": (1e-7, 0.1),
    "backward_start": (1e-7, 0.1),
    "profile_factor": (0.3, 3.0),
    "spread": (1e-3, 0.3),
    "bandwidth": (0.01, 1.0),
    "nic_bandwidth": (0.01, 1.0),
    "latency": (1e-7, 0.1),
    "reduction": (0.01, 1.0),
    "process_bytes": (1e6, 3e10),
    "activation_factor": (0.5, 4.0),
}
"""Constants that can be fitted, and their possible ranges. ``peak`` stands for both shares of the
peak, forward and backward, in their usual ratio: whole iterations cannot distinguish them."""
ABOUT_MEMORY = ("process_bytes", "activation_factor")
"""Constants that are fitted to peak bytes; the others are fitted to seconds."""

# Largest number of constants about seconds at a time: more would be a regression, not a
# calibration.
MOST = 5

_USUAL = {
    "gathered": 1.0,
    "forward_start": 5e-4,
    "backward_start": 5e-4,
    "latency": 1e-4,
    "process_bytes": 1e9,
}
"""Starting values of the constants whose default is 0, which has no logarithm."""
# Largest number of runs for which each is left out in turn (6).
_MOST_LEFT_OUT = 16
# Usual error of a prediction, in logarithms (4).
_USUAL_ERROR = 0.05
# Usual changes, in logarithms, of the constants that the catalogue has by device kind (4).
_USUAL_CHANGE = {
    "peak": 0.1,
    "forward_peak": 0.1,
    "backward_peak": 0.1,
    "attention_peak": 0.1,
    "passes": 0.1,
}
# Usual change, in logarithms, of all other constants (4).
_ANY_CHANGE = 1.0
# Change of a constant's logarithm by which (5) is measured.
_PROBE = -0.05
# Least change of predictions by which a constant counts as identified (5).
_LEAST_EFFECT = 0.01
# Edge of the first simplex, in logarithms.
_STEP = 0.25


@dataclass(frozen=True, kw_only=True)
class Errors:
    """A summary of the errors that predictions have."""

    count: int
    median: float
    mean: float
    ninetieth: float
    """90th percentile: nine of ten runs have smaller errors."""
    worst: float
    rank: float
    """Rank correlation (3); 1 means the same order."""


def errors(predicted: FloatArray, measured: FloatArray) -> Errors:
    """Return the errors (1) and the rank correlation (3) of predictions."""
    off = np.abs(predicted / measured - 1)
    return Errors(
        count=len(off),
        median=float(np.median(off)),
        mean=float(off.mean()),
        ninetieth=float(np.quantile(off, 0.9)),
        worst=float(off.max()),
        rank=rank_correlation(predicted, measured),
    )


def rank_correlation(first: FloatArray, second: FloatArray) -> float:
    """Return Spearman's rank correlation (3).

    >>> rank_correlation(np.array([1.0, 2.0, 4.0]), np.array([10.0, 30.0, 20.0]))
    0.5
    """
    if len(first) < 2:
        return 1.0
    first, second = _ranks(first), _ranks(second)
    spread = float(np.std(first) * np.std(second))
    return (
        float(np.mean((first - first.mean()) * (second - second.mean()))) / spread
        if spread
        else 0.0
    )


def _ranks(values: FloatArray) -> FloatArray:
    """Return the ranks of values from 0; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def split_runs(
    runs: Sequence[MeasuredRun], share: float, seed: int
) -> tuple[tuple[MeasuredRun, ...], tuple[MeasuredRun, ...]]:
    """Return a random ``share`` of the runs to fit on, and the rest; equal seeds give equal
    splits."""
    order = np.random.default_rng(seed).permutation(len(runs))
    chosen = set(order[: round(share * len(runs))].tolist())
    fitted = tuple(run for index, run in enumerate(runs) if index in chosen)
    return fitted, tuple(run for index, run in enumerate(runs) if index not in chosen)


def leave_one_out(measured: Measurements, names: Sequence[str], start: Calibration) -> list[Fitted]:
    """Return, per run, the constants that are fitted on all other runs."""
    runs = measured.runs
    return [
        fit_to(measured, runs[:index] + runs[index + 1 :], names, start, leave_out=False)
        for index in range(len(runs))
    ]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A result that a fit returns."""

    calibration: Calibration
    unidentified: tuple[str, ...] = ()
    """Constants that the runs do not identify (5); they stay as they were."""
    left_out: float | None = None
    """Mean error of the seconds of each run with constants fitted on the others (6); None if there
    are many runs."""
    before: float | None = None
    """Mean error of the seconds of each run without any fit; None if there are many runs."""

    @property
    def is_kept(self) -> bool:
        """Return whether fitted constants predict a left-out run better than the constants before
        the fit."""
        return self.left_out is None or self.before is None or self.left_out < self.before


def fit_to(
    measured: Measurements,
    runs: Sequence[MeasuredRun],
    names: Sequence[str],
    start: Calibration,
    *,
    leave_out: bool = True,
) -> Fitted:
    """Fit constants by (2) to (5), separately for seconds and for bytes, because no constant
    concerns both; also by (6) if ``leave_out``."""
    check_names(names)
    weighed = [run for run in runs if run.peak_bytes is not None]
    exact = np.array([exact_seconds(measured, run, start) for run in runs])
    scale = exact / quick_seconds(measured, runs, start) if len(runs) else exact

    def seconds(calibration: Calibration) -> FloatArray:
        return scale * quick_seconds(measured, runs, calibration)

    def memory(calibration: Calibration) -> FloatArray:
        return peak_bytes(weighed, calibration)

    about_time = [name for name in names if name not in ABOUT_MEMORY]
    about_memory = [name for name in names if name in ABOUT_MEMORY]
    first = _fitted(
        seconds,
        runs,
        np.array([run.seconds for run in runs]),
        about_time,
        start,
        leave_out=leave_out,
    )
    weights = np.array([run.peak_bytes for run in weighed], dtype=float)
    second = _fitted(memory, weighed, weights, about_memory, first.calibration, leave_out=False)
    return replace(
        first,
        calibration=second.calibration,
        unidentified=(*first.unidentified, *second.unidentified),
    )


Prediction = Callable[[Calibration], FloatArray]
"""Function that returns the predictions of all runs of a fit."""


def _fitted(
    predict: Prediction,
    runs: Sequence[MeasuredRun],
    measured: FloatArray,
    names: Sequence[str],
    start: Calibration,
    *,
    leave_out: bool,
) -> Fitted:
    if not names or not len(measured):
        return Fitted(calibration=start)
    usual = {name: _value(start, name, runs) for name in names}
    identified = _identified(predict, names, start, usual)
    unidentified = tuple(name for name in names if name not in identified)
    if not identified:
        return Fitted(calibration=start, unidentified=unidentified)
    truth, begin = np.log(measured), np.log([usual[name] for name in identified])
    everything = np.ones(len(truth), dtype=bool)
    fitted = Fitted(
        calibration=_minimised(predict, truth, everything, identified, start, begin),
        unidentified=unidentified,
    )
    if not leave_out or len(truth) > _MOST_LEFT_OUT:
        return fitted
    off = []
    for left in range(len(truth)):
        others = np.arange(len(truth)) != left
        constants = _minimised(predict, truth, others, identified, start, begin)
        off.append(abs(np.exp(np.log(predict(constants))[left] - truth[left]) - 1))
    before = float(np.mean(np.abs(predict(start) / measured - 1)))
    fitted = replace(fitted, left_out=float(np.mean(off)), before=before)
    return fitted if fitted.is_kept else replace(fitted, calibration=start)


def _minimised(
    predict: Prediction,
    truth: FloatArray,
    counted: NDArray[np.bool_],
    names: Sequence[str],
    start: Calibration,
    begin: FloatArray,
) -> Calibration:
    """Return the constants that minimise (2) with (4) over the runs that are ``counted``."""
    usual = np.array([_USUAL_CHANGE.get(name, _ANY_CHANGE) for name in names])

    def loss(point: FloatArray) -> float:
        off = np.abs(np.log(predict(_at(start, names, point))) - truth)[counted]
        changes = 0.5 * np.sum(((point - begin) / usual) ** 2)
        return float(np.sum(off / _USUAL_ERROR) + changes) / len(off)

    return _at(start, names, nelder_mead(loss, begin))


def _identified(
    predict: Prediction, names: Sequence[str], start: Calibration, usual: Mapping[str, float]
) -> list[str]:
    """Return the constants that the runs identify (5): repeatedly drop the least identified one
    until all that remain are identified."""
    remaining = list(names)
    begin = {name: np.log(value) for name, value in usual.items()}
    base = np.log(predict(_at(start, remaining, np.array([begin[name] for name in remaining]))))
    columns = {}
    for name in remaining:
        point = np.array([begin[constant] + _PROBE * (constant == name) for constant in remaining])
        columns[name] = (np.log(predict(_at(start, remaining, point))) - base) / _PROBE
    while remaining:
        effects = {}
        for name in remaining:
            others = np.array([columns[constant] for constant in remaining if constant != name]).T
            column = columns[name]
            if others.size:
                column = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
            effects[name] = float(np.sqrt(np.mean(column**2))) * np.log(2)
        least = min(remaining, key=lambda name: effects[name])
        if effects[least] >= _LEAST_EFFECT:
            break
        remaining.remove(least)
    return remaining


def check_names(names: Sequence[str]) -> None:
    """Raise an ``InputError`` unless the names are different constants that can be fitted
    together."""
    for name in names:
        if name not in LIMITS:
            expected = f"a constant that can be fitted ({', '.join(LIMITS)})"
            raise bad_input(expected, name, "fit", suggestion=closest(name, LIMITS))
    about_time = [name for name in names if name not in ABOUT_MEMORY]
    if len(about_time) > MOST or len(set(names)) < len(names):
        raise bad_input(
            f"different constants, at most {MOST} about seconds", f"{', '.join(names)}", "fit"
        )


def _value(calibration: Calibration, name: str, runs: Sequence[MeasuredRun]) -> float:
    """Return the value at which the simplex begins: a default of 0 is replaced because it has no
    logarithm, and a constant by device kind begins with the value of the first run's kind."""
    begin = None if name == "peak" else getattr(calibration, name)
    if begin is None:
        kind = runs[0].cluster.device(runs[0].plan.devices[0]).kind
        reached = kind.tuned if runs[0].under(calibration).tuned_kernels else kind.reached
        share = reached.share(runs[0].chain.dtype)
        by_kind = {
            "peak": share,
            "forward_peak": FORWARD_OVER_MEAN * share,
            "backward_peak": BACKWARD_OVER_MEAN * share,
            "attention_peak": reached.attention,
            "passes": reached.passes,
            "nic_bandwidth": calibration.bandwidth,
        }
        begin = by_kind[name]
    begin = float(begin) or _USUAL[name]
    return min(max(begin, LIMITS[name][0]), LIMITS[name][1])


def _at(start: Calibration, names: Sequence[str], point: FloatArray) -> Calibration:
    """Return ``start`` with the constants at a point of the simplex, kept inside their limits."""
    values = {
        name: float(np.clip(np.exp(x), *LIMITS[name])) for name, x in zip(names, point, strict=True)
    }
    if "peak" in values:
        share = values.pop("peak")
        values["forward_peak"] = min(1.0, FORWARD_OVER_MEAN * share)
        values["backward_peak"] = min(1.0, BACKWARD_OVER_MEAN * share)
    return replace(start, **values)  # type: ignore[arg-type]


def nelder_mead(
    loss: Callable[[FloatArray], float], start: FloatArray, *, steps: int = 200
) -> FloatArray:
    """Return a point near ``start`` at which ``loss`` is least, by reflecting, expanding,
    contracting and shrinking a simplex.

    >>> point = nelder_mead(lambda x: float((x[0] - 1) ** 2 + (x[1] + 2) ** 2), np.zeros(2))
    >>> point.round(2).tolist()
    [1.0, -2.0]
    """
    points = [np.asarray(start, dtype=float)]
    points += [points[0] + _STEP * axis for axis in np.eye(len(start))]
    values = [loss(point) for point in points]
    for _ in range(steps):
        order = sorted(range(len(points)), key=lambda index: (values[index], index))
        points, values = [points[index] for index in order], [values[index] for index in order]
        if values[-1] - values[0] < 1e-5 and max(np.ptp(points, axis=0)) < 1e-2:
            break
        centre = np.mean(points[:-1], axis=0)
        replacement = _better(loss, centre, points[-1], values[0], values[-2], values[-1])
        if replacement is not None:
            points[-1], values[-1] = replacement
            continue
        points = [points[0], *(points[0] + 0.5 * (point - points[0]) for point in points[1:])]
        values = [values[0], *(loss(point) for point in points[1:])]
    return points[int(np.argmin(values))]


def _better(
    loss: Callable[[FloatArray], float],
    centre: FloatArray,
    worst: FloatArray,
    least: float,
    second: float,
    most: float,
) -> tuple[FloatArray, float] | None:
    """Return a point and its loss to replace the worst one, beyond the centre or on the way to it;
    None if the simplex should shrink."""
    reflected = 2 * centre - worst
    value = loss(reflected)
    if value < least:
        further = 3 * centre - 2 * worst
        beyond = loss(further)
        return (further, beyond) if beyond < value else (reflected, value)
    if value < second:
        return reflected, value
    contracted = centre + 0.5 * ((reflected if value < most else worst) - centre)
    inner = loss(contracted)
    return (contracted, inner) if inner < min(value, most) else None
