"""The winner's curse: how much slower the plan that is predicted to be best is than predicted.

``python -m benchmarks selection`` compares ``cost.uncertainty`` (5) with two things that share no
code with it:

    simulated   n true times, the logarithms of which are normal with deviation s, are predicted with a residual r; the
                plan with the least prediction is chosen, 20,000 times
    measured    the 1,440 runs of vTrain's table, grouped by model, batch and number of devices: of the plans of each
                job the one with the least prediction is chosen, and its measured time is compared with its prediction
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import numpy as np

from argosy.calibrate.predict import quick_seconds
from argosy.calibrate.vtrain import read_vtrain
from argosy.cluster.trace import FloatArray
from argosy.cost.calibration import Calibration
from argosy.cost.uncertainty import PLANS_APART, RESIDUAL, optimism
from benchmarks.reality import VTRAIN
from benchmarks.registry import Benchmark, Row

CONSTANTS = Calibration(
    forward_peak=1.0, backward_peak=0.966, passes=4.73, forward_floor=1.11e-3, bandwidth=0.391
)
"""Those that half of vTrain's runs were fitted with (docs/validation.md)."""
DRAWS = 20_000
SIZES = ((4, 7), (8, 15), (16, 26))
"""Plans of a job, from and to."""


def simulated(
    num_plans: int, residual: float, apart: float, *, draws: int = DRAWS, seed: int = 0
) -> float:
    """By how much the chosen of so many plans is slower than predicted, as a mean of logarithms."""
    random = np.random.default_rng(seed)
    true = apart * random.standard_normal((draws, num_plans))
    predicted = true + residual * random.standard_normal((draws, num_plans))
    chosen = predicted.argmin(axis=1)[:, None]
    return float(np.mean(np.take_along_axis(true - predicted, chosen, axis=1)))


@cache
def jobs() -> tuple[tuple[FloatArray, FloatArray], ...]:
    """Per job of vTrain's table the logarithms of what is predicted and of what was measured for
    each of its plans."""
    table = read_vtrain(VTRAIN)
    predicted = np.log(quick_seconds(table, table.runs, CONSTANTS))
    measured = np.log([run.seconds for run in table.runs])
    measured -= np.mean(measured - predicted)  # what a calibration on all runs would undo
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, run in enumerate(table.runs):
        found[
            run.chain.name, run.chain.sequence_length, run.plan.global_batch, len(run.plan.devices)
        ].append(index)
    return tuple((predicted[members], measured[members]) for members in found.values())


def measure() -> list[Row]:
    rows = []
    for count in (2, 8, 26):
        for what, value in (
            ("simulated", simulated(count, RESIDUAL, PLANS_APART)),
            ("by (5)", optimism(count, RESIDUAL)),
        ):
            rows.append(
                Row(
                    what=f"chosen of {count} plans is slower than predicted, {what}",
                    value=100 * value,
                    unit="%",
                )
            )
    for low, high in SIZES if VTRAIN.exists() else ():
        members = [job for job in jobs() if low <= len(job[0]) <= high]
        slower = [
            float((measured - predicted)[predicted.argmin()]) for predicted, measured in members
        ]
        expected = np.mean([optimism(len(predicted), RESIDUAL) for predicted, _ in members])
        name = f"{len(members)} jobs of vTrain with {low} to {high} plans"
        rows.append(
            Row(
                what=f"{name}: chosen is slower than predicted",
                value=100 * float(np.mean(slower)),
                unit="%",
            )
        )
        error = float(np.std(slower)) / len(slower) ** 0.5
        rows.append(Row(what=f"{name}: standard error of that", value=100 * error, unit="%"))
        rows.append(Row(what=f"{name}: by (5)", value=100 * float(expected), unit="%"))
    return rows


BENCHMARK = Benchmark(
    name="selection", shows="how optimistic the prediction of a chosen plan is", measure=measure
)
