"""``argosy report``: a plan as one page to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.options import ClusterSource, Json, PlanSource, Profiles, Quiet, Traces

if TYPE_CHECKING:
    from argosy.cli.inputs import Scenario
    from argosy.report.decisions import Told
    from argosy.report.page import Picture
    from argosy.timeline import Timeline

_MOST_TASKS = 8_192
"""Devices times micro-batches that are simulated device by device; larger plans are folded along their symmetries."""


def report(
    plan: PlanSource,
    timeline: Annotated[
        list[Path] | None, typer.Argument(help="Timelines to show beside the predicted one.", show_default=False)
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    cluster: ClusterSource = None,
    trace: Traces = None,
    profile: Profiles = None,
    compare: Annotated[
        Path | None, typer.Option("--compare", help="What argosy compare --json printed, shown as bars.")
    ] = None,
    decisions: Annotated[
        Path | None, typer.Option("--decisions", help="decisions.jsonl of a run that adapted, shown as a table.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """A plan as one HTML page to look at.

    The page is one file and needs no network. Timelines that a run has measured are set against the prediction.

    \b
    Example:
        argosy report llama-3-8b-on-mixed-16 -o report.html
        argosy report plan.json measured.json --compare compare.json
        argosy report plan.json run/timeline.json --decisions run/decisions.jsonl
    """
    from argosy.cli.inputs import load_scenario
    from argosy.cli.terminal import print_json
    from argosy.plan.file import read_plan
    from argosy.report.decisions import read_decisions, tell_decisions
    from argosy.timeline.file import load_timeline

    measured = {path.name: load_timeline(path) for path in timeline or ()}
    rivals = _rivals(compare)
    decided = [] if decisions is None else tell_decisions(read_decisions(decisions))
    scenario = load_scenario(read_plan(plan), cluster=cluster, traces=trace or (), profiles=profile or ())
    size = write_page(scenario, measured, rivals, output, decided=decided, quiet=quiet)
    if json:
        print_json("report", {"file": str(output), "bytes": size})
    else:
        typer.echo(f"wrote {output} ({size / 1e3:.0f} kB)")


def write_page(
    scenario: Scenario,
    measured: Mapping[str, Timeline],
    rivals: Sequence[tuple[str, float | None, str]],
    output: Path,
    *,
    decided: Sequence[Told] = (),
    quiet: bool,
) -> int:
    """The page of a plan, with what was measured by name; its bytes. ``rivals`` are other plans' names, seconds and
    what is wrong with them; ``decided`` is what a run changed."""
    from argosy.cli.terminal import progress, write_file
    from argosy.explain import explain_plan, with_prediction
    from argosy.report.page import Picture, report_page

    plan, chain, cluster, model = scenario.plan, scenario.chain, scenario.cluster, scenario.model
    with progress(f"simulating {plan!r}", quiet=quiet):
        pictures = _predicted(scenario)
        small = len(plan.devices) * plan.num_micro_batches <= _MOST_TASKS // 2
        explanation = explain_plan(plan, chain, cluster, model=model) if small else None
        told = with_prediction(plan, chain, cluster, model=model)
    pictures += [Picture(label=f"{one.clock}, {name}", timeline=one) for name, one in measured.items()]
    page = report_page(told, cluster, pictures, explanation=explanation, rivals=list(rivals), decided=decided).encode()
    write_file(output, page)
    return len(page)


def _predicted(scenario: Scenario) -> list[Picture]:
    """The plan under its own schedule first, then under others that it could switch to."""
    from dataclasses import replace

    from argosy.report.page import Picture
    from argosy.schedule import ScheduleKind, ScheduleSpec
    from argosy.sim.compile import compile_plan
    from argosy.sim.exact import simulate_exact
    from argosy.sim.fold import fold_plan

    plan = scenario.plan
    tasks = len(plan.devices) * plan.num_micro_batches
    others = [ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B), ScheduleSpec(kind=ScheduleKind.EAGER)]
    others += [ScheduleSpec(kind=ScheduleKind.KFKB, k=k) for k in (2, 4) if k <= plan.num_micro_batches]
    simple = plan.schedule.kind not in (ScheduleKind.INTERLEAVED, ScheduleKind.ZERO_BUBBLE)
    switch = len(plan.stages) > 1 and simple and tasks <= _MOST_TASKS // 4
    pictures = []
    for schedule in (plan.schedule, *(other for other in others if switch and other != plan.schedule)):
        variant = replace(plan, schedule=schedule)
        if tasks <= _MOST_TASKS:
            graph, where = compile_plan(variant, scenario.chain, scenario.cluster, scenario.model), scenario.cluster
        else:
            graph, where = fold_plan(variant, scenario.chain, scenario.cluster, scenario.model)
        pictures.append(Picture(label=f"predicted, {schedule!r}", timeline=simulate_exact(graph, where, record=1)))
    return pictures


def _rivals(path: Path | None) -> list[tuple[str, float | None, str]]:
    if path is None:
        return []
    from argosy.document import read_json
    from argosy.errors import bad_input

    content = read_json(str(path)).data
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "name" in row for row in rows):
        raise bad_input("what argosy compare --json prints, with rows", where=str(path))
    return [
        (str(row["name"]), row.get("iteration_seconds") if row.get("feasible") else None, str(row.get("reason", "")))
        for row in rows
    ]
