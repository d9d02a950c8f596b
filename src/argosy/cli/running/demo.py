"""Run ``argosy demo``: plan for a mixed cluster, explain, simulate schedules, and train.

The schedules are simulated while a link is lost at times; the training runs on unequal hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.command import takes_options
from argosy.cli.inputs import Scenario, ScenarioInputs, load_scenario
from argosy.cli.options import Json, Quiet, Width
from argosy.cli.terminal import (
    no_stdout,
    print_json,
    progress,
    silent_console,
    stdout_console,
    write_file,
)
from argosy.cluster.file import with_changes
from argosy.document import make_folder
from argosy.plan.file import dumps_plan, read_plan
from argosy.plan.plan import Plan
from argosy.units import TIME

if TYPE_CHECKING:
    from rich.console import Console

    from argosy.explain import Explanation
    from argosy.report.comparison import Case
    from argosy.report.contest import ContestRow
    from argosy.timeline import Timeline

PLAN = "llama-3-8b-on-mixed-16"
"""A bundled plan that was made by hand, with a stage per node."""
PLANNERS = ("megatron", "megatron-1-kind", "metis-like", "dapple", "fsdp")
"""The planners whose plans are compared with the plan found."""
# The schedules that are compared, with their k.
SCHEDULES = {
    "k=1": ("kfkb", 1),
    "k=2": ("kfkb", 2),
    "k=4": ("kfkb", 4),
    "eager": ("eager-1f1b", None),
}
# Seconds of simulated time on the changing network.
SECONDS = 180.0
# The constant network is simulated for this many iterations.
_CALM_ITERATIONS = 3
# On the changing network this many iterations are recorded.
_RECORDED = 6
_TOLD = ("k=1", "k=4")
"""The schedules that the last sentence compares; the trace of the first one is written."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options that ``argosy demo`` takes."""

    out: Annotated[Path, typer.Option("--out", help="Folder for plans, pages and traces.")] = Path(
        "out"
    )
    train: Annotated[
        bool,
        typer.Option(
            "--train/--no-train", help="Also train a small GPT on four unequal hosts; needs torch."
        ),
    ] = True
    lab: Annotated[
        bool, typer.Option("--lab/--no-lab", help="Train in a lab where this machine can have one.")
    ] = True
    width: Width = None
    json: Json = False
    quiet: Quiet = False


@takes_options
def demo(options: DemoOptions) -> None:
    """Plan a model for a mixed cluster, explain, simulate, train.

    On a bundled cluster of 16 GPUs of two generations: finds a plan, compares it with others, shows
    its bottleneck and what fills its memory, and simulates schedules while other jobs use a link.
    Then a small GPT is trained on four unequal hosts of this machine, by Argosy's plan and by the
    even one. Needs no GPU.

    \b
    Example:
        argosy demo
    """
    no_stdout(options.out, "a folder", option="--out")
    make_folder(options.out)  # a problem is reported before the demonstration, not after it
    console = silent_console() if options.json else stdout_console(options.width)
    by_hand = load_scenario(read_plan(PLAN))
    _show_cluster(console, by_hand)
    best_plan, explanation, seconds_by_hand = _plan(by_hand, quiet=options.quiet)
    rows = _compare(by_hand, best_plan, quiet=options.quiet)
    _show_plan(console, by_hand, explanation, seconds_by_hand, rows)
    cases, timeline = _play_schedules(quiet=options.quiet)
    _show_schedules(console, by_hand.plan, cases)
    plan_file, trace_file, page_file = (
        options.out / name for name in ("demo-plan.json", "demo-trace.json.gz", "demo.html")
    )
    _write_files(best_plan, plan_file, timeline, trace_file)
    _write_page(by_hand, best_plan, rows, page_file, quiet=options.quiet)
    _show_files(console, plan_file, trace_file, page_file)
    result = _as_dict(explanation, seconds_by_hand, rows, cases)
    result |= {"plan": str(plan_file), "trace": str(trace_file), "page": str(page_file)}
    if options.train:
        from argosy.cli.running.demo_training import train as train_small

        result["training"] = train_small(
            console, options.out, in_lab=options.lab, quiet=options.quiet
        )
    if options.json:
        print_json("demo", result)


def _play_schedules(*, quiet: bool) -> tuple[list[Case], Timeline]:
    """Simulate the schedules; return their figures, and the timeline that is written."""
    cases, timelines = [], {}
    for name, (schedule, k) in SCHEDULES.items():
        scenario = load_scenario(read_plan(PLAN), ScenarioInputs(schedule=schedule, k=k))
        with progress(f"simulating {SECONDS:g} s with {name}", quiet=quiet):
            case, timelines[name] = _play(scenario, name)
        cases.append(case)
    return cases, timelines[_TOLD[0]]


def _write_files(plan: Plan, plan_file: Path, timeline: Timeline, trace_file: Path) -> None:
    """Write the plan, and the trace of a timeline."""
    from argosy.cli.planning.trace import trace_files

    write_file(plan_file, dumps_plan(plan).encode(), make_folder=True)
    for path, content in trace_files(timeline, output=trace_file).items():
        write_file(path, content)


def _show_files(console: Console, plan_file: Path, trace_file: Path, page_file: Path) -> None:
    """Print which files were written."""
    console.print(
        f"\nwrote {page_file}, the plan as a page to look at in a browser", soft_wrap=True
    )
    console.print(f"wrote {plan_file}; next: argosy explain {plan_file}", soft_wrap=True)
    trace_line = (
        f"wrote {trace_file}, {_RECORDED} iterations with {_TOLD[0]}; open it at "
        "https://ui.perfetto.dev"
    )
    console.print(trace_line, soft_wrap=True)


