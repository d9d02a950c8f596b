"""Run ``argosy plan``: find out how a model should run on a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argosy.cli.command import takes_options
from argosy.cli.names import known_name
from argosy.cli.options import (
    BaseWeights,
    CalibrationFile,
    Compress,
    DtypeName,
    EvenShares,
    ExecutorName,
    ForTarget,
    ForTrace,
    Fragments,
    FreezePatterns,
    Gap,
    Islands,
    Json,
    Level,
    LoraSettings,
    MaxContext,
    MaxCost,
    MaxExpert,
    MaxPrice,
    MaxSyncEvery,
    MaxWidth,
    MemoryBudget,
    NoMixed,
    NoPrune,
    Objective,
    OffloadKinds,
    OptimizerName,
    OptionalBatch,
    OptionalModel,
    OuterRates,
    Overlap,
    PowerRank,
    Profiles,
    ProgramSource,
    Quiet,
    RobustName,
    Runnable,
    Scenarios,
    Schedules,
    SequenceLength,
    SyncEvery,
    TargetCluster,
    TimeBudget,
    TrainName,
    Width,
    Workers,
)
from argosy.cli.terminal import STDOUT, print_json, progress, stdout_console, write_file
from argosy.cluster.topology import Cluster
from argosy.errors import NothingFitsError
from argosy.plan.file import dumps_plan, plan_to_dict
from argosy.plan.plan import Plan

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from rich.console import Console

    from argosy.cli.inputs import PlanningTask
    from argosy.cli.planning.choose import ChosenPlan
    from argosy.cli.planning.plan_request import PlanRequest
    from argosy.planner import CapturedProgram, Settings


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options that ``argosy plan`` takes."""

    context: typer.Context
    cluster: TargetCluster
    model: OptionalModel = None
    global_batch: OptionalBatch = None
    program: ProgramSource = None
    sequence_length: SequenceLength = None
    dtype: DtypeName = None
    optimizer: OptimizerName = None
    train: TrainName = None
    lora: LoraSettings = None
    freeze: FreezePatterns = None
    base_weights: BaseWeights = None
    profile: Profiles = None
    calibration: CalibrationFile = None
    level: Level = 1
    gap: Gap = 0.01
    time_budget: TimeBudget = None
    memory_budget: MemoryBudget = "3.5 GiB"
    no_prune: NoPrune = False
    schedule: Schedules = None
    no_mixed: NoMixed = False
    max_width: MaxWidth = None
    max_context: MaxContext = None
    max_expert: MaxExpert = None
    even_shares: EvenShares = False
    offload: OffloadKinds = None
    runnable: Runnable = False
    for_system: ForTarget = None
    scenario: Scenarios = None
    robust: RobustName = "mean"
    for_trace: ForTrace = None
    objective: Objective = "throughput"
    max_price_per_hour: MaxPrice = None
    max_cost_per_step: MaxCost = None
    islands: Islands = "off"
    sync_every: SyncEvery = "auto"
    max_sync_every: MaxSyncEvery = 100
    fragments: Fragments = 1
    overlap: Overlap = False
    compress: Compress = "none"
    outer: OuterRates = "0.7,0.9"
    powersgd: PowerRank = 0
    workers: Workers = 1
    executor: ExecutorName = "process"
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the plan here, as JSON; - is stdout."),
    ] = None
    width: Width = None
    json: Json = False
    quiet: Quiet = False

    @property
    def wants_money(self) -> bool:
        """Return whether prices decide on the plan, or limit it."""
        limits = (self.max_price_per_hour, self.max_cost_per_step)
        return self.objective == "cost" or any(limit is not None for limit in limits)


@takes_options
def plan(options: PlanOptions) -> None:
    """Find the fastest plan for a model on a cluster.

    Prints which layers run on which devices, the predicted time, how much faster any other plan
    could be at most, the effort of the search, and which plans and devices were not chosen.

    \b
    Examples:
        argosy plan -m gpt2-xl -c mixed-16 -b 128 --dtype fp16 -o plan.json
        argosy plan -m gpt2-xl -c two-cards -b 64 --dtype fp16 --level 2
        argosy plan --program train.py:build -c two-cards
        argosy plan -m gpt2-xl -c geo-8 -b 256 --islands auto -o islands.json
        argosy plan -m llama-3-8b -c mixed-16 -b 64 --for megatron -o plan.json
        argosy plan -m gpt2-xl -c two-cards -b 64 --offload optimizer,activations
        argosy plan -m llama-3-8b -c mixed-16 -b 64 --dtype fp16 \\
            --scenario "v*.nic=on-off:low=0.1" --robust p95
    """
    from argosy.cli.planning.choose import courses_over, show_courses
    from argosy.cli.planning.islands import plan_islands
    from argosy.cli.planning.plan_request import read_request

    request = read_request(options)
    task = request.task
    try:
        with _workers(options.executor, options.workers) as pool:
            with_workers = replace(task, settings=replace(task.settings, executor=pool))
            if options.for_trace is not None:
                request.check_divisible_batch("--for-trace")
                title = f"planning {task.chain.name} for every state of {task.cluster!r}"
                with progress(title, quiet=options.quiet):
                    courses = courses_over(with_workers, options.for_trace)
                show_courses(courses, json=options.json, width=options.width)
                return
            outcome = _find(replace(request, task=with_workers))
    except NothingFitsError:
        raise NothingFitsError(_show_what_would_fit(request)) from None
    # The name that ``planned_chain`` reads, also for a file.
    best = replace(outcome.plan, model=replace(outcome.plan.model, name=request.model))
    if request.islands is not None and plan_islands(request.islands, task, best, options):
        return
    if options.output is not None:
        write_file(options.output, dumps_plan(best).encode())
    if options.json:
        print_json("plan", {**_to_dict(best), **outcome.beside})
        return
    _show(replace(outcome, plan=best), task.cluster, options)


