"""Fitting constants of the cost model to measured runs, and saying how far off the others are.

    (1)  error of a run    = | predicted / measured - 1 |
    (2)  what is minimised = the mean of | log predicted - log measured | over the runs to fit on,
         by the simplex of
                             Nelder and Mead over the logarithms of the constants: no derivatives,
                             no step size to choose, and a kink in the floor of a layer does not
                             disturb it
    (3)  rank correlation = Spearman's: how far the order of the predictions is that of the
         measurements

    (4)  to few runs many constants fit about as well. So (2) is weighed against what was known
         before: errors of 5 % are usual, and so are changes by 10 % of a constant that the
         catalogue has, or by a factor e of others. What is minimised is the sum of the errors over
         0.05 and of half the squares of the constants' changes, in logarithms, over 0.1 or 1; with
         many runs the errors alone count
    (5)  a constant is *identified* by runs if doubling it would change their predictions by 1 % at
         least, root mean square, beyond what the other fitted constants can undo. One that is not
         stays as it was
    (6)  with few runs each is left out in turn. Constants that predict such a run no better than
         those before the fit are dropped

In closed form a prediction is off by what it leaves out. Before a fit every run is played once in
the exact engine, and the closed form is scaled by what that gives at the start. A constant is kept
inside what is physically possible (``LIMITS``). Runs are split by a seed; with few runs every one
is left out in turn (``leave_one_out``), so that no figure is of a run that was fitted on.
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
"""Constants that can be fitted, and what is possible. ``peak`` stands for both shares of the peak,
forward and backward, in their usual ratio: whole iterations do not tell them apart."""
ABOUT_MEMORY = ("process_bytes", "activation_factor")
"""Those that are fitted to peak bytes; the others are fitted to seconds."""

MOST = 5
"""Constants about seconds at a time: more would be a regression, not a calibration."""

_USUAL = {
    "gathered": 1.0,
    "forward_start": 5e-4,
    "backward_start": 5e-4,
    "latency": 1e-4,
    "process_bytes": 1e9,
}
"""Of what is 0 until something is fitted, where to begin."""
_MOST_LEFT_OUT = 16
"""Runs of which each is left out in turn, (6)."""
_USUAL_ERROR = 0.05
_USUAL_CHANGE = {
    "peak": 0.1,
    "forward_peak": 0.1,
    "backward_peak": 0.1,
    "attention_peak": 0.1,
    "passes": 0.1,
}
_ANY_CHANGE = 1.0
"""Of the logarithm of a constant, (4): of those that the catalogue has by kind, and of others."""
_PROBE = -0.05
"""Change of a logarithm by which (5) is measured."""
_TOLD = 0.01
"""Least change of predictions in (5)."""
_STEP = 0.25
"""Edge of the first simplex, in logarithms."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far predictions are off."""

    count: int
    median: float
    mean: float
    ninetieth: float
    """Nine of ten runs are off by less."""
    worst: float
    rank: float
    """(3); 1 = the same order."""


def errors(predicted: FloatArray, measured: FloatArray) -> Errors:
    """(1) and (3)"""
    off = np.abs(predicted / measured - 1)
    return Errors(
        count=len(off),
        median=float(np.median(off)),
        mean=float(off.mean()),
        ninetieth=float(np.quantile(off, 0.9)),
        worst=float(off.max()),
        rank=rank_correlation(predicted, measured),
    )


def rank_correlation(one: FloatArray, other: FloatArray) -> float:
    """(3)

    >>> rank_correlation(np.array([1.0, 2.0, 4.0]), np.array([10.0, 30.0, 20.0]))
    0.5
    """
    if len(one) < 2:
        return 1.0
    first, second = _ranks(one), _ranks(other)
    spread = float(np.std(first) * np.std(second))
    return (
        float(np.mean((first - first.mean()) * (second - second.mean()))) / spread
        if spread
        else 0.0
    )


