"""Run ``argosy report``: write a plan as one page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.options import ClusterSource, Json, PlanSource, Profiles, Quiet, Traces

if TYPE_CHECKING:
    from argosy.cli.inputs import Scenario
    from argosy.cluster.topology import Cluster
    from argosy.plan.plan import Plan
    from argosy.report.decisions import Told
    from argosy.timeline import Timeline


def report(
    plan: PlanSource,
    timeline: Annotated[
        list[Path] | None,
        typer.Argument(help="Timelines to show beside the predicted one.", show_default=False),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The page to write; - is stdout.")
    ] = Path("report.html"),
    cluster: ClusterSource = None,
    trace: Traces = None,
    profile: Profiles = None,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", help="What argosy compare --json printed, shown as bars."),
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option(
            "--decisions", help="decisions.jsonl of a run that adapted, shown as a table."
        ),
    ] = None,
    under: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario",
            metavar="SCENARIO",
            help="A way to change, as for argosy plan. Repeatable.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
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
    from argosy.cli.inputs import load_scenario, refuse_options
    from argosy.cli.planning.scenarios import load_scenarios
    from argosy.cli.terminal import check_output
    from argosy.plan.file import read_plan
    from argosy.report.decisions import read_decisions, tell_decisions
    from argosy.timeline.file import load_timeline

    check_output(
        output, plan, cluster, compare, decisions, *(timeline or ()), *(profile or ()), json=json
    )
    measured = {name: load_timeline(path) for name, path in _names(timeline or ()).items()}
    document = read_plan(plan)
    if document.data.get("kind") == "gravity":
        from argosy.cli.planning.gravity_plans import report_gravity

        unused = {
            "--profile": profile,
            "--compare": compare,
            "--decisions": decisions,
            "--scenario": under,
        }
        refuse_options(unused, "does not apply to a gravity plan")
        traces = trace or ()
        size = report_gravity(
            document, output, cluster=cluster, traces=traces, measured=measured, quiet=quiet
        )
        _conclude(output, size, json=json)
        return
    if document.data.get("kind") == "islands":
        from argosy.cli.planning.islands import report_islands

        others: dict[str, object] = {
            "--compare": compare,
            "--decisions": decisions,
            "--scenario": under,
        }
        refuse_options({"TIMELINE": timeline or None, **others}, "does not apply to an island plan")
        size = report_islands(
            document,
            output,
            cluster=cluster,
            traces=trace or (),
            profiles=profile or (),
            quiet=quiet,
        )
        _conclude(output, size, json=json)
        return
    scenario = load_scenario(
        document, cluster=cluster, traces=trace or (), profiles=profile or (), quiet=quiet
    )
    _check_timelines(measured, scenario.cluster)
    rivals = _rivals(compare, scenario.plan)
    decided = [] if decisions is None else tell_decisions(read_decisions(decisions))
    changes = dict(zip(under or (), load_scenarios(scenario.cluster, under or ()), strict=True))
    size = write_page(
        scenario, measured, rivals, output, decided=decided, scenarios=changes, quiet=quiet
    )
    _conclude(output, size, json=json)


def _conclude(output: Path, size: int, *, json: bool) -> None:
    """Print the name and the size of the page."""
    from argosy.cli.terminal import print_json, say_written

    if json:
        print_json("report", {"file": str(output), "bytes": size})
    else:
        say_written(f"wrote {output} ({size / 1e3:.0f} kB)", output)


def _names(paths: Sequence[Path]) -> dict[str, Path]:
    """Return files by their names, or by their paths if several have one name, as timelines of runs
    do."""
    short = len({path.name for path in paths}) == len(set(paths))
    return {path.name if short else str(path): path for path in paths}


def _check_timelines(measured: Mapping[str, Timeline], cluster: Cluster) -> None:
    """Raise ``InputError`` for a timeline of another cluster, whose devices the page cannot
    show."""
    from argosy.errors import bad_input

    known = {device.name for device in cluster.devices}
    for file, timeline in measured.items():
        for name in timeline.devices:
            if name not in known:
                raise bad_input(
                    f"devices of {cluster.name}, on which the plan is",
                    name,
                    where=f"{file}: devices",
                )


def write_page(
    scenario: Scenario,
    measured: Mapping[str, Timeline],
    rivals: Sequence[tuple[str, float | None, str]],
    output: Path,
    *,
    decided: Sequence[Told] = (),
    scenarios: Mapping[str, Cluster] | None = None,
    quiet: bool,
) -> int:
    """Write the page of a plan; return its size in bytes.

    ``measured`` are timelines by name; ``rivals`` are other plans' names, seconds and why they are
    slower; ``decided`` are the changes that a run made.
    """
    from argosy.cli.terminal import progress, write_file
    from argosy.report.page import Report

    report = Report(
        plan=scenario.plan,
        chain=scenario.chain,
        cluster=scenario.cluster,
        model=scenario.model,
        measured=measured,
        rivals=list(rivals),
        decided=decided,
        scenarios=scenarios or {},
    )
    with progress(f"simulating {scenario.plan!r}", quiet=quiet):
        page = report.html.encode()
    write_file(output, page)
    return len(page)


def _rivals(path: Path | None, plan: Plan) -> list[tuple[str, float | None, str]]:
    """Return the rows of a comparison; raise ``InputError`` for another model, cluster or batch."""
    if path is None:
        return []
    from argosy.document import read_json
    from argosy.errors import bad_input

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
            raise bad_input(
                "seconds, above 0", seconds, where=f"{path}: rows[{at}].iteration_seconds"
            )
    cluster = content.get("cluster")
    for name, found, expected in (
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
        if found is not None and found != expected:
            raise bad_input(f"{expected}, as in the plan", str(found), where=f"{path}: {name}")
    return [
        (
            str(row["name"]),
            row.get("iteration_seconds") if row.get("feasible") else None,
            str(row.get("reason", "")),
        )
        for row in rows
    ]
