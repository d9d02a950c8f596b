"""Run ``argosy calibrate``: compare predictions with measured runs, and fit the constants."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.command import takes_options
from argosy.cli.options import Json, Quiet, Width, no_nan
from argosy.cli.terminal import (
    STDOUT,
    check_output,
    print_json,
    progress,
    stdout_console,
    write_file,
)
from argosy.cost.calibration_file import calibration_to_dict, dumps_calibration

if TYPE_CHECKING:
    from argosy.calibrate.run import Measurements
    from argosy.calibrate.study import Study

Runs = Annotated[
    str,
    typer.Argument(
        metavar="RUNS",
        help=(
            "Measured runs: a JSON file (docs/formats.md), vTrain's CSV, or a folder of Sailor's "
            "runs."
        ),
        show_default=False,
    ),
]
Constants = Annotated[
    str | None,
    typer.Option(
        "--fit",
        metavar="NAMES",
        help=(
            "Constants to fit, with commas between them, or none. Default: those that the runs "
            "can tell."
        ),
    ),
]


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """The options that ``argosy calibrate`` takes."""

    runs: Runs
    fit: Constants = None
    share: Annotated[
        float,
        typer.Option(
            "--share",
            min=0.05,
            max=0.95,
            help="Of many runs, how many are fitted on.",
            callback=no_nan,
        ),
    ] = 0.5
    seed: Annotated[int, typer.Option("--seed", min=0, help="Which runs are fitted on.")] = 0
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the constants here, for --calibration; - is stdout."
        ),
    ] = None
    width: Width = None
    json: Json = False
    quiet: Quiet = False


@takes_options
def calibrate(options: CalibrateOptions) -> None:
    """Compare predictions with measured runs, and fit constants.

    Fits at most five constants to the seconds of runs and two to their memory, and prints how far
    off the predictions are on runs that were not fitted on: a random share, or with fewer than 40
    runs each one in turn. With -o the constants are written for argosy plan --calibration and
    argosy simulate --calibration.

    \b
    Examples:
        argosy calibrate runs.json -o calibration.json
        argosy calibrate ground_truth_single.csv \\
            --fit passes,forward_floor,backward_floor,bandwidth --seed 3
    """
    from argosy.calibrate.file import read_measured
    from argosy.calibrate.study import study

    if options.output is not None:
        check_output(options.output, options.runs, json=options.json)
    measured = read_measured(options.runs)
    with progress(f"calibrating on {measured!r}", quiet=options.quiet):
        result = study(measured, _names(options.fit), share=options.share, seed=options.seed)
    if options.output is not None:
        text = dumps_calibration(
            result.calibration, fitted=result.names, source=measured.source, errors=result.to_dict()
        )
        write_file(options.output, text.encode())
    if options.json:
        constants = calibration_to_dict(result.calibration)
        content = {"source": measured.source, "runs": len(measured.runs), "constants": constants}
        print_json("calibrate", {**content, "fitted": result.names, "errors": result.to_dict()})
        return
    _show(measured, result, options)


def _show(measured: Measurements, result: Study, options: CalibrateOptions) -> None:
    """Print the errors and the fitted constants."""
    from argosy.report.calibration import constant_table, error_table, worst_table

    console = stdout_console(options.width, beside=options.output)
    console.print(f"{measured!r}; {result.method}\n")
    if result.dropped:
        console.print(f"{result.dropped}\n", soft_wrap=True)
    for table in (error_table(result), worst_table(result), constant_table(result)):
        console.print(table)
        console.print()
    if options.output is not None and options.output != STDOUT:
        named = shlex.quote(str(options.output))
        next_command = f"argosy plan --calibration {named} ..."
        console.print(f"wrote {options.output}; next: {next_command}", soft_wrap=True)


def _names(text: str | None) -> list[str] | None:
    """Return the names of ``--fit``; None for the default, and an empty list for ``none``."""
    if text is None:
        return None
    return [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]