def _find(request: PlanRequest) -> ChosenPlan:
    """Find the plan by the requested objective: time at time 0, time over scenarios, or money."""
    from argosy.cli.planning.choose import (
        MODEL,
        ChosenPlan,
        plan_for_money,
        plan_for_scenarios,
        plan_within_error,
    )
    from argosy.cli.planning.searching import search

    task, program, options = request.task, request.program, request.options
    choose: Callable[[PlanningTask], ChosenPlan]
    if options.scenario:
        title = f"planning {task.chain.name} for {task.cluster!r} under scenarios"
        choose = partial(plan_for_scenarios, names=options.scenario, robust=options.robust)
    elif options.wants_money:
        title = f"planning {task.chain.name} for parts of {task.cluster!r}"
        choose = partial(
            plan_for_money,
            objective=options.objective,
            max_price=options.max_price_per_hour,
            max_cost=options.max_cost_per_step,
        )
    elif options.robust == MODEL:
        title = f"planning {task.chain.name} for {task.cluster!r} and parts of it"
        choose = plan_within_error
    else:
        return ChosenPlan(plan=search(program or task.chain, task, quiet=options.quiet))
    with progress(title, quiet=options.quiet):
        return _divided(task, program, choose)


def _show_what_would_fit(request: PlanRequest) -> str:
    """Print the changes with which a plan would fit; return the reason why none does."""
    from argosy.cli.planning.infeasible import show_infeasibility
    from argosy.explain.infeasible import diagnose

    task, options = request.task, request.options
    with progress("nothing fits; looking for what would", quiet=options.quiet):
        why = diagnose(
            task.chain,
            task.cluster,
            global_batch=task.global_batch,
            settings=task.settings,
            model=task.model,
            reload=request.reload,
        )
    show_infeasibility(
        why, options.context, json=options.json, width=options.width, output=options.output
    )
    return why.reason


def _show(outcome: ChosenPlan, cluster: Cluster, options: PlanOptions) -> None:
    """Print the plan, what was not chosen, and the commands that come next."""
    console = stdout_console(options.width, beside=options.output)
    show_plan(console, outcome.plan, cluster)
    for part in outcome.shown:
        console.print()
        console.print(part)
    _show_alternatives(console, outcome.plan, cluster)
    if options.output is not None and options.output != STDOUT:
        named = shlex.quote(str(options.output))
        commands = [f"argosy explain {named}", f"argosy simulate {named}"]
        if options.for_system is not None:
            commands.append(f"argosy export {named} --to {options.for_system}")
        if options.program is not None:
            commands.append(f"argosy run {named} {shlex.quote(options.program)}")
        console.print(f"\nwrote {options.output}; next: {', '.join(commands)}", soft_wrap=True)


def _divided(
    task: PlanningTask,
    program: CapturedProgram | None,
    choose: Callable[[PlanningTask], ChosenPlan],
) -> ChosenPlan:
    """Choose a plan; a program whose batch cannot be divided gets one for its whole batch at
    once."""
    from argosy.cli.planning.choose import ChosenPlan
    from argosy.solve.program_plans import divided_plan, undivided_plan

    if program is None:
        return choose(task)
    outcomes: list[ChosenPlan] = []

    def find(settings: Settings) -> Plan:
        outcomes.append(choose(replace(task, settings=settings)))
        return outcomes[-1].plan

    if divided_plan(program, task.settings, find) is not None:
        return replace(outcomes[-1], plan=program.complete(outcomes[-1].plan))
    whole = undivided_plan(program, task.cluster, task.settings, task.model)
    return ChosenPlan(plan=program.complete(whole))


def _workers(name: str, count: int) -> AbstractContextManager[Executor | None]:
    """Return the workers that simulate finalists."""
    from argosy.solve.executors import ExecutorKind, workers

    return workers(ExecutorKind(known_name("--executor", name, ExecutorKind, "executors")), count)


def _to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan file, and beside it its main parts, as a dict for JSON."""
    content = plan_to_dict(plan)
    beside = {
        name: content.get(name)
        for name in ("predicted", "certificate", "search", "runner_ups", "left_out")
    }
    if plan.predicted is not None:
        tokens = plan.predicted.samples_per_second * plan.model.sequence_length
        beside["predicted"] = {**content["predicted"], "tokens_per_second": tokens}
    return {"plan": content, **beside}


def show_plan(console: Console, plan: Plan, cluster: Cluster) -> None:
    """Print the stages and the predicted figures of a plan."""
    from argosy.report.plan import figure_table, plan_title, stage_table

    console.print(f"{plan_title(plan)}\n")
    console.print(stage_table(plan, cluster))
    console.print()
    console.print(figure_table(plan, cluster))


def _show_alternatives(console: Console, plan: Plan, cluster: Cluster) -> None:
    """Print the runner-ups and the devices that were left out."""
    from argosy.report.plan import left_out_lines, runner_up_table

    if plan.runner_ups:
        console.print()
        console.print(runner_up_table(plan))
    if plan.left_out:
        console.print()
    for line in left_out_lines(plan, cluster):
        console.print(line)
