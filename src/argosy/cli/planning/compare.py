"""Run ``argosy compare``: simulate every baseline's plan and ours, and print one table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argosy.cli.command import given, picked, takes_options
from argosy.cli.inputs import (
    PlanningTask,
    ScenarioInputs,
    check_at_least,
    compute_model,
    load_scenario,
    refuse_options,
    with_traces,
)
from argosy.cli.names import known_name
from argosy.cli.options import (
    DtypeName,
    Islands,
    Json,
    Level,
    OptimizerName,
    OptionalCluster,
    OptionalModel,
    OptionalPlan,
    Profiles,
    Quiet,
    RobustName,
    Scenarios,
    SequenceLength,
    SyncEvery,
    Traces,
    Width,
)
from argosy.cli.terminal import print_json, progress, stdout_console
from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.remembered import cost_model_ref
from argosy.errors import InputError, excluded
from argosy.plan.file import read_plan
from argosy.plan.plan import Plan
from argosy.workload.load import load_model

if TYPE_CHECKING:
    from argosy.baselines import NoPlan, PlanningJob
    from argosy.choose.scenario import Robust
    from argosy.plan.islands import IslandPlan
    from argosy.report.contest import ContestRow

Batch = Annotated[
    int | None,
    typer.Option(
        "--global-batch", "-b", help="Samples per iteration; by default 8 for every device."
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="Compare with this planner only. Repeatable."),
]
# Samples per device of the default global batch.
SAMPLES_PER_DEVICE = 8
# The number of columns from which the table also describes each plan.
_WIDE = 110


# The options that describe a model and how it is planned.
_OF_THE_MODEL = ("global_batch", "sequence_length", "dtype", "optimizer", "islands")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The ways in which a cluster may change, and the objective that is applied to them."""

    scenarios: tuple[Cluster, ...]
    robust: Robust


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison, and what was compared."""

    task: PlanningTask
    changes: Changes
    rows: list[ContestRow]
    islands: list[IslandPlan]


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The options that ``argosy compare`` takes."""

    plan: OptionalPlan = None
    model: OptionalModel = None
    cluster: OptionalCluster = None
    global_batch: Batch = None
    trace: Traces = None
    scenario: Scenarios = None
    robust: RobustName = "mean"
    only: Only = None
    sequence_length: SequenceLength = None
    dtype: DtypeName = None
    optimizer: OptimizerName = None
    profile: Profiles = None
    level: Level = 1
    islands: Islands = "off"
    sync_every: SyncEvery = "auto"
    width: Width = None
    json: Json = False
    quiet: Quiet = False


@takes_options
def compare(options: CompareOptions) -> None:
    """Compare every planner's plan with ours in one simulator.

    Prints how long an iteration takes with the plan of each, how that compares with ours, and why
    it is slower. If links or devices change, each plan is simulated from several start times (of
    every scenario), and the mean counts, or the objective of --robust; the others plan for the
    cluster as it is at time 0, ours for its changes. With --islands, plans whose groups of devices
    exchange parameters only every few steps are shown beside ours, for the cluster at time 0. With
    a plan, also one for a program, its model, cluster and batch are used, and ours is that plan.

    \b
    Examples:
        argosy compare -m gpt2-xl -c mixed-16 -b 64 --dtype fp16
        argosy compare -m llama-3-8b -c one-per-node-16 --only megatron --json
        argosy compare -m gravity:512^3 -c mixed-16
        argosy compare -m gpt2-xl -c mixed-16 -b 64 --dtype fp16 \\
            --scenario "v*.nic=on-off:low=0.1" --robust p95
        argosy compare -m gpt2-xl -c geo-8 -b 256 --islands auto
        argosy compare plan.json --only megatron
    """
    from argosy.choose.scenario import Robust
    from argosy.cli.planning.islands import IslandRequest, compared_islands
    from argosy.cli.planning.scenarios import load_scenarios

    islands = picked(IslandRequest, options).options()
    if options.trace and options.scenario:
        raise excluded("--trace", "--scenario")
    wanted = Robust(known_name("--robust", options.robust, Robust, "objectives"))
    planned: Plan | None = None
    if options.plan is not None:
        task, planned = _task_of_plan(options.plan, options)
    else:
        given = _task(options)
        if given is None:
            return
        task = given
    where = task.cluster
    scenarios = load_scenarios(where, options.scenario) if options.scenario else (where,)
    changes = Changes(scenarios=tuple(scenarios), robust=wanted)
    names = _chosen(options.only)
    rows = compared(task, names=names, quiet=options.quiet, ours=planned, changes=changes)
    island_plans: list[IslandPlan] = []
    if islands is not None:
        island_plans = compared_islands(task, _our_seconds(rows), islands, quiet=options.quiet)
    _show(Comparison(task=task, changes=changes, rows=rows, islands=island_plans), options)


