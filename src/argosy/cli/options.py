"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead, with a version in it.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
Width = Annotated[int | None, typer.Option("--width", min=40, help="Columns to use; by default those of the terminal.")]
PlanSource = Annotated[
    str, typer.Argument(metavar="PLAN", help="A plan.json, or the name of a bundled plan.", show_default=False)
]
ClusterSource = Annotated[
    str | None,
    typer.Option("--cluster", help="A cluster file or bundled name, in place of the cluster inside the plan."),
]
Traces = Annotated[
    list[str] | None,
    typer.Option(
        "--trace",
        help="What changes over time, in place of the cluster's own changes: LINK=FILE.csv, DEVICE=FILE.csv, "
        "a .toml with [[changes]], or none. Repeatable.",
        metavar="TRACE",
    ),
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        "--schedule", help="gpipe, 1f1b, eager-1f1b, kfkb, interleaved or zero-bubble, in place of the plan's."
    ),
]
GroupSize = Annotated[int | None, typer.Option("--k", help="Group size of the kfkb schedule.")]
Iterations = Annotated[
    int | None, typer.Option("--iterations", "-n", help="How many to play; 1, or with --until as many as begin.")
]
Until = Annotated[str | None, typer.Option("--until", help='No iteration begins after this time, such as "2 min".')]