def _plan(by_hand: Scenario, *, quiet: bool) -> tuple[Plan, Explanation, float]:
    """Find a plan for the same task; return it with its explanation and the seconds of the plan by
    hand."""
    from argosy.cli.planning.searching import search
    from argosy.explain import explain_plan
    from argosy.sim.simulate import simulate

    chain, cluster = by_hand.chain, by_hand.cluster
    best_plan = search(chain, by_hand.task, quiet=quiet)
    seconds = simulate(by_hand.plan, chain, cluster).iteration_ends[0]
    return best_plan, explain_plan(best_plan, chain, cluster), seconds


def _compare(by_hand: Scenario, best_plan: Plan, *, quiet: bool) -> list[ContestRow]:
    """Compare the plan found with those of other planners, on the constant network."""
    from argosy.cli.planning.compare import compared
    from argosy.cluster.lasting import at_time_zero

    task = replace(by_hand.task, cluster=at_time_zero(by_hand.cluster))
    return compared(task, names=PLANNERS, ours=best_plan, quiet=quiet)


def _play(scenario: Scenario, name: str) -> tuple[Case, Timeline]:
    """Simulate the plan on the constant network, and for ``SECONDS`` on the changing one."""
    from argosy.report.comparison import Case
    from argosy.report.summary import summarise
    from argosy.sim.simulate import simulate

    plan, chain, cluster = scenario.plan, scenario.chain, scenario.cluster
    calm = with_changes(cluster, [])
    quiet_run = simulate(plan, chain, calm, iterations=_CALM_ITERATIONS, record=1)
    timeline = simulate(plan, chain, cluster, iterations=1000, record=_RECORDED, until=SECONDS)
    summaries = summarise(plan, calm, quiet_run), summarise(plan, cluster, timeline)
    return Case(name=name, calm=summaries[0], changing=summaries[1]), timeline


def _write_page(
    by_hand: Scenario, best_plan: Plan, rows: list[ContestRow], page: Path, *, quiet: bool
) -> None:
    """Write the page of the plan found, with those of other planners as bars."""
    from argosy.cli.planning.report import write_page
    from argosy.cluster.lasting import at_time_zero
    from argosy.report.page import Report

    report = Report(
        plan=best_plan,
        chain=by_hand.chain,
        cluster=at_time_zero(by_hand.cluster),
        model=by_hand.model,
        rivals=[(row.name, row.entry.seconds if row.entry else None, row.reason) for row in rows],
    )
    write_page(report, page, quiet=quiet)


def _as_dict(
    explanation: Explanation, seconds_by_hand: float, rows: list[ContestRow], cases: list[Case]
) -> dict[str, object]:
    """Return the results as a dict for JSON."""
    from argosy.report.comparison import cases_to_dict
    from argosy.report.contest import rows_to_dict
    from argosy.report.explain import explanation_to_dict

    return {
        "by_hand": {"plan": PLAN, "iteration_seconds": seconds_by_hand},
        "explanation": explanation_to_dict(explanation),
        "cases": cases_to_dict(cases),
        "planners": rows_to_dict(rows),
    }


def _show_cluster(console: Console, scenario: Scenario) -> None:
    """Print the cluster in two lines; the second shows its changing link."""
    from argosy.report.marks import percent, sparkline

    link = next(link for link in scenario.cluster.links if not link.bandwidth.is_constant)
    least = percent(min(link.bandwidth.values) / max(link.bandwidth.values))
    console.print(f"{scenario.cluster!r}")
    picture = sparkline(link.bandwidth, SECONDS, width=32)
    console.print(
        f"{link.edge} {picture} {SECONDS:g} s; other jobs leave it {least} at times", soft_wrap=True
    )


def _show_plan(
    console: Console,
    by_hand: Scenario,
    explanation: Explanation,
    seconds_by_hand: float,
    rows: list[ContestRow],
) -> None:
    """Print the plan, the comparison and the explanation."""
    from argosy.cli.planning.explain import show_reasons
    from argosy.cli.planning.plan import show_plan
    from argosy.report.contest import contest_table
    from argosy.report.explain import gain_in_percent, help_in_a_sentence

    console.print("\n1. Which plan?", style="bold")
    show_plan(console, explanation.plan, by_hand.cluster)
    by_hand_takes = TIME.format(seconds_by_hand)
    gain = gain_in_percent(seconds_by_hand / explanation.seconds - 1)
    console.print(
        f"\nBy hand, with a stage per node, an iteration takes {by_hand_takes}; this plan is "
        f"{gain} faster."
    )
    console.print(
        "And with the plans of others, in the same simulator (argosy compare knows more of them):\n"
    )
    console.print(contest_table(rows))
    console.print("\n2. Why is it no faster?", style="bold")
    show_reasons(console, explanation, by_hand.cluster)
    console.print(f"\n{help_in_a_sentence(explanation)}")


def _show_schedules(console: Console, plan: Plan, cases: list[Case]) -> None:
    """Print the schedules on the constant and on the changing network."""
    from argosy.report.comparison import case_table, in_a_sentence

    console.print("\n3. And when the network changes?", style="bold")
    console.print(
        f"The plan by hand, {plan.num_micro_batches} micro-batches of {plan.micro_batch_size}: "
        "simulated time per iteration when k forwards take turns with k backwards; eager: k=1, "
        "with more forwards before the first backward.\n"
    )
    console.print(case_table(cases))
    by_name = {case.name: case for case in cases}
    console.print(f"\n{in_a_sentence(*(by_name[name] for name in _TOLD))}")
