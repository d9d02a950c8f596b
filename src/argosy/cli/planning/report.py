"""Run ``argosy report``: write a plan as one page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.command import given, picked, takes_options
from argosy.cli.inputs import ScenarioInputs, load_scenario, refuse_options
from argosy.cli.options import ClusterSource, Json, PlanSource, Profiles, Quiet, Traces
from argosy.cli.terminal import check_output, print_json, progress, say_written, write_file
from argosy.cluster.topology import Cluster
from argosy.document import Document, read_json
from argosy.errors import bad_input
from argosy.plan.file import read_plan
from argosy.plan.plan import Plan

if TYPE_CHECKING:
    from argosy.report.decisions import Told
    from argosy.report.page import Report
    from argosy.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options that ``argosy report`` takes."""

    plan: PlanSource
    timeline: Annotated[
        list[Path] | None,
        typer.Argument(help="Timelines to show beside the predicted one.", show_default=False),
    ] = None
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The page to write; - is stdout.")
    ] = Path("report.html")
    cluster: ClusterSource = None
    trace: Traces = None
    profile: Profiles = None
    compare: Annotated[
        Path | None,
        typer.Option("--compare", help="What argosy compare --json printed, shown as bars."),
    ] = None
    decisions: Annotated[
        Path | None,
        typer.Option(
            "--decisions", help="decisions.jsonl of a run that adapted, shown as a table."
        ),
    ] = None
    under: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario",
            metavar="SCENARIO",
            help="A way to change, as for argosy plan. Repeatable.",
        ),
    ] = None
    json: Json = False
    quiet: Quiet = False


@takes_options
def report(options: ReportOptions) -> None:
    """Write a plan as one HTML page to look at.

    The page is one file and needs no network. Timelines that a run has measured are compared with
    the prediction.

    \b
    Example:
        argosy report llama-3-8b-on-mixed-16 -o report.html
        argosy report plan.json measured.json --compare compare.json
        argosy report plan.json run/timeline.json --decisions run/decisions.jsonl
        argosy report plan.json --scenario none --scenario "v0.nic=on-off:low=0.1"
    """
    from argosy.cli.planning.scenarios import load_scenarios
    from argosy.report.page import Report
    from argosy.timeline.file import load_timeline

    inputs = (*(options.timeline or ()), *(options.profile or ()))
    named = (options.plan, options.cluster, options.compare, options.decisions)
    check_output(options.output, *named, *inputs, json=options.json)
    measured = {name: load_timeline(path) for name, path in _names(options.timeline or ()).items()}
    document = read_plan(options.plan)
    if document.data.get("kind") in ("gravity", "islands"):
        size = _report_other_kind(document, measured, options)
        _conclude(options.output, size, json=options.json)
        return
    scenario = load_scenario(document, picked(ScenarioInputs, options))
    _check_timelines(measured, scenario.cluster)
    names = options.under or ()
    page = Report(
        plan=scenario.plan,
        chain=scenario.chain,
        cluster=scenario.cluster,
        model=scenario.model,
        measured=measured,
        rivals=_rivals(options.compare, scenario.plan),
        decided=_decisions(options.decisions),
        scenarios=dict(zip(names, load_scenarios(scenario.cluster, names), strict=True)),
    )
    size = write_page(page, options.output, quiet=options.quiet)
    _conclude(options.output, size, json=options.json)


def _report_other_kind(
    document: Document, measured: Mapping[str, Timeline], options: ReportOptions
) -> int:
    """Write the page of a gravity plan or an island plan; return its size in bytes."""
    from argosy.cli.planning.gravity_plans import report_gravity
    from argosy.cli.planning.islands import report_islands

    of_a_plan = ("compare", "decisions", "under")
    if document.data["kind"] == "gravity":
        refuse_options(given(options, "profile", *of_a_plan), "does not apply to a gravity plan")
        return report_gravity(document, measured, options)
    refuse_options(given(options, "timeline", *of_a_plan), "does not apply to an island plan")
    return report_islands(document, options.output, picked(ScenarioInputs, options))


def _conclude(output: Path, size: int, *, json: bool) -> None:
    """Print the name and the size of the page."""
    if json:
        print_json("report", {"file": str(output), "bytes": size})
    else:
        say_written(f"wrote {output} ({size / 1e3:.0f} kB)", output)


def _decisions(path: Path | None) -> Sequence[Told]:
    """Return the decisions that a run recorded; none without a file."""
    from argosy.report.decisions import read_decisions, tell_decisions

    return [] if path is None else tell_decisions(read_decisions(path))


def _names(paths: Sequence[Path]) -> dict[str, Path]:
    """Return files by their names, or by their paths if several have one name, as timelines of runs
    do."""
    short = len({path.name for path in paths}) == len(set(paths))
    return {path.name if short else str(path): path for path in paths}


def _check_timelines(measured: Mapping[str, Timeline], cluster: Cluster) -> None:
    """Raise ``InputError`` for a timeline of another cluster, whose devices the page cannot
    show."""
    known = {device.name for device in cluster.devices}
    for file, timeline in measured.items():
        for name in timeline.devices:
            if name not in known:
                raise bad_input(
                    f"devices of {cluster.name}, on which the plan is", name, f"{file}: devices"
                )


def write_page(report: Report, output: Path, *, quiet: bool) -> int:
    """Write the page of a plan; return its size in bytes."""
    with progress(f"simulating {report.plan!r}", quiet=quiet):
        page = report.html.encode()
    write_file(output, page)
    return len(page)


def _rivals(path: Path | None, plan: Plan) -> list[tuple[str, float | None, str]]:
    """Return the rows of a comparison; raise ``InputError`` for another model, cluster or batch."""
    if path is None:
        return []

    content = read_json(str(path)).data
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and "name" in row for row in rows
    ):
        raise bad_input("what argosy compare --json prints, with rows", where=str(path))
    for at, row in enumerate(rows):
        seconds = row.get("iteration_seconds")
        is_time = (
            isinstance(seconds, int | float)
            and not isinstance(seconds, bool)
            and 0 < seconds < math.inf
        )
        if row.get("feasible") and not is_time:
            raise bad_input("seconds, above 0", seconds, f"{path}: rows[{at}].iteration_seconds")
    cluster = content.get("cluster")
    for name, value, expected in (
        ("model", content.get("model"), plan.model.name),
        (
            "cluster.hash",
            cluster.get("hash") if isinstance(cluster, dict) else None,
            plan.cluster.hash,
        ),
        ("global_batch", content.get("global_batch"), plan.global_batch),
        (
            "cost_model",
            content.get("cost_model"),
            "default" if plan.cost_model is None else plan.cost_model.hash,
        ),
    ):
        if value is not None and value != expected:
            raise bad_input(f"{expected}, as in the plan", str(value), f"{path}: {name}")
    return [
        (
            str(row["name"]),
            row.get("iteration_seconds") if row.get("feasible") else None,
            str(row.get("reason", "")),
        )
        for row in rows
    ]
