"""``python -m benchmarks.measured [TABLE or FOLDER ...]``: the cost model against published tables
of training runs.

Tables are those of ``../shared/data/measured`` and ``benchmarks/published`` unless others are
named; any file that ``argosy calibrate`` reads will do. Of every table each second run is for fitting and the others are judged.
Runs of one device kind and precision are a *set*:

    uncalibrated   the judged runs under the cost model as it is
    calibrated     the same with constants fitted on eight runs of the set's fitting half, spread evenly over its
                   sequence lengths
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from argosy.calibrate.file import read_measured
from argosy.calibrate.fit import Errors, errors, fit_to
from argosy.calibrate.predict import exact_seconds, peak_bytes
from argosy.calibrate.run import MeasuredRun, Measurements
from argosy.calibrate.study import LEAST, default_names
from argosy.cost.calibration import Calibration
from argosy.cost.memory import USABLE
from argosy.cost.uncertainty import interval
from argosy.errors import ArgosyError
from argosy.report.calibration import error_cells
from benchmarks.registry import Benchmark, Row

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "measured"
PUBLISHED = Path(__file__).resolve().parent / "published"
TABLES = (FOLDER, PUBLISHED)
ROWS = 8
"""Runs that a calibration is fitted on."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A run that nothing was fitted on, and what was predicted for it."""

    run: MeasuredRun
    uncalibrated: float
    """Seconds."""
    calibrated: float | None
    """Seconds; None where a set has too few runs to fit on."""
    peak_bytes: float

    @property
    def kind(self) -> str:
        return self.run.cluster.devices[0].kind.name


@dataclass(frozen=True, kw_only=True)
class SetOfRuns:
    """The runs of a table on one kind of device in one precision."""

    name: str
    judged: tuple[Judged, ...]
    constants: str
    """Which were fitted, and which the runs do not tell."""

    def errors(self, *, calibrated: bool) -> Errors | None:
        pairs = [
            (one.calibrated if calibrated else one.uncalibrated, one.run.seconds)
            for one in self.judged
        ]
        known = np.array([pair for pair in pairs if pair[0] is not None], dtype=float)
        return errors(known[:, 0], known[:, 1]) if len(known) else None


def tables(paths: Sequence[Path]) -> Iterator[Measurements]:
    """Every table of some files and folders; a file that cannot be read is reported and left
    out."""
    for path in paths:
        files = (
            sorted(path.glob("*.csv")) + sorted(path.glob("*.json")) if path.is_dir() else [path]
        )
        for file in files:
            try:
                table = read_measured(file, partly=True)
                for sentence in table.left_out:
                    print(f"left out: {sentence}", file=sys.stderr)
                yield table
            except ArgosyError as error:
                print(f"left out: {error}", file=sys.stderr)


@cache
def judged_sets(paths: tuple[Path, ...]) -> tuple[SetOfRuns, ...]:
    return tuple(one for table in tables(paths) for one in _sets(table))


def _sets(table: Measurements) -> Iterator[SetOfRuns]:
    groups: dict[tuple[str, str], tuple[list[MeasuredRun], list[MeasuredRun]]] = {}
    for index, run in enumerate(table.runs):
        kinds = sorted({device.kind.name for device in run.cluster.devices})
        key = kinds[0] if len(kinds) == 1 else "mixed", str(run.chain.dtype)
        groups.setdefault(key, ([], []))[run.row % 2 if run.row is not None else index % 2].append(
            run
        )
    for (kind, dtype), (fitted, held_out) in groups.items():
        if held_out:
            yield _judge(table, f"{table.source}, {kind}, {dtype}", fitted, held_out)


def _judge(
    table: Measurements, name: str, fitted: list[MeasuredRun], held_out: list[MeasuredRun]
) -> SetOfRuns:
    plain = Calibration(blocking=table.blocking, prefetch=table.prefetch)
    spread = sorted(fitted, key=lambda run: (run.chain.sequence_length, run.chain.parameters))
    few = (
        [spread[at] for at in sorted({round(at) for at in np.linspace(0, len(spread) - 1, ROWS)})]
        if spread
        else []
    )
    names = default_names(replace(table, runs=tuple(few)))
    found = fit_to(table, few, names, plain) if len(few) >= LEAST else None
    told = "-"
    if found is not None:
        left = ", ".join(one for one in names if one not in found.unidentified) or "none"
        told = f"{len(few)} runs: {left}"
        if found.left_out is not None and found.before is not None:
            kept = "" if found.is_kept else ", so they stay as they were"
            told += f"; left out in turn {100 * found.left_out:.1f} %, unfitted {100 * found.before:.1f} %{kept}"
    judged = []
    for run in held_out:
        calibrated = exact_seconds(table, run, found.calibration) if found is not None else None
        peak = float(peak_bytes([run], plain)[0])
        seconds = exact_seconds(table, run, plain)
        judged.append(Judged(run=run, uncalibrated=seconds, calibrated=calibrated, peak_bytes=peak))
    return SetOfRuns(name=name, judged=tuple(judged), constants=told)


Classes = Callable[[Judged], str]
"""What a run is an example of."""


def _class(value: float, edges: Sequence[float], shown: Callable[[float], str]) -> str:
    below = [edge for edge in edges if edge <= value]
    above = [edge for edge in edges if edge > value]
    low, high = (shown(below[-1]) if below else ""), (shown(above[0]) if above else "")
    return f"{low} to {high}" if below and above else f"from {low}" if below else f"below {high}"


def _billions(value: float) -> str:
    return f"{value / 1e9:g} B"


