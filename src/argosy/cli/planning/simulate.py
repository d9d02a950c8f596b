"""Run ``argosy simulate``: show what a plan would do, also while links and devices change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.command import given, picked, takes_options
from argosy.cli.inputs import (
    MOST_ITERATIONS,
    Scenario,
    ScenarioInputs,
    check_at_least,
    check_iterations,
    load_scenario,
    parse_time,
    refuse_options,
    too_long,
)
from argosy.cli.options import (
    CalibrationFile,
    ClusterSource,
    GroupSize,
    Iterations,
    Json,
    PlanSource,
    Profiles,
    Quiet,
    ScheduleName,
    Traces,
    Until,
    Width,
    no_nan,
)
from argosy.cli.terminal import check_output, print_json, progress, stdout_console, write_file
from argosy.document import Document
from argosy.plan.file import read_plan
from argosy.units import counted

if TYPE_CHECKING:
    from rich.console import Console

    from argosy.report.summary import Summary
    from argosy.timeline import Timeline

# The largest number of iterations whose spans are recorded; figures cover all iterations.
MOST_RECORDED = 100


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options that ``argosy simulate`` takes."""

    plan: PlanSource
    cluster: ClusterSource = None
    trace: Traces = None
    iterations: Iterations = None
    until: Until = None
    schedule: ScheduleName = None
    k: GroupSize = None
    profile: Profiles = None
    calibration: CalibrationFile = None
    iteration: Annotated[
        int, typer.Option("--iteration", help="Which one the chart shows, from 0.")
    ] = 0
    transfers: Annotated[
        bool, typer.Option("--transfers", help="Chart what crosses the network, too.")
    ] = False
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the timeline here, as JSON (its first 100 iterations); - is stdout.",
        ),
    ] = None
    adapt: Annotated[
        str | None,
        typer.Option(
            "--adapt",
            help=(
                "Play a controller that may change k, shares or (full) the plan, and others "
                "beside it."
            ),
        ),
    ] = None
    horizon: Annotated[
        int, typer.Option("--horizon", min=1, help="Steps that the controller counts on.")
    ] = 1000
    min_gain: Annotated[
        float,
        typer.Option(
            "--min-gain", min=0, help="Gain below which it changes nothing.", callback=no_nan
        ),
    ] = 0.02
    width: Width = None
    json: Json = False
    quiet: Quiet = False


@takes_options
def simulate(options: SimulateOptions) -> None:
    """Simulate a plan, also while links and devices change.

    Prints how long iterations take and why, how busy and how full the devices are, the busiest
    links, and a chart. A device whose memory does not suffice is marked; a plan that never ends
    because a device is lost is reported.

    \b
    Examples:
        argosy simulate llama-3-8b-on-mixed-16 --until "2 min"
        argosy simulate plan.json --trace v0.nic=measured.csv \\
            --k 4 -o timeline.json
        argosy simulate plan.json --adapt full --until "10 min"
        argosy simulate gravity.json --adapt full --iterations 20
    """
    if options.output is not None:
        check_output(
            options.output,
            options.plan,
            options.cluster,
            options.calibration,
            *(options.profile or ()),
            json=options.json,
        )
    document = read_plan(options.plan)
    if document.data.get("kind") in ("gravity", "islands"):
        _simulate_other_kind(document, options)
        return
    scenario = load_scenario(document, picked(ScenarioInputs, options))
    if options.adapt is not None:
        from argosy.cli.planning.adapting import show_courses

        refuse_options(
            given(options, "iterations", "iteration", "transfers", "output"),
            "cannot be combined with --adapt, which simulates everything until --until",
        )
        show_courses(scenario, options.adapt, options)
        return
    _simulate_plan(scenario, options)


def _simulate_plan(scenario: Scenario, options: SimulateOptions) -> None:
    """Simulate a plan that does not adapt, and print the result."""
    from argosy.report.summary import summarise, summary_to_dict
    from argosy.timeline.file import dumps_timeline

    timeline = play(
        scenario,
        iterations=options.iterations,
        until=options.until,
        quiet=options.quiet,
        least_recorded=options.iteration + 1,
    )
    if options.output is not None:
        write_file(options.output, dumps_timeline(timeline).encode())
    summary = summarise(scenario.plan, scenario.cluster, timeline)
    if options.json:
        print_json("simulate", {**scenario.names, **summary_to_dict(summary)})
        return
    _show(
        stdout_console(options.width, beside=options.output),
        scenario,
        timeline,
        summary,
        iteration=options.iteration,
        transfers=options.transfers,
    )


def _simulate_other_kind(document: Document, options: SimulateOptions) -> None:
    """Simulate a gravity plan or an island plan; reject options that do not apply to it."""
    from argosy.cli.planning.gravity_plans import simulate_gravity
    from argosy.cli.planning.islands import simulate_islands

    of_a_plan = ("schedule", "k", "calibration", "iteration", "transfers")
    if document.data["kind"] == "gravity":
        refuse_options(given(options, *of_a_plan, "profile"), "does not apply to a gravity plan")
        simulate_gravity(document, options)
        return
    unused = given(options, *of_a_plan, "adapt", "output")
    refuse_options(unused, "does not apply to an island plan")
    simulate_islands(document, options)


def play(
    scenario: Scenario,
    *,
    iterations: int | None,
    until: str | None,
    quiet: bool,
    least_recorded: int = 1,
) -> Timeline:
    """Simulate a plan with the given options."""
    from argosy.sim.simulate import simulate as simulate_plan

    end = parse_time("--until", until)
    check_at_least("--iteration", least_recorded - 1, 0)
    count = (
        (1 if until is None else MOST_ITERATIONS)
        if iterations is None
        else check_iterations(iterations)
    )
    with progress(f"simulating {scenario.plan!r}", quiet=quiet):
        timeline = simulate_plan(
            scenario.plan,
            scenario.chain,
            scenario.cluster,
            model=scenario.model,
            iterations=count,
            record=min(count, max(MOST_RECORDED, least_recorded)),
            until=end,
        )
    if iterations is None and len(timeline.iteration_ends) == MOST_ITERATIONS:
        raise too_long(until)
    return timeline


def _show(
    console: Console,
    scenario: Scenario,
    timeline: Timeline,
    summary: Summary,
    *,
    iteration: int,
    transfers: bool,
) -> None:
    """Print the figures and the chart of a simulation."""
    from dataclasses import replace

    from rich.text import Text

    from argosy.report.gantt import gantt
    from argosy.report.plan import plan_title
    from argosy.report.tables import device_table, link_table, summary_table

    # Drawn first, so that an --iteration that does not exist is an error before any output.
    chart = (
        gantt(timeline, iteration=iteration, width=console.width, transfers=transfers)
        if timeline.spans
        else None
    )
    where = replace(scenario.plan.cluster, name=scenario.cluster.name)
    console.print(f"{plan_title(replace(scenario.plan, cluster=where))}\n")
    if summary.stalled is not None:
        finished = f"{counted(len(summary.iteration_seconds), 'iteration')} finished"
        console.print(Text(f"STALLED, {finished}: {summary.stalled}.\n", style="bold red"))
    console.print(summary_table(summary))
    console.print()
    console.print(device_table(summary.devices))
    if summary.links:
        console.print()
        console.print(link_table(summary.links, summary.end))
    if chart is not None:
        console.print(f"\niteration {iteration}", style="bold")
        console.print(chart, soft_wrap=True)
