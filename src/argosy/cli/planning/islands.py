"""Handle island plans in ``argosy plan``, ``simulate``, ``explain`` and ``compare``."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.cli.command import picked
from argosy.cli.inputs import (
    MOST_ITERATIONS,
    PlanningTask,
    ScenarioInputs,
    check_iterations,
    load_scenario,
    parse_time,
    refuse_options,
    whole_number,
)
from argosy.cli.names import known_name
from argosy.cli.terminal import STDOUT, print_json, progress, stdout_console, write_file
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.document import Document, JsonObject
from argosy.errors import InfeasibleError, bad_input
from argosy.plan.plan import Plan
from argosy.units import TIME
from argosy.workload.chain import Chain

if TYPE_CHECKING:
    from rich.console import Console

    from argosy.choose.islands import IslandOptions
    from argosy.cli.planning.explain import ExplainOptions
    from argosy.cli.planning.plan import PlanOptions
    from argosy.cli.planning.simulate import SimulateOptions
    from argosy.plan.islands import IslandPlan, OuterOptimizer
    from argosy.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class IslandScenario:
    """An island plan with everything that is needed to simulate it."""

    plan: IslandPlan
    chain: Chain
    cluster: Cluster
    model: ComputeModel


@dataclass(frozen=True, kw_only=True)
class IslandRequest:
    """The options of a command that are about islands, as the user gave them."""

    islands: str = "off"
    sync_every: str = "auto"
    fragments: int = 1
    overlap: bool = False
    compress: str = "none"
    max_sync_every: int = 100
    outer: str = "0.7,0.9"

    def options(self) -> IslandOptions | None:
        """Return the options of islands; None for ``--islands off``.

        Raises ``InputError`` if other options of islands are given with ``--islands off``.
        """
        from argosy.choose.islands import IslandOptions
        from argosy.plan.islands import Compression

        if self.islands == "off":
            changed = {
                f"--{option.name.replace('_', '-')}": True
                for option in fields(self)
                if getattr(self, option.name) != option.default
            }
            refuse_options(changed, "needs --islands")
            return None
        count = None if self.islands == "auto" else whole_number(self.islands)
        if count is None and self.islands != "auto":
            raise bad_input("auto, off or a whole number", self.islands, "--islands")
        every = None if self.sync_every == "auto" else whole_number(self.sync_every)
        if self.sync_every != "auto" and not every:
            expected = "auto or a whole number of at least 1"
            raise bad_input(expected, self.sync_every, "--sync-every")
        compression = known_name("--compress", self.compress, Compression, "compressions")
        return IslandOptions(
            count=count,
            sync_every=every,
            limit=self.max_sync_every,
            fragments=self.fragments,
            overlaps=self.overlap,
            outer=_outer(self.outer),
            compression=Compression(compression),
        )


def _outer(text: str) -> OuterOptimizer:
    """Parse the rate and the momentum of the outer optimizer."""
    from argosy.plan.islands import OuterOptimizer

    try:
        rate, momentum = (float(part) for part in text.split(","))
    except ValueError:
        rate = momentum = math.nan
    if not (0 < rate < math.inf and 0 <= momentum < 1):
        raise bad_input(
            "a rate above 0 and a momentum from 0 to below 1, such as 0.7,0.9", text, "--outer"
        )
    return OuterOptimizer(learning_rate=rate, momentum=momentum, nesterov=momentum > 0)


def check_divisible(options: IslandOptions | None, cluster: Cluster) -> None:
    """Raise ``InputError``, before any search, if a cluster does not have the requested number of
    parts."""
    from argosy.cluster.divide import division_into

    if options is not None and options.count is not None:
        division_into(cluster, options.count)


def plan_islands(
    islands: IslandOptions, task: PlanningTask, synchronous: Plan, options: PlanOptions
) -> bool:
    """Plan, write and show islands.

    Returns False, with a line on stderr, if ``--islands auto`` finds that the synchronous plan is
    faster.
    """
    from argosy.choose.islands import find_island_plan

    why, auto = None, options.islands == "auto"
    try:
        with progress(f"planning islands of {task.cluster!r}", quiet=options.quiet):
            best = find_island_plan(
                task.chain,
                task.cluster,
                global_batch=task.global_batch,
                options=islands,
                settings=task.settings,
                model=task.model,
                synchronous=synchronous,
            )
    except InfeasibleError as error:
        if not auto:
            raise
        why = str(error)
    else:
        assert best.predicted is not None and synchronous.predicted is not None
        if auto and best.predicted.step_seconds >= synchronous.predicted.iteration_seconds:
            why = (
                f"the best island plan takes {TIME.format(best.predicted.step_seconds)} a step, "
                "which is no faster"
            )
    if why is not None:
        sys.stderr.write(f"no islands: {why}\n")
        return False
    named = replace(best.model, name=synchronous.model.name)
    best = replace(best, islands=tuple(replace(island, model=named) for island in best.islands))
    _write_and_show(best, task.cluster, options)
    return True


def _write_and_show(plan: IslandPlan, cluster: Cluster, options: PlanOptions) -> None:
    """Write an island plan to ``--output``, and print it."""
    from argosy.plan.islands_file import dumps_island_plan, island_plan_to_dict

    output = options.output
    if output is not None:
        write_file(output, dumps_island_plan(plan).encode())
    if options.json:
        content = island_plan_to_dict(plan)
        print_json(
            "plan",
            {"plan": content, "predicted": content.get("predicted"), "algorithm": plan.algorithm},
        )
        return
    console = stdout_console(options.width, beside=output)
    show_island_plan(console, plan, cluster)
    if output is not None and output != STDOUT:
        file = shlex.quote(str(output))
        console.print(
            f"\nwrote {output}; next: argosy simulate {file}, argosy explain {file}", soft_wrap=True
        )


def show_island_plan(console: Console, plan: IslandPlan, cluster: Cluster) -> None:
    """Print the islands of a plan and its predicted figures."""
    from argosy.report.islands import island_figures, island_table, island_title

    console.print(f"{island_title(plan)}\n", soft_wrap=True)
    console.print(island_table(plan, cluster))
    console.print()
    console.print(island_figures(plan, cluster))


def load_island_scenario(document: Document, given: ScenarioInputs) -> IslandScenario:
    """Load the island plan in a document, on its own cluster or another, under other changes."""
    from argosy.plan.islands_file import island_plan_from_document

    plan = island_plan_from_document(document)
    parts = [
        load_scenario(document.inside("islands", at), replace(given, quiet=given.quiet or at > 0))
        for at in range(len(plan.islands))
    ]
    first = parts[0]
    islands = tuple(part.plan for part in parts)
    return IslandScenario(
        plan=replace(plan, islands=islands),
        chain=first.chain,
        cluster=first.cluster,
        model=first.model,
    )


def simulate_islands(document: Document, options: SimulateOptions) -> None:
    """Simulate an island plan; without a number of steps, four exchanges of every fragment."""
    from argosy.cluster.lasting import last_change
    from argosy.explain.islands import step_range
    from argosy.report.islands import course_lines, course_to_dict, island_table, island_title
    from argosy.sim.islands import play_islands

    scenario = load_island_scenario(document, picked(ScenarioInputs, options))
    plan = scenario.plan
    steps = 4 * plan.sync_every if options.until is None else MOST_ITERATIONS
    steps = steps if options.iterations is None else check_iterations(options.iterations)
    with progress(f"simulating {plan!r}", quiet=options.quiet):
        course = play_islands(
            plan,
            scenario.chain,
            scenario.cluster,
            scenario.model,
            steps=steps,
            until=parse_time("--until", options.until),
        )
        between = None
        if last_change([scenario.cluster]) and course.steps:
            between = step_range(
                plan, scenario.chain, scenario.cluster, scenario.model, steps=course.steps
            )
    if options.json:
        print_json("simulate", {**_names(scenario), **course_to_dict(plan, course, between)})
        return
    console = stdout_console(options.width)
    console.print(f"{island_title(plan)}\n", soft_wrap=True)
    console.print(island_table(plan, scenario.cluster))
    console.print()
    console.print(course_lines(plan, course, between))


def report_islands(document: Document, output: Path, given: ScenarioInputs) -> int:
    """Write the page of an island plan; return its size in bytes."""
    from argosy.report.page.islands import IslandReport

    scenario = load_island_scenario(document, given)
    with progress(f"simulating {scenario.plan!r}", quiet=given.quiet):
        page = IslandReport(
            plan=scenario.plan, chain=scenario.chain, cluster=scenario.cluster, model=scenario.model
        ).html.encode()
    write_file(output, page)
    return len(page)


def island_timeline(
    document: Document, given: ScenarioInputs, *, iterations: int | None
) -> Timeline:
    """Return the first ``iterations`` steps of an island plan as a timeline.

    By default, these are the steps around its first exchange.
    """
    from argosy.sim.island_window import IslandWindow
    from argosy.sim.islands import play_islands

    scenario = load_island_scenario(document, given)
    plan = scenario.plan
    window = IslandWindow.around_exchange(plan)
    if iterations is not None:
        window = IslandWindow(first=0, end=check_iterations(iterations))
    with progress(f"simulating {plan!r}", quiet=given.quiet):
        play_islands(
            plan, scenario.chain, scenario.cluster, scenario.model, steps=window.end, window=window
        )
    return window.timeline(plan, scenario.cluster)


def _names(scenario: IslandScenario) -> JsonObject:
    """Return the names of the model, the cluster and the algorithm for JSON."""
    where = scenario.cluster.identity
    return {
        "model": scenario.plan.model.name,
        "cluster": where,
        "algorithm": scenario.plan.algorithm,
    }


def explain_islands(document: Document, options: ExplainOptions) -> None:
    """Print the cost and the effect of an island plan, and its time with changes.

    The changes are other exchange intervals and faster links between islands.
    """
    from argosy.explain.islands import island_what_ifs
    from argosy.report.islands import what_changes
    from argosy.report.tables import plain_table

    scenario = load_island_scenario(document, picked(ScenarioInputs, options))
    with progress(f"simulating {scenario.plan!r} and changes to it", quiet=options.quiet):
        rows = island_what_ifs(scenario.plan, scenario.chain, scenario.cluster, scenario.model)
    if options.json:
        changes = [{"change": name, "step_seconds": seconds} for name, seconds in rows]
        print_json(
            "explain",
            {**_names(scenario), "changes": changes, "what_changes": what_changes(scenario.plan)},
        )
        return
    console = stdout_console(options.width)
    show_island_plan(console, scenario.plan, scenario.cluster)
    console.print()
    table = plain_table("change", ">step")
    for name, seconds in rows:
        table.add_row(
            name, TIME.format(seconds, digits=4) if math.isfinite(seconds) else "never ends"
        )
    console.print(table)


def compared_islands(
    task: PlanningTask, synchronous: float, options: IslandOptions, *, quiet: bool
) -> list[IslandPlan]:
    """Return the best island plans, blocking and overlapped, as far as they exist.

    Each is given the seconds of a synchronous plan to compare with.
    """
    from argosy.choose.islands import find_island_plan

    plans: list[IslandPlan] = []
    least = options.limit if options.sync_every is None else options.sync_every
    for overlaps in (False, True) if least >= 2 * options.fragments else (False,):
        try:
            with progress(f"planning islands of {task.cluster!r}", quiet=quiet):
                plan = find_island_plan(
                    task.chain,
                    task.cluster,
                    global_batch=task.global_batch,
                    options=replace(options, overlaps=overlaps),
                    settings=task.settings,
                    model=task.model,
                )
        except InfeasibleError as error:
            sys.stderr.write(f"no islands: {error}\n")
            return plans
        assert plan.predicted is not None
        plans.append(
            replace(plan, predicted=replace(plan.predicted, synchronous_seconds=synchronous))
        )
    return plans
