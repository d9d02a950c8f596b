"""Run ``argosy plan``: find out how a model should run on a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from rich.console import Console

    from argosy.cli.planning.choose import ChosenPlan, PlanningTask
    from argosy.cluster.topology import Cluster
    from argosy.plan.plan import Plan
    from argosy.planner import CapturedProgram, Settings
    from argosy.schedule import ScheduleSpec
    from argosy.workload.chain import Chain


def plan(
    context: typer.Context,
    cluster: TargetCluster,
    model: OptionalModel = None,
    global_batch: OptionalBatch = None,
    program: ProgramSource = None,
    sequence_length: SequenceLength = None,
    dtype: DtypeName = None,
    optimizer: OptimizerName = None,
    train: TrainName = None,
    lora: LoraSettings = None,
    freeze: FreezePatterns = None,
    base_weights: BaseWeights = None,
    profile: Profiles = None,
    calibration: CalibrationFile = None,
    level: Level = 1,
    gap: Gap = 0.01,
    time_budget: TimeBudget = None,
    memory_budget: MemoryBudget = "3.5 GiB",
    no_prune: NoPrune = False,
    schedule: Schedules = None,
    no_mixed: NoMixed = False,
    max_width: MaxWidth = None,
    max_context: MaxContext = None,
    max_expert: MaxExpert = None,
    even_shares: EvenShares = False,
    offload: OffloadKinds = None,
    runnable: Runnable = False,
    for_system: ForTarget = None,
    scenario: Scenarios = None,
    robust: RobustName = "mean",
    for_trace: ForTrace = None,
    objective: Objective = "throughput",
    max_price_per_hour: MaxPrice = None,
    max_cost_per_step: MaxCost = None,
    islands: Islands = "off",
    sync_every: SyncEvery = "auto",
    max_sync_every: MaxSyncEvery = 100,
    fragments: Fragments = 1,
    overlap: Overlap = False,
    compress: Compress = "none",
    outer: OuterRates = "0.7,0.9",
    powersgd: PowerRank = 0,
    workers: Workers = 1,
    executor: ExecutorName = "process",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the plan here, as JSON; - is stdout."),
    ] = None,
    width: Width = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
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
    from argosy.cli.inputs import (
        check_at_least,
        compute_model,
        load_calibration,
        parse_size,
        parse_time,
        refuse_options,
    )
    from argosy.cli.planning.choose import (
        PlanningTask,
        check_what_counts,
        courses_over,
        show_courses,
    )
    from argosy.cli.planning.islands import check_divisible, island_options, plan_islands
    from argosy.cli.planning.program import capture_program
    from argosy.cli.planning.target import check_target, with_target
    from argosy.cli.terminal import (
        STDOUT,
        check_output,
        print_json,
        progress,
        stdout_console,
        write_file,
    )
    from argosy.cluster.file import load_cluster
    from argosy.errors import NothingFitsError, excluded, refused
    from argosy.plan.file import dumps_plan
    from argosy.planner import Settings
    from argosy.solve.settings import with_offload
    from argosy.workload.load import load_model
    from argosy.workload.settings import parse_settings
    from argosy.workload.tuning import parse_tuning

    captured = None
    if program is not None:
        given = {
            "--model": model,
            "--global-batch": global_batch,
            "--sequence-length": sequence_length,
        }
        given |= {
            "--max-width": max_width,
            "--max-context": max_context,
            "--train": train,
            "--lora": lora,
        }
        given |= {"--base-weights": base_weights, "--max-expert": max_expert, "--for": for_system}
        refuse_options({**given, "--freeze": freeze}, "cannot be combined with --program")
        known_optimizer = parse_settings(optimizer=optimizer).optimizer
        if output is not None:
            check_output(output, cluster, program.partition(":")[0], json=json)
        captured = capture_program(program, dtype=dtype, quiet=quiet, powersgd=powersgd)
        model, global_batch = captured.chain.name, captured.samples
    if model is None or global_batch is None:
        raise refused("argosy plan needs --model and --global-batch, or --program FILE.py:build")
    check_at_least("--global-batch", global_batch, 1)
    sync = (sync_every, max_sync_every, fragments, overlap, compress, outer)
    wanted = island_options(islands, *sync)
    check_what_counts(
        scenario,
        robust,
        for_trace,
        objective,
        (max_price_per_hour, max_cost_per_step),
        has_output=output is not None,
    )
    if wanted is not None:
        conflicting: dict[str, object] = {
            "--scenario": scenario,
            "--for": for_system,
            "--for-trace": for_trace,
            "--max-price-per-hour": max_price_per_hour,
        }
        conflicting |= {
            "--max-cost-per-step": max_cost_per_step,
            "--objective": None if objective != "cost" else objective,
        }
        conflicting |= {"--robust": robust if robust != "mean" else None}
        mixes = captured is not None and captured.mixes is not None
        conflicting |= {"--program of a step that mixes samples": mixes}
        refuse_options(conflicting, "cannot be combined with --islands")
    if output is not None:
        check_output(output, cluster, model, calibration, *(profile or ()), json=json)
    budget = parse_time("--time-budget", time_budget)
    settings = Settings(
        level=level, gap=gap, time_budget=budget, prune=not no_prune, runnable=runnable
    )
    if powersgd:
        split = {
            "--max-width": max_width if max_width != 1 else None,
            "--for": for_system,
            "--max-expert": max_expert,
        }
        refuse_options(
            {**split, "--max-context": max_context, "--offload": offload},
            "cannot be combined with --powersgd",
        )
    most = parse_size("--memory-budget", memory_budget)
    settings = replace(
        settings, memory_budget=most, mixed=False if no_mixed else None, even_shares=even_shares
    )
    settings = replace(
        settings, max_width=max_width, max_context=max_context, max_expert=max_expert
    )
    if schedule:
        settings = replace(settings, schedules=parse_schedules(schedule))
    if offload is not None:
        settings = with_offload(settings, offload)
    if for_system is not None:
        settings, calibration = with_target(
            settings, for_system, calibration, named=schedule is not None
        )
    constants = load_calibration(calibration)
    where = constants.cluster(load_cluster(cluster))
    check_divisible(wanted, where)
    if captured is not None:
        captured = captured.on(where)
        chain = constants.chain(captured.chain)
        chain = replace(chain, optimizer=known_optimizer or chain.optimizer)
        captured = replace(captured, chain=chain)
    else:
        tuning = parse_tuning(train=train, lora=lora, freeze=freeze or (), base=base_weights)
        model_options: dict[str, Any] = {
            "sequence_length": sequence_length,
            "dtype": dtype,
            "optimizer": optimizer,
        }
        model_options |= {"tuning": tuning, "powersgd": powersgd}
        chain = constants.chain(load_model(model, **model_options))
        check_target(settings.target, chain, model)
    costs = compute_model(profile or (), constants, chain=chain, cluster=where, quiet=quiet)
    task = PlanningTask(
        chain=chain, cluster=where, global_batch=global_batch, settings=settings, model=costs
    )
    try:
        with _workers(executor, workers) as pool:
            task = replace(task, settings=replace(settings, executor=pool))
            if for_trace is not None:
                if captured is not None and captured.mixes is not None:
                    raise excluded("--for-trace", "a program that mixes samples")
                with progress(f"planning {chain.name} for every state of {where!r}", quiet=quiet):
                    courses = courses_over(task, for_trace)
                show_courses(courses, json=json, width=width)
                return
            how = (scenario, robust, objective, max_price_per_hour, max_cost_per_step)
            outcome = _find(task, captured, *how, quiet=quiet)
    except NothingFitsError:
        from argosy.cli.planning.infeasible import show_infeasibility, with_optimizer
        from argosy.explain.infeasible import diagnose

        def reload(**changes: Any) -> Chain:
            if captured is not None:
                return with_optimizer(chain, **changes)
            return constants.chain(load_model(model, **{**model_options, **changes}))

        with progress("nothing fits; looking for what would", quiet=quiet):
            why = diagnose(
                chain,
                where,
                global_batch=global_batch,
                settings=settings,
                model=costs,
                reload=reload,
            )
        show_infeasibility(why, context, json=json, width=width, output=output)
        raise NothingFitsError(why.reason) from None
    best = outcome.plan
    # The name that ``planned_chain`` reads, also for a file.
    best = replace(best, model=replace(best.model, name=model))
    task = replace(task, settings=settings)  # without the workers, which have ended
    if wanted is not None and plan_islands(
        wanted,
        task,
        best,
        auto=islands == "auto",
        output=output,
        json=json,
        width=width,
        quiet=quiet,
    ):
        return
    if output is not None:
        write_file(output, dumps_plan(best).encode())
    if json:
        print_json("plan", {**_to_dict(best), **outcome.beside})
        return
    console = stdout_console(width, beside=output)
    show_plan(console, best, where)
    for part in outcome.shown:
        console.print()
        console.print(part)
    _show_alternatives(console, best, where)
    if output is not None and output != STDOUT:
        named = shlex.quote(str(output))
        commands = [f"argosy explain {named}", f"argosy simulate {named}"]
        commands += [f"argosy export {named} --to {for_system}"] if for_system is not None else []
        commands += [f"argosy run {named} {shlex.quote(program)}"] if program is not None else []
        console.print(f"\nwrote {output}; next: {', '.join(commands)}", soft_wrap=True)


def _find(
    task: PlanningTask,
    program: CapturedProgram | None,
    scenarios: Sequence[str] | None,
    robust: str,
    objective: str,
    max_price: float | None,
    max_cost: float | None,
    *,
    quiet: bool,
) -> ChosenPlan:
    """Find the plan by the requested objective: time at time 0, time over scenarios, or money."""
    from argosy.cli.planning.choose import (
        MODEL,
        ChosenPlan,
        plan_for_money,
        plan_for_scenarios,
        plan_within_error,
    )
    from argosy.cli.planning.searching import search
    from argosy.cli.terminal import progress

    if scenarios:
        with progress(
            f"planning {task.chain.name} for {task.cluster!r} under scenarios", quiet=quiet
        ):
            return _divided(
                task,
                program,
                lambda divided_task: plan_for_scenarios(divided_task, scenarios, robust),
            )
    if objective == "cost" or max_price is not None or max_cost is not None:
        with progress(f"planning {task.chain.name} for parts of {task.cluster!r}", quiet=quiet):
            return _divided(
                task,
                program,
                lambda divided_task: plan_for_money(divided_task, objective, max_price, max_cost),
            )
    if robust == MODEL:
        with progress(
            f"planning {task.chain.name} for {task.cluster!r} and parts of it", quiet=quiet
        ):
            return _divided(task, program, plan_within_error)
    workload = task.chain if program is None else program
    return ChosenPlan(
        plan=search(
            workload,
            task.cluster,
            global_batch=task.global_batch,
            settings=task.settings,
            model=task.model,
            quiet=quiet,
        )
    )


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
    return ChosenPlan(plan=program.complete(undivided_plan(program, task.cluster, task.model)))


def _workers(name: str, count: int) -> AbstractContextManager[Executor | None]:
    """Return the workers that simulate finalists."""
    from argosy.solve.executors import ExecutorKind, workers

    return workers(ExecutorKind(known_name("--executor", name, ExecutorKind, "executors")), count)


def parse_schedules(names: Sequence[str]) -> tuple[ScheduleSpec, ...]:
    """Return the schedules of ``--schedule``, each once; ``kfkb`` alone means every k that is
    searched."""
    from argosy.cli.inputs import whole_number
    from argosy.errors import bad_input, closest
    from argosy.planner import SCHEDULES
    from argosy.schedule import ScheduleKind, ScheduleSpec

    searched_on_request = [
        ScheduleSpec(kind=kind) for kind in (ScheduleKind.GPIPE, ScheduleKind.ZERO_BUBBLE)
    ]
    interleaved = [ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=chunks) for chunks in (2, 4)]
    interleaved += [ScheduleSpec(kind=kind) for kind in ScheduleKind if kind.is_v]
    searched = [*SCHEDULES, *searched_on_request, *interleaved]
    known = list(dict.fromkeys(str(spec.kind) for spec in searched))
    chosen: list[ScheduleSpec] = []
    for name in names:
        kind, separator, k = name.partition(":")
        if kind in known and not separator:
            chosen += [spec for spec in searched if str(spec.kind) == kind]
        elif kind == ScheduleKind.KFKB and (group := whole_number(k)):
            chosen.append(ScheduleSpec(kind=ScheduleKind.KFKB, k=group))
        else:
            expected = f"one of the schedules {', '.join(known)} or kfkb:K with K of at least 1"
            raise bad_input(expected, name, where="--schedule", suggestion=closest(name, known))
    return tuple(dict.fromkeys(chosen))


def _to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan file, and beside it its main parts, as a dict for JSON."""
    from argosy.plan.file import plan_to_dict

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