def _task_of_plan(plan: str, options: CompareOptions) -> tuple[PlanningTask, Plan]:
    """Return the inputs that a plan was made from, and the plan."""
    unused = given(options, *_OF_THE_MODEL, "model", "level")
    refuse_options(unused, "cannot be combined with a plan, which has its own")
    loaded = load_scenario(read_plan(plan), picked(ScenarioInputs, options))
    return loaded.task, loaded.plan


def _task(options: CompareOptions) -> PlanningTask | None:
    """Return the inputs that all planners are given; None for gravity, which is compared at
    once."""
    from argosy.cli.planning.gravity_plans import PREFIX
    from argosy.errors import refused
    from argosy.planner import Settings

    if options.model is None or options.cluster is None:
        raise refused("argosy compare needs --model and --cluster, or a plan")
    cluster = load_cluster(options.cluster)
    cluster = with_traces(cluster, options.trace) if options.trace else cluster
    if options.model.startswith(PREFIX):
        _compare_gravity(options.model, cluster, options)
        return None
    batch = options.global_batch
    batch = SAMPLES_PER_DEVICE * len(cluster.devices) if batch is None else batch
    check_at_least("--global-batch", batch, 1)
    chain = load_model(
        options.model,
        sequence_length=options.sequence_length,
        dtype=options.dtype,
        optimizer=options.optimizer,
    )
    costs = compute_model(options.profile or (), chain=chain, cluster=cluster, quiet=options.quiet)
    settings = Settings(level=options.level)
    return PlanningTask(
        chain=chain, cluster=cluster, global_batch=batch, settings=settings, model=costs
    )


def _compare_gravity(model: str, cluster: Cluster, options: CompareOptions) -> None:
    """Compare plans of gravity; reject options that do not apply to it."""
    from argosy.cli.planning.gravity_plans import compare_gravity

    unused = given(options, *_OF_THE_MODEL, "only", "profile", "scenario")
    refuse_options(unused, "does not apply to gravity")
    compare_gravity(model, cluster, options)


def _our_seconds(rows: Sequence[ContestRow]) -> float:
    """Return the seconds of our plan; infinite if there is none."""
    from argosy.report.contest import OURS

    ours = (row.entry.seconds for row in rows if row.name == OURS and row.entry is not None)
    return next(ours, math.inf)


def _show(comparison: Comparison, options: CompareOptions) -> None:
    """Print the table, or everything as JSON."""
    from argosy.report.contest import contest_table, counted_over
    from argosy.report.islands import side_by_side

    if options.json:
        print_json("compare", _to_dict(comparison, options))
        return
    task = comparison.task
    console = stdout_console(options.width)
    console.print(f"{task.chain!r}; {task.cluster!r}; {task.global_batch} samples an iteration\n")
    console.print(contest_table(comparison.rows, with_shape=console.width >= _WIDE))
    if comparison.islands:
        console.print()
        console.print(side_by_side(comparison.islands, _our_seconds(comparison.rows)))
    note = counted_over(comparison.changes.scenarios, options.robust)
    if note is not None:
        console.print(f"\n{note}")