CLASSES: dict[str, Classes] = {
    "kind": lambda one: one.kind,
    "weights": lambda one: _class(one.run.chain.parameters, (1e9, 5e9, 2e10, 1e11), _billions),
    "tensor width": lambda one: str(
        len(one.run.plan.stages[0].replicas[0].parts(one.run.plan.stages[0].context)[0])
    ),
    "tokens": lambda one: _class(
        one.run.chain.sequence_length, (2048, 4096, 16384, 65536), lambda v: f"{v:g}"
    ),
    "precision": lambda one: str(one.run.chain.dtype),
    "devices": lambda one: _class(len(one.run.plan.devices), (9, 64, 128, 512), lambda v: f"{v:g}"),
    "recomputation": lambda one: str(one.run.plan.stages[0].recompute),
}


def page(paths: Sequence[Path]) -> Iterator[str]:
    """Tables in Markdown, line by line."""
    sets = judged_sets(tuple(paths))
    rows = []
    for one in sets:
        for how, calibrated in (("uncalibrated", False), ("calibrated", True)):
            found = one.errors(calibrated=calibrated)
            if found is not None:
                rows.append(
                    [
                        one.name,
                        how,
                        *error_cells(found),
                        f"{_bias(one.judged, calibrated=calibrated):.3f}",
                    ]
                )
    head = (
        "set",
        "how",
        "runs",
        "median",
        "mean",
        "90 % below",
        "worst",
        "rank correlation",
        "bias",
    )
    yield from _table(head, rows)
    yield "Bias is the median of predicted over measured. Constants that eight runs identify, by set:\n"
    yield from _table(("set", "constants"), [[one.name, one.constants] for one in sets])
    judged = [run for one in sets for run in one.judged]
    yield "Bias and error by class of runs:\n"
    yield from _table(
        (
            "of",
            "class",
            "runs",
            "bias",
            "median",
            "90 % below",
            "calibrated bias",
            "calibrated median",
        ),
        [row for name, classify in CLASSES.items() for row in _by_class(name, classify, judged)],
    )
    yield from _intervals(sets)
    yield from _memory(judged)


def _intervals(sets: Sequence[SetOfRuns]) -> Iterator[str]:
    """Yield how many measured seconds are in the interval of the uncalibrated prediction."""
    yield "Measured seconds inside the interval of the prediction, which is stated for nine of ten:\n"
    rows = [[one.name, str(len(one.judged)), str(sum(map(_covers, one.judged)))] for one in sets]
    yield from _table(("set", "runs", "inside"), rows)


def _covers(one: Judged) -> bool:
    expected = interval(one.run.plan, one.run.cluster, one.uncalibrated)
    return expected.low <= one.run.seconds <= expected.high


def _bias(judged: Sequence[Judged], *, calibrated: bool) -> float:
    pairs = [
        (one.calibrated if calibrated else one.uncalibrated, one.run.seconds) for one in judged
    ]
    return float(np.median([found / real for found, real in pairs if found is not None]))


def _by_class(name: str, classify: Classes, judged: Sequence[Judged]) -> Iterator[list[str]]:
    classes: dict[str, list[Judged]] = {}
    for one in judged:
        classes.setdefault(classify(one), []).append(one)
    for label, members in sorted(classes.items()):
        off = np.abs([one.uncalibrated / one.run.seconds - 1 for one in members])
        cells = [name, label, str(len(members)), f"{_bias(members, calibrated=False):.3f}"]
        cells += [f"{100 * np.median(off):.1f} %", f"{100 * np.quantile(off, 0.9):.1f} %"]
        known = [one for one in members if one.calibrated is not None]
        after = [abs((one.calibrated or 0.0) / one.run.seconds - 1) for one in known]
        cells += (
            [f"{_bias(known, calibrated=True):.3f}", f"{100 * np.median(after):.1f} %"]
            if known
            else ["-", "-"]
        )
        yield cells


def _memory(judged: Sequence[Judged]) -> Iterator[str]:
    """Peaks that were measured, and whether runs that ran are predicted to fit."""
    yield "Memory, uncalibrated:\n"
    weighed = [one for one in judged if one.run.peak_bytes]
    rows = []
    for one in weighed:
        real = one.run.peak_bytes or 1.0
        sizes = [f"{size / 2**30:.1f} GiB" for size in (real, one.peak_bytes)]
        rows.append([one.run.name, one.kind, *sizes, f"{100 * (one.peak_bytes / real - 1):+.1f} %"])
    yield from _table(("run", "kind", "measured", "predicted", "error"), rows)
    wrong = [one.run.name for one in judged if not _fits(one)]
    listed = ", ".join(wrong) or "none"
    yield f"Of {len(judged)} judged runs that ran, {len(wrong)} are predicted not to fit: {listed}.\n"


def _fits(one: Judged) -> bool:
    return one.peak_bytes <= USABLE * one.run.cluster.devices[0].kind.memory


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *lines, ""]


def measure() -> list[Row]:
    rows = []
    for one in judged_sets(TABLES) if FOLDER.exists() else ():
        for how, calibrated, target in (
            ("uncalibrated", False, "<= 8"),
            ("calibrated", True, "<= 4"),
        ):
            found = one.errors(calibrated=calibrated)
            if found is not None:
                rows.append(
                    Row(
                        what=f"{one.name}: median, {how}",
                        value=100 * found.median,
                        unit="%",
                        target=target,
                    )
                )
                what = f"{one.name}: 90 % below, {how}"
                rows.append(Row(what=what, value=100 * found.ninetieth, unit="%", target="<= 15"))
    return rows


BENCHMARK = Benchmark(
    name="measured",
    shows="the cost model against published tables of training runs",
    measure=measure,
)

if __name__ == "__main__":
    print("\n".join(page([Path(name) for name in sys.argv[1:]] or TABLES)))
