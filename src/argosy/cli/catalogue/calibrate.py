"""Run ``argosy calibrate``: compare predictions with measured runs, and fit the constants."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.options import Json, Quiet, Width, no_nan

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


def calibrate(
    runs: Runs,
    fit: Constants = None,
    share: Annotated[
        float,
        typer.Option(
            "--share",
            min=0.05,
            max=0.95,
            help="Of many runs, how many are fitted on.",
            callback=no_nan,
        ),
    ] = 0.5,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Which runs are fitted on.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the constants here, for --calibration; - is stdout."
        ),
    ] = None,
    width: Width = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
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
    from argosy.cli.terminal import (
        STDOUT,
        check_output,
        print_json,
        progress,
        stdout_console,
        write_file,
    )
    from argosy.cost.calibration_file import calibration_to_dict, dumps_calibration
    from argosy.report.calibration import constant_table, error_table, worst_table

    if output is not None:
        check_output(output, runs, json=json)
    measured = read_measured(runs)
    with progress(f"calibrating on {measured!r}", quiet=quiet):
        result = study(measured, _names(fit), share=share, seed=seed)
    if output is not None:
        text = dumps_calibration(
            result.calibration, fitted=result.names, source=measured.source, errors=result.to_dict()
        )
        write_file(output, text.encode())
    if json:
        constants = calibration_to_dict(result.calibration)
        content = {"source": measured.source, "runs": len(measured.runs), "constants": constants}
        print_json(
            "calibrate", {**content, "fitted": list(result.names), "errors": result.to_dict()}
        )
        return
    console = stdout_console(width, beside=output)
    console.print(f"{measured!r}; {result.method}\n")
    if result.dropped:
        console.print(f"{result.dropped}\n", soft_wrap=True)
    for table in (error_table(result), worst_table(result), constant_table(result)):
        console.print(table)
        console.print()
    if output is not None and output != STDOUT:
        console.print(
            f"wrote {output}; next: argosy plan --calibration {shlex.quote(str(output))} ...",
            soft_wrap=True,
        )


def _names(text: str | None) -> list[str] | None:
    """Return the names of ``--fit``; None for the default, and an empty list for ``none``."""
    if text is None:
        return None
    return [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]