def _to_dict(comparison: Comparison, options: CompareOptions) -> dict[str, Any]:
    """Return a comparison as a dict for JSON."""
    from argosy.explain.contest import moments
    from argosy.report.contest import rows_to_dict
    from argosy.report.islands import compared_to_dict

    task = comparison.task
    ref = cost_model_ref(task.chain, task.cluster, task.model)
    return {
        "model": options.model or task.chain.name,
        "cluster": task.cluster.identity,
        "global_batch": task.global_batch,
        "cost_model": "default" if ref is None else ref.hash,
        "scenarios": options.scenario or [],
        "robust": options.robust,
        "moments": max(len(moments(cluster)) for cluster in comparison.changes.scenarios),
        "rows": rows_to_dict(comparison.rows),
        "islands": compared_to_dict(comparison.islands),
    }


def _chosen(only: list[str] | None) -> tuple[str, ...]:
    """Return the planners of ``--only``, or all."""
    from argosy.baselines import BASELINES

    return tuple(known_name("--only", name, BASELINES) for name in only or BASELINES)


def _answer(name: str, job: PlanningJob) -> Plan | NoPlan:
    """Return a baseline's plan.

    If it needs times that a profile does not have, that is the reason why it has no plan.
    """
    from argosy.baselines import BASELINES, NoPlan

    try:
        return BASELINES[name](job)
    except InputError as error:
        return NoPlan(reason=str(error).splitlines()[0])


def _ours(task: PlanningTask, changes: Changes) -> Plan:
    """Find our plan for the cluster as it is, or for the objective over its changes."""
    from argosy.choose.robust import find_robust_plan
    from argosy.cluster.lasting import last_change
    from argosy.planner import find_plan

    if last_change(changes.scenarios) == 0:
        return find_plan(
            task.chain,
            task.cluster,
            global_batch=task.global_batch,
            settings=task.settings,
            model=task.model,
        )
    choice = find_robust_plan(
        task.chain,
        task.cluster,
        changes.scenarios,
        global_batch=task.global_batch,
        robust=changes.robust,
        settings=task.settings,
        model=task.model,
    )
    return choice.plan


def compared(
    task: PlanningTask,
    *,
    names: tuple[str, ...],
    quiet: bool,
    ours: Plan | None = None,
    changes: Changes | None = None,
) -> list[ContestRow]:
    """Return the rows of the table, with progress on stderr.

    ``ours`` is searched for if it is not given; ``changes`` default to the cluster's own.
    """
    from argosy.baselines import NoPlan, PlanningJob
    from argosy.choose.scenario import Robust, objective
    from argosy.cluster.lasting import at_time_zero, within_reach
    from argosy.explain.contest import contest
    from argosy.report.contest import OURS, rows_of
    from argosy.sim.tasks.choose import with_collectives

    chain, cluster = task.chain, task.cluster
    changes = changes or Changes(scenarios=(cluster,), robust=Robust.MEAN)
    if ours is None:
        with progress(f"planning {chain.name} for {cluster!r}", quiet=quiet):
            ours = _ours(task, changes)
    job = PlanningJob(
        chain=chain,
        cluster=within_reach(at_time_zero(cluster)),
        global_batch=task.global_batch,
        model=task.model,
    )
    plans, refused = [(OURS, ours)], []
    for name in names:
        with progress(f"planning with {name}", quiet=quiet):
            answer = _answer(name, job)
        if isinstance(answer, NoPlan):
            refused.append((name, answer.reason))
        else:
            plans.append((name, with_collectives(answer, chain, job.cluster)))
    with progress(f"simulating {len(plans)} plans", quiet=quiet):
        counts = partial(objective, robust=changes.robust)
        entries = contest(plans, chain, changes.scenarios, task.model, counts)
        return rows_of(entries, refused, cluster)
