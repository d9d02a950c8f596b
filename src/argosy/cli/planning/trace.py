"""Run ``argosy trace``: write a timeline for Perfetto and HolisticTraceAnalysis."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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

if TYPE_CHECKING:
    from argosy.timeline import Timeline


def trace(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|TIMELINE",
            help="A timeline.json, or a plan (file or bundled name) that is simulated first.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="One file for Perfetto; plain JSON unless it ends in .gz; - is stdout.",
        ),
    ] = Path("trace.json.gz"),
    per_rank: Annotated[
        Path | None,
        typer.Option(
            "--per-rank", metavar="DIR", help="Instead, one file per device, as HTA reads them."
        ),
    ] = None,
    cluster: ClusterSource = None,
    trace: Traces = None,
    iterations: Iterations = None,
    until: Until = None,
    schedule: ScheduleName = None,
    k: GroupSize = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a trace for Perfetto or HolisticTraceAnalysis.

    Writes one file that ui.perfetto.dev opens, with a process per device and per link, or a folder
    with one file per rank. For an island plan, it has the steps around its first exchange, or the
    first N with --iterations N.

    \b
    Examples:
        argosy trace llama-3-8b-on-mixed-16 -n 3 -o trace.json.gz
        argosy trace timeline.json --per-rank traces/
    """
    from argosy.cli.inputs import load_scenario, refuse_options
    from argosy.cli.planning.simulate import play
    from argosy.cli.terminal import check_output, no_stdout, print_json, say_written, write_file
    from argosy.plan.file import read_plan
    from argosy.timeline.file import timeline_from_document

    if per_rank is None:
        check_output(output, source, cluster, json=json)
    else:
        no_stdout(per_rank, "a folder", option="--per-rank")
    document = read_plan(source)
    if "spans" in document.data:
        given = {
            "--cluster": cluster,
            "--trace": trace,
            "--iterations": iterations,
            "--until": until,
        }
        refuse_options(
            {**given, "--schedule": schedule, "--k": k},
            "does not apply to a timeline, which is not simulated again",
        )
        timeline = timeline_from_document(document)
    elif document.data.get("kind") == "islands":
        from argosy.cli.planning.islands import island_timeline

        given = {"--schedule": schedule, "--k": k, "--until": until}
        refuse_options(given, "does not apply to an island plan")
        timeline = island_timeline(
            document, cluster=cluster, traces=trace or (), iterations=iterations, quiet=quiet
        )
    else:
        scenario = load_scenario(
            document, cluster=cluster, traces=trace or (), schedule=schedule, k=k
        )
        timeline = play(scenario, iterations=iterations, until=until, quiet=quiet)
    files = trace_files(timeline, output=output, per_rank=per_rank)
    for path, content in files.items():
        write_file(path, content, make_folder=per_rank is not None)
    if json:
        print_json("trace", {"files": [str(path) for path in files]})
    elif per_rank is not None:
        typer.echo(f"wrote {len(files)} files to {per_rank}; open them with HolisticTraceAnalysis")
    else:
        say_written(f"wrote {output}; open it at https://ui.perfetto.dev", output)


def trace_files(
    timeline: Timeline, *, output: Path, per_rank: Path | None = None
) -> dict[Path, bytes]:
    """Return the contents of the files to write, by path."""
    from argosy.report.kineto import chrome_trace, encode, rank_traces

    if per_rank is None:
        return {output: encode(chrome_trace(timeline), compress=output.suffix == ".gz")}
    ranks = enumerate(rank_traces(timeline))
    return {per_rank / f"rank-{rank}.json.gz": encode(document) for rank, document in ranks}
