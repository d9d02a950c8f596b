"""Run ``argosy trace``: write a timeline for Perfetto and HolisticTraceAnalysis."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.command import given, picked, takes_options
from argosy.cli.inputs import ScenarioInputs, load_scenario, refuse_options
from argosy.cli.options import (
    ClusterSource,
    GroupSize,
    Iterations,
    Json,
    Quiet,
    ScheduleName,
    Traces,
    Until,
)
from argosy.cli.terminal import check_output, no_stdout, print_json, say_written, write_file
from argosy.plan.file import read_plan

if TYPE_CHECKING:
    from argosy.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """The options that ``argosy trace`` takes."""

    source: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|TIMELINE",
            help="A timeline.json, or a plan (file or bundled name) that is simulated first.",
            show_default=False,
        ),
    ]
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="One file for Perfetto; plain JSON unless it ends in .gz; - is stdout.",
        ),
    ] = Path("trace.json.gz")
    per_rank: Annotated[
        Path | None,
        typer.Option(
            "--per-rank", metavar="DIR", help="Instead, one file per device, as HTA reads them."
        ),
    ] = None
    cluster: ClusterSource = None
    trace: Traces = None
    iterations: Iterations = None
    until: Until = None
    schedule: ScheduleName = None
    k: GroupSize = None
    json: Json = False
    quiet: Quiet = False


@takes_options
def trace(options: TraceOptions) -> None:
    """Write a trace for Perfetto or HolisticTraceAnalysis.

    Writes one file that ui.perfetto.dev opens, with a process per device and per link, or a folder
    with one file per rank. For an island plan, it has the steps around its first exchange, or the
    first N with --iterations N.

    \b
    Examples:
        argosy trace llama-3-8b-on-mixed-16 -n 3 -o trace.json.gz
        argosy trace timeline.json --per-rank traces/
    """
    if options.per_rank is None:
        check_output(options.output, options.source, options.cluster, json=options.json)
    else:
        no_stdout(options.per_rank, "a folder", option="--per-rank")
    timeline = _timeline(options)
    files = trace_files(timeline, output=options.output, per_rank=options.per_rank)
    for path, content in files.items():
        write_file(path, content, make_folder=options.per_rank is not None)
    if options.json:
        print_json("trace", {"files": [str(path) for path in files]})
    elif options.per_rank is not None:
        typer.echo(
            f"wrote {len(files)} files to {options.per_rank}; open them with HolisticTraceAnalysis"
        )
    else:
        say_written(f"wrote {options.output}; open it at https://ui.perfetto.dev", options.output)


def _timeline(options: TraceOptions) -> Timeline:
    """Return the timeline in a file, or simulate the plan in it."""
    from argosy.cli.planning.islands import island_timeline
    from argosy.cli.planning.simulate import play
    from argosy.timeline.file import timeline_from_document

    document, inputs = read_plan(options.source), picked(ScenarioInputs, options)
    if "spans" in document.data:
        unused = given(options, "cluster", "trace", "iterations", "until", "schedule", "k")
        refuse_options(unused, "does not apply to a timeline, which is not simulated again")
        return timeline_from_document(document)
    if document.data.get("kind") == "islands":
        refuse_options(given(options, "schedule", "k", "until"), "does not apply to an island plan")
        return island_timeline(document, inputs, iterations=options.iterations)
    return play(
        load_scenario(document, inputs),
        iterations=options.iterations,
        until=options.until,
        quiet=options.quiet,
    )


def trace_files(
    timeline: Timeline, *, output: Path, per_rank: Path | None = None
) -> dict[Path, bytes]:
    """Return the contents of the files to write, by path."""
    from argosy.report.kineto import chrome_trace, encode, rank_traces

    if per_rank is None:
        return {output: encode(chrome_trace(timeline), compress=output.suffix == ".gz")}
    ranks = enumerate(rank_traces(timeline))
    return {per_rank / f"rank-{rank}.json.gz": encode(document) for rank, document in ranks}
