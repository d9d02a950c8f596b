"""``argosy demo``: a bundled plan on a mixed cluster while other jobs take a link away."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.options import Json, Quiet, Width

if TYPE_CHECKING:
    from rich.console import Console

    from argosy.cli.inputs import Scenario
    from argosy.report.comparison import Case
    from argosy.timeline import Timeline

PLAN = "llama-3-8b-on-mixed-16"
SCHEDULES = {
    "k=1": ("kfkb", 1),
    "k=2": ("kfkb", 2),
    "k=4": ("kfkb", 4),
    "eager": ("eager-1f1b", None),
}
SECONDS = 180.0
"""Of simulated time on the changing network."""
_CALM_ITERATIONS = 3
_RECORDED = 6
_CHARTS = ("k=1", "k=4")
_CHART_TIMES = (32.0, 34.5)
"""Seconds; within the first time at which the link is taken away."""


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the trace file.")] = Path("out"),
    width: Width = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """A link that comes and goes, and what schedules do about it.

    Plays a bundled plan on a bundled cluster of 16 GPUs of two generations: how long iterations take on a calm
    network and while other jobs take a link away. Needs no GPU.

    \b
    Example:
        argosy demo
    """
    from argosy.cli.inputs import load_scenario, read_bundled_or_file
    from argosy.cli.terminal import print_json, progress, stdout_console, write_file
    from argosy.cli.trace import trace_files
    from argosy.report.comparison import cases_to_dict

    cases, timelines = [], {}
    for name, (schedule, k) in SCHEDULES.items():
        scenario = load_scenario(read_bundled_or_file(PLAN), schedule=schedule, k=k)
        with progress(f"simulating {SECONDS:g} s with {name}", quiet=quiet):
            case, timelines[name] = _play(scenario, name)
        cases.append(case)
    output = out / "demo-trace.json.gz"
    for path, content in trace_files(timelines[_CHARTS[0]], output=output).items():
        write_file(path, content)
    if json:
        print_json("demo", {"plan": PLAN, "cases": cases_to_dict(cases), "trace": str(output)})
        return
    console = stdout_console(width)
    _show(console, scenario, cases, timelines)
    told = f"wrote {output}, {_RECORDED} iterations with {_CHARTS[0]}; open it at https://ui.perfetto.dev"
    console.print(f"\n{told}", soft_wrap=True)


def _play(scenario: Scenario, name: str) -> tuple[Case, Timeline]:
    """The plan on the calm network, and for ``SECONDS`` on the changing one."""
    from argosy.cluster.file import with_changes
    from argosy.report.comparison import Case
    from argosy.report.summary import summarise
    from argosy.sim.simulate import simulate

    plan, chain, cluster = scenario.plan, scenario.chain, scenario.cluster
    calm = with_changes(cluster, [])
    quiet_run = simulate(plan, chain, calm, iterations=_CALM_ITERATIONS, record=1)
    timeline = simulate(plan, chain, cluster, iterations=1000, record=_RECORDED, until=SECONDS)
    summaries = summarise(plan, calm, quiet_run), summarise(plan, cluster, timeline)
    return Case(name=name, calm=summaries[0], changing=summaries[1]), timeline


def _show(console: Console, scenario: Scenario, cases: list[Case], timelines: dict[str, Timeline]) -> None:
    from argosy.report.comparison import case_table, in_a_sentence
    from argosy.report.gantt import gantt

    plan = scenario.plan
    _show_cluster(console, scenario)
    console.print(
        f"\n{plan.model.name}, {len(plan.stages)} pipeline stages (one per node), {plan.num_micro_batches} "
        f"micro-batches of {plan.micro_batch_size}.\n"
        "Simulated time per iteration when k forwards take turns with k backwards;\n"
        "eager: k=1, with more forwards before the first backward.\n"
    )
    console.print(case_table(cases))
    by_name = {case.name: case for case in cases}
    console.print(f"\n{in_a_sentence(*(by_name[name] for name in _CHARTS))}\n")
    for name in _CHARTS:
        console.print(f"{name}, while the link is slow", style="bold")
        is_last = name == _CHARTS[-1]
        chart = gantt(timelines[name], between=_CHART_TIMES, width=console.width, legend=is_last)
        console.print(chart, soft_wrap=True)


def _show_cluster(console: Console, scenario: Scenario) -> None:
    """The cluster in two lines, the second being its changing link."""
    from argosy.report.marks import percent, sparkline

    link = next(link for link in scenario.cluster.links if not link.bandwidth.is_constant)
    least = percent(min(link.bandwidth.values) / max(link.bandwidth.values))
    console.print(f"{scenario.cluster!r}")
    picture = sparkline(link.bandwidth, 0.0, SECONDS, width=32)
    console.print(f"{link.edge} {picture} {SECONDS:g} s; other jobs leave it {least} at times", soft_wrap=True)