def _ranks(values: FloatArray) -> FloatArray:
    """From 0; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: FloatArray = (np.cumsum(counts) - (counts + 1) / 2)[inverse]
    return ranks


def split_runs(
    runs: Sequence[MeasuredRun], share: float, seed: int
) -> tuple[tuple[MeasuredRun, ...], tuple[MeasuredRun, ...]]:
    """A random ``share`` of the runs to fit on, and the rest; the same for the same seed."""
    order = np.random.default_rng(seed).permutation(len(runs))
    chosen = set(order[: round(share * len(runs))].tolist())
    fitted = tuple(run for index, run in enumerate(runs) if index in chosen)
    return fitted, tuple(run for index, run in enumerate(runs) if index not in chosen)


def leave_one_out(measured: Measurements, names: Sequence[str], start: Calibration) -> list[Fitted]:
    """Per run, the constants fitted on all the others."""
    runs = measured.runs
    return [
        fit_to(measured, runs[:index] + runs[index + 1 :], names, start, leave_out=False)
        for index in range(len(runs))
    ]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What a fit ends with."""

    calibration: Calibration
    unidentified: tuple[str, ...] = ()
    """(5): constants that the runs do not tell, left as they were."""
    left_out: float | None = None
    """(6): mean error of the seconds of each run with constants fitted on the others; None if runs
    are many."""
    before: float | None = None
    """The same without any fit."""

    @property
    def is_kept(self) -> bool:
        """Whether fitted constants predict a run that was left out better than those before."""
        return self.left_out is None or self.before is None or self.left_out < self.before


def fit_to(
    measured: Measurements,
    runs: Sequence[MeasuredRun],
    names: Sequence[str],
    start: Calibration,
    *,
    leave_out: bool = True,
) -> Fitted:
    """(2) to (5), for seconds and for bytes apart: no constant is about both; (6) if
    ``leave_out``."""
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
"""Of all runs of a fit."""


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
    told = _identified(predict, names, start, usual)
    unidentified = tuple(name for name in names if name not in told)
    if not told:
        return Fitted(calibration=start, unidentified=unidentified)
    truth, begin = np.log(measured), np.log([usual[name] for name in told])
    everything = np.ones(len(truth), dtype=bool)
    found = Fitted(
        calibration=_minimised(predict, truth, everything, told, start, begin),
        unidentified=unidentified,
    )
    if not leave_out or len(truth) > _MOST_LEFT_OUT:
        return found
    off = []
    for left in range(len(truth)):
        others = np.arange(len(truth)) != left
        constants = _minimised(predict, truth, others, told, start, begin)
        off.append(abs(np.exp(np.log(predict(constants))[left] - truth[left]) - 1))
    before = float(np.mean(np.abs(predict(start) / measured - 1)))
    found = replace(found, left_out=float(np.mean(off)), before=before)
    return found if found.is_kept else replace(found, calibration=start)


def _minimised(
    predict: Prediction,
    truth: FloatArray,
    counted: NDArray[np.bool_],
    names: Sequence[str],
    start: Calibration,
    begin: FloatArray,
) -> Calibration:
    """(2) with (4), over the runs that are ``counted``."""
    usual = np.array([_USUAL_CHANGE.get(name, _ANY_CHANGE) for name in names])

    def loss(point: FloatArray) -> float:
        off = np.abs(np.log(predict(_at(start, names, point))) - truth)[counted]
        changes = 0.5 * np.sum(((point - begin) / usual) ** 2)
        return float(np.sum(off / _USUAL_ERROR) + changes) / len(off)

    return _at(start, names, nelder_mead(loss, begin))


