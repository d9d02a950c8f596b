"""Run ``argosy compare``: simulate every baseline's plan and ours, and print one table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.names import known_name
from argosy.cli.options import (
    DtypeName,
    Islands,
    Json,
    Level,
    ModelSource,
    OptimizerName,
    Profiles,
    Quiet,
    RobustName,
    Scenarios,
    SequenceLength,
    SyncEvery,
    TargetCluster,
    Traces,
    Width,
)

if TYPE_CHECKING:
    from argosy.baselines import NoPlan, PlanningJob
    from argosy.choose.scenario import Robust
    from argosy.cluster.topology import Cluster
    from argosy.cost.compute import ComputeModel
    from argosy.plan.islands import IslandPlan
    from argosy.plan.plan import Plan
    from argosy.report.contest import ContestRow
    from argosy.workload.chain import Chain

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
_PER_DEVICE = 8
_WIDE = 110
"""The number of columns from which the table also describes each plan."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The ways in which a cluster may change, and the objective that is applied to them."""

    scenarios: tuple[Cluster, ...]
    robust: Robust


def compare(
    model: ModelSource,
    cluster: TargetCluster,
    global_batch: Batch = None,
    trace: Traces = None,
    scenario: Scenarios = None,
    robust: RobustName = "mean",
    only: Only = None,
    sequence_length: SequenceLength = None,
    dtype: DtypeName = None,
    optimizer: OptimizerName = None,
    profile: Profiles = None,
    level: Level = 1,
    islands: Islands = "off",
    sync_every: SyncEvery = "auto",
    width: Width = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare every planner's plan with ours in one simulator.

    Prints how long an iteration takes with the plan of each, how that compares with ours, and why
    it is slower. If links or devices change, each plan is simulated from several start times (of
    every scenario), and the mean counts, or the objective of --robust; the others plan for the
    cluster as it is at time 0, ours for its changes. With --islands, plans whose groups of devices
    exchange parameters only every few steps are shown beside ours, for the cluster at time 0.

    \b
    Examples:
        argosy compare -m gpt2-xl -c mixed-16 -b 64 --dtype fp16
        argosy compare -m llama-3-8b -c one-per-node-16 --only megatron --json
        argosy compare -m gravity:512^3 -c mixed-16
        argosy compare -m gpt2-xl -c mixed-16 -b 64 --dtype fp16 \\
            --scenario "v*.nic=on-off:low=0.1" --robust p95
        argosy compare -m gpt2-xl -c geo-8 -b 256 --islands auto
    """
    from argosy.choose.scenario import Robust
    from argosy.cli.inputs import check_at_least, compute_model, refuse_options, with_traces
    from argosy.cli.planning.choose import PlanningTask
    from argosy.cli.planning.gravity_plans import PREFIX, compare_gravity
    from argosy.cli.planning.islands import compared_islands, island_options
    from argosy.cli.planning.scenarios import load_scenarios
    from argosy.cli.terminal import print_json, stdout_console
    from argosy.cluster.file import load_cluster
    from argosy.cost.remembered import cost_model_ref
    from argosy.errors import excluded
    from argosy.explain.contest import moments
    from argosy.planner import Settings
    from argosy.report.contest import OURS, contest_table, counted_over, rows_to_dict
    from argosy.report.islands import compared_to_dict, side_by_side
    from argosy.workload.load import load_model

    wanted_islands = island_options(islands, sync_every)
    where = load_cluster(cluster)
    if trace and scenario:
        raise excluded("--trace", "--scenario")
    where = with_traces(where, trace) if trace else where
    if model.startswith(PREFIX):
        given = {
            "--global-batch": global_batch,
            "--only": only,
            "--sequence-length": sequence_length,
            "--dtype": dtype,
        }
        given |= {"--optimizer": optimizer, "--profile": profile, "--scenario": scenario}
        given |= {"--islands": None if islands == "off" else islands}
        refuse_options(given, "does not apply to gravity")
        compare_gravity(model, where, width=width, json=json, quiet=quiet)
        return
    wanted = Robust(known_name("--robust", robust, Robust, "objectives"))
    changes = Changes(
        scenarios=tuple(load_scenarios(where, scenario) if scenario else (where,)), robust=wanted
    )
    batch = _PER_DEVICE * len(where.devices) if global_batch is None else global_batch
    check_at_least("--global-batch", batch, 1)
    chain = load_model(model, sequence_length=sequence_length, dtype=dtype, optimizer=optimizer)
    costs = compute_model(profile or (), chain=chain, cluster=where, quiet=quiet)
    rows = compared(
        chain, where, batch, costs, names=_chosen(only), level=level, quiet=quiet, changes=changes
    )
    island_plans: list[IslandPlan] = []
    ours = next(
        (row.entry.seconds for row in rows if row.name == OURS and row.entry is not None), math.inf
    )
    if wanted_islands is not None:
        task = PlanningTask(
            chain=chain,
            cluster=where,
            global_batch=batch,
            settings=Settings(level=level),
            model=costs,
        )
        island_plans = compared_islands(task, ours, wanted_islands, quiet=quiet)
    if json:
        ref = cost_model_ref(chain, where, costs)
        names = {
            "model": model,
            "cluster": {"name": where.name, "hash": where.hash},
            "global_batch": batch,
        }
        names["cost_model"] = "default" if ref is None else ref.hash
        begun = max(len(moments(cluster)) for cluster in changes.scenarios)
        counted = {"scenarios": scenario or [], "robust": robust, "moments": begun}
        print_json(
            "compare",
            {
                **names,
                **counted,
                "rows": rows_to_dict(rows),
                "islands": compared_to_dict(island_plans),
            },
        )
        return
    console = stdout_console(width)
    console.print(f"{chain!r}; {where!r}; {batch} samples an iteration\n")
    console.print(contest_table(rows, with_shape=console.width >= _WIDE))
    if island_plans:
        console.print()
        console.print(side_by_side(island_plans, ours))
    note = counted_over(changes.scenarios, robust)
    if note is not None:
        console.print(f"\n{note}")


def _chosen(only: list[str] | None) -> tuple[str, ...]:
    """Return the planners of ``--only``, or all."""
    from argosy.baselines import BASELINES

    return tuple(known_name("--only", name, BASELINES) for name in only or BASELINES)


def _answer(name: str, job: PlanningJob) -> Plan | NoPlan:
    """Return a baseline's plan.

    If it needs times that a profile does not have, that is the reason why it has no plan.
    """
    from argosy.baselines import BASELINES, NoPlan
    from argosy.errors import InputError

    try:
        return BASELINES[name](job)
    except InputError as error:
        return NoPlan(reason=str(error).splitlines()[0])


def _ours(
    chain: Chain,
    cluster: Cluster,
    global_batch: int,
    model: ComputeModel,
    level: int,
    changes: Changes,
) -> Plan:
    """Find our plan for the cluster as it is, or for the objective over its changes."""
    from argosy.choose.robust import find_robust_plan
    from argosy.cluster.lasting import last_change
    from argosy.planner import Settings, find_plan

    settings = Settings(level=level)
    if last_change(changes.scenarios) == 0:
        return find_plan(chain, cluster, global_batch=global_batch, settings=settings, model=model)
    choice = find_robust_plan(
        chain,
        cluster,
        changes.scenarios,
        global_batch=global_batch,
        robust=changes.robust,
        settings=settings,
        model=model,
    )
    return choice.plan


def compared(
    chain: Chain,
    cluster: Cluster,
    global_batch: int,
    model: ComputeModel,
    *,
    names: tuple[str, ...],
    level: int = 1,
    quiet: bool,
    ours: Plan | None = None,
    changes: Changes | None = None,
) -> list[ContestRow]:
    """Return the rows of the table, with progress on stderr.

    ``ours`` is searched for if it is not given; ``changes`` default to the cluster's own.
    """
    from argosy.baselines import NoPlan, PlanningJob
    from argosy.choose.scenario import Robust, objective
    from argosy.cli.terminal import progress
    from argosy.cluster.lasting import at_time_zero, within_reach
    from argosy.explain.contest import contest
    from argosy.report.contest import OURS, rows_of
    from argosy.sim.tasks.choose import with_collectives

    changes = changes or Changes(scenarios=(cluster,), robust=Robust.MEAN)
    if ours is None:
        with progress(f"planning {chain.name} for {cluster!r}", quiet=quiet):
            ours = _ours(chain, cluster, global_batch, model, level, changes)
    job = PlanningJob(
        chain=chain,
        cluster=within_reach(at_time_zero(cluster)),
        global_batch=global_batch,
        model=model,
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
        return rows_of(contest(plans, chain, changes.scenarios, model, counts), refused, cluster)
