"""Run ``argosy explain``: show why a plan takes as long as it does, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from argosy.cli.command import given, picked, takes_options
from argosy.cli.inputs import Scenario, ScenarioInputs, load_scenario, refuse_options
from argosy.cli.options import (
    ClusterSource,
    DtypeName,
    Json,
    PlanSource,
    Profiles,
    Quiet,
    Traces,
    Width,
)
from argosy.cli.terminal import print_json, progress, stdout_console
from argosy.cluster.topology import Cluster
from argosy.plan.file import read_plan

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from argosy.explain import Explanation


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """The options that ``argosy explain`` takes."""

    plan: PlanSource
    cluster: ClusterSource = None
    trace: Traces = None
    profile: Profiles = None
    dtype: DtypeName = None
    width: Width = None
    json: Json = False
    quiet: Quiet = False


@takes_options
def explain(options: ExplainOptions) -> None:
    """Explain why a plan takes so long, and what would help.

    Prints what fills the memory of each device, which stage and link are the bottleneck, what
    faster ones or more memory would gain, why other plans lost, and why devices were left out: one
    of each kind is added to the plan and simulated.

    \b
    Example:
        argosy explain llama-3-8b-on-mixed-16
        argosy explain train.py:build --cluster two-cards
        argosy explain gravity.json
    """
    from argosy.explain import explain_plan
    from argosy.report.explain import explanation_to_dict

    scenario = _scenario(options)
    if scenario is None:
        return
    with progress(f"simulating {scenario.plan!r} and changes to it", quiet=options.quiet):
        explanation = explain_plan(
            scenario.plan, scenario.chain, scenario.cluster, model=scenario.model
        )
    if options.json:
        print_json("explain", {**scenario.names, **explanation_to_dict(explanation)})
        return
    console = stdout_console(options.width)
    for part in explanation_parts(explanation, scenario.cluster):
        console.print(part)


def _scenario(options: ExplainOptions) -> Scenario | None:
    """Return the plan to explain; None if it is of another kind, which is explained at once."""
    from argosy.cli.planning.gravity_plans import explain_gravity
    from argosy.cli.planning.islands import explain_islands
    from argosy.cli.planning.program import scenario_of_program

    if options.plan.partition(":")[0].endswith(".py"):
        refuse_options(given(options, "trace", "profile"), "does not apply to a program")
        return scenario_of_program(
            options.plan, options.cluster, dtype=options.dtype, quiet=options.quiet
        )
    refuse_options(given(options, "dtype"), "cannot be combined with a plan, which has its own")
    document = read_plan(options.plan)
    kind = document.data.get("kind")
    if kind == "gravity":
        refuse_options(given(options, "profile"), "does not apply to a gravity plan")
        explain_gravity(document, options)
        return None
    if kind == "islands":
        explain_islands(document, options)
        return None
    return load_scenario(document, picked(ScenarioInputs, options))


def explanation_parts(explanation: Explanation, cluster: Cluster) -> Iterator[RenderableType]:
    """Yield an explanation as tables and lines, in the order in which they are shown."""
    from argosy.report.plan import left_out_lines, plan_title, runner_up_table, stage_table

    plan = explanation.plan
    yield f"{plan_title(plan)}\n"
    yield stage_table(plan, cluster)
    yield ""
    yield from _reasons(explanation, cluster)
    yield from _what_ifs(explanation)
    if plan.runner_ups:
        yield ""
        yield runner_up_table(plan)
    yield from left_out_lines(plan, cluster)
    for test in explanation.left_out:
        yield f"tested: {test.sentence}"


def _reasons(explanation: Explanation, cluster: Cluster) -> Iterator[RenderableType]:
    """Yield the bottleneck and the memory as tables."""
    from rich.text import Text

    from argosy.report.explain import memory_table, reason_table

    yield reason_table(explanation, cluster)
    yield Text("\nmemory in GiB, when a device holds most", style="dim")
    yield memory_table(explanation, cluster)


def _what_ifs(explanation: Explanation) -> Iterator[RenderableType]:
    """Yield the gains of changes as a table and a sentence."""
    from argosy.report.explain import memory_in_a_sentence, what_if_table

    yield ""
    yield what_if_table(explanation)
    yield memory_in_a_sentence(explanation)


def show_reasons(console: Console, explanation: Explanation, cluster: Cluster) -> None:
    """Print the bottleneck and the memory."""
    for part in _reasons(explanation, cluster):
        console.print(part)