def _identified(
    predict: Prediction, names: Sequence[str], start: Calibration, usual: Mapping[str, float]
) -> list[str]:
    """(5): drop the constant that the runs tell least of, until they tell enough of all that are
    left."""
    left = list(names)
    begin = {name: np.log(value) for name, value in usual.items()}
    base = np.log(predict(_at(start, left, np.array([begin[name] for name in left]))))
    columns = {}
    for name in left:
        point = np.array([begin[other] + _PROBE * (other == name) for other in left])
        columns[name] = (np.log(predict(_at(start, left, point))) - base) / _PROBE
    while left:
        told = {}
        for name in left:
            others = np.array([columns[other] for other in left if other != name]).T
            column = columns[name]
            if others.size:
                column = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
            told[name] = float(np.sqrt(np.mean(column**2))) * np.log(2)
        least = min(left, key=lambda name: told[name])
        if told[least] >= _TOLD:
            break
        left.remove(least)
    return left


def check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in LIMITS:
            expected = f"a constant that can be fitted ({', '.join(LIMITS)})"
            raise bad_input(expected, name, where="fit", suggestion=closest(name, LIMITS))
    about_time = [name for name in names if name not in ABOUT_MEMORY]
    if len(about_time) > MOST or len(set(names)) < len(names):
        raise bad_input(
            f"different constants, at most {MOST} about seconds", f"{', '.join(names)}", where="fit"
        )


def _value(calibration: Calibration, name: str, runs: Sequence[MeasuredRun]) -> float:
    """Where the simplex begins; nothing has no logarithm, and what is by kind begins as the first
    run's kind has it."""
    begin = None if name == "peak" else getattr(calibration, name)
    if begin is None:
        kind = runs[0].cluster.device(runs[0].plan.devices[0]).kind
        share = kind.reached.share(runs[0].chain.dtype)
        by_kind = {
            "peak": share,
            "forward_peak": FORWARD_OVER_MEAN * share,
            "backward_peak": BACKWARD_OVER_MEAN * share,
            "attention_peak": kind.reached.attention,
            "passes": kind.reached.passes,
            "nic_bandwidth": calibration.bandwidth,
        }
        begin = by_kind[name]
    begin = float(begin) or _USUAL[name]
    return min(max(begin, LIMITS[name][0]), LIMITS[name][1])


def _at(start: Calibration, names: Sequence[str], point: FloatArray) -> Calibration:
    """``start`` with the constants at a point of the simplex, kept inside their limits."""
    values = {
        name: float(np.clip(np.exp(x), *LIMITS[name])) for name, x in zip(names, point, strict=True)
    }
    if "peak" in values:
        share = values.pop("peak")
        values["forward_peak"] = min(1.0, FORWARD_OVER_MEAN * share)
        values["backward_peak"] = min(1.0, BACKWARD_OVER_MEAN * share)
    return replace(start, **values)  # type: ignore[arg-type]


def nelder_mead(
    loss: Callable[[FloatArray], float],
    start: FloatArray,
    *,
    tolerance: float = 1e-5,
    steps: int = 200,
) -> FloatArray:
    """A point near ``start`` where ``loss`` is least: reflect, expand, contract, shrink.

    >>> nelder_mead(lambda x: float((x[0] - 1) ** 2 + (x[1] + 2) ** 2), np.zeros(2)).round(2).tolist()
    [1.0, -2.0]
    """
    points = [np.asarray(start, dtype=float)]
    points += [points[0] + _STEP * axis for axis in np.eye(len(start))]
    values = [loss(point) for point in points]
    for _ in range(steps):
        order = sorted(range(len(points)), key=lambda index: (values[index], index))
        points, values = [points[index] for index in order], [values[index] for index in order]
        if values[-1] - values[0] < tolerance and max(np.ptp(points, axis=0)) < 1e-2:
            break
        centre = np.mean(points[:-1], axis=0)
        found = _better(loss, centre, points[-1], values[0], values[-2], values[-1])
        if found is not None:
            points[-1], values[-1] = found
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
    """A point to put in place of the worst, beyond the centre or on the way to it; None: shrink the
    simplex."""
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
