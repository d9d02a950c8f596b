"""Build the table of ``argosy compare``: every planner's plan in one simulator, and why each
loses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from argosy.cluster.lasting import last_change
from argosy.cluster.topology import Cluster
from argosy.document import JsonObject
from argosy.explain.contest import MOMENTS, Entry, Loss, why_slower
from argosy.plan.plan import Plan, Recompute, Stage
from argosy.report.marks import bar, percent
from argosy.report.tables import plain_table
from argosy.units import TIME, counted

# The name of our own planner in the table.
OURS = "argosy"
# Plans whose times differ by less than this factor count as equally fast.
_SAME = 1.0005
# Up to this factor of the best time, no single reason for the difference is worth naming.
_CLOSE = 1.02


@dataclass(frozen=True, kw_only=True)
class ContestRow:
    """A line of the table, which belongs to one planner."""

    name: str
    entry: Entry | None
    """The simulated plan; None if the planner has no plan."""
    reason: str
    """Why the plan loses, or why there is no plan, or that it is the fastest."""

    @property
    def is_feasible(self) -> bool:
        """Return whether there is a plan whose iterations end."""
        return self.entry is not None and math.isfinite(self.entry.seconds)


def rows_of(
    entries: Sequence[Entry], refused: Sequence[tuple[str, str]], cluster: Cluster
) -> list[ContestRow]:
    """Return the fastest plans first, ours before equal ones, then the planners without a plan."""
    ordered = sorted(entries, key=lambda entry: (entry.seconds, entry.name != OURS))
    rows = [
        ContestRow(name=entry.name, entry=entry, reason=_reason(entry, ordered[0], cluster))
        for entry in ordered
    ]
    return [
        *rows,
        *(ContestRow(name=name, entry=None, reason=f"no plan: {why}") for name, why in refused),
    ]


def _reason(entry: Entry, best: Entry, cluster: Cluster) -> str:
    """Return in a few words why a plan is slower than the best."""
    if not math.isfinite(entry.seconds):
        return "never ends: a device or link it needs is lost"
    if entry.seconds <= best.seconds * _SAME:
        return "the fastest" if entry is best else "as fast"
    if entry.seconds <= best.seconds * _CLOSE:
        return "nearly as fast"
    loss, share = why_slower(entry, best)
    return in_words(loss, share, entry.plan, cluster)


def in_words(loss: Loss, share: float, plan: Plan, cluster: Cluster) -> str:
    """Return a phrase for where the time goes, with the share of the cluster's capacity that is
    lost."""
    lost = percent(share)
    stages = counted(len(plan.stages), "stage")
    match loss:
        case Loss.LEFT_OUT:
            idle = len(cluster.devices) - len(plan.devices)
            return f"leaves {idle} of {len(cluster.devices)} devices idle: {lost} of all speed"
        case Loss.RECOMPUTATION:
            return f"memory forces recomputation: {lost}"
        case Loss.SHARES:
            return f"{_slow_kind(plan, cluster)} in a stage with faster devices: {lost} waiting"
        case Loss.STAGES:
            return f"one stage is slower than the others: {lost} waiting"
        case Loss.COMMUNICATION:
            return f"exposed communication: {lost}{_of_what(plan)}"
        case Loss.FILLING:
            return f"bubble of {stages} with {plan.num_micro_batches} micro-batches: {lost}"
        case Loss.COMPUTING:
            return f"pieces too small to run at full speed: {lost}"


def _slow_kind(plan: Plan, cluster: Cluster) -> str:
    """Return the slowest device kind of the first stage with unequal devices, as a phrase."""
    mixed = [kinds for kinds in (_kinds(stage, cluster) for stage in plan.stages) if len(kinds) > 1]
    if not mixed:
        return "unequal shares"
    kind = min(mixed[0], key=lambda name: (_peak(name, cluster), name))
    return f"slow {kind}"


def _peak(kind: str, cluster: Cluster) -> float:
    """Return the peak FLOP/s of a device kind."""
    device = next(device for device in cluster.devices if device.kind.name == kind)
    return device.kind.fastest


def _kinds(stage: Stage, cluster: Cluster) -> set[str]:
    """Return the device kinds of a stage."""
    return {cluster.device(name).kind.name for name in stage.devices}


def _of_what(plan: Plan) -> str:
    """Return what most of the exposed communication consists of, as the end of a phrase."""
    if any(stage.zero == 3 and stage.num_holders > 1 for stage in plan.stages):
        return ", weights gathered for every micro-batch"
    if len(plan.stages) == 1:
        return ", gradients of the whole model"
    return ""


def shape_of(plan: Plan) -> str:
    """Describe a plan in a few letters, as ``4 stages, 16 x 4, recompute``."""
    stages = counted(len(plan.stages), "stage")
    again = ", offload" if plan.offloads else ""
    again += (
        ", recompute" if any(stage.recompute is not Recompute.NONE for stage in plan.stages) else ""
    )
    return f"{stages}, {plan.num_micro_batches} x {plan.micro_batch_size}{again}"


def counted_over(scenarios: Sequence[Cluster], robust: str) -> str | None:
    """Explain what the times of a table are if links or devices change.

    Returns None if nothing changes; then a plan's time is the one that ``argosy plan`` predicts.
    """
    last = last_change(scenarios)
    if not last:
        return None
    several = f" of each of {len(scenarios)} scenarios" if len(scenarios) > 1 else ""
    counted = f"each time is the {robust} over iterations that begin at {MOMENTS} moments{several}"
    return (
        f"Links or devices change for {TIME.short(last)}: {counted}. argosy plan plans "
        "for time 0 and predicts what the plan takes there; --trace none compares plans there."
    )


def contest_table(rows: Sequence[ContestRow], *, with_shape: bool = False) -> Table:
    """Return a table of speeds as bars relative to the fastest, and of times relative to ours."""
    shape = ["plan"] if with_shape else []
    table = plain_table("planner", "speed", ">iteration", ">x ours", *shape, "why")
    table.columns[-1].no_wrap, table.columns[-1].ratio = False, 1
    ours = next(
        (row.entry.seconds for row in rows if row.entry is not None and row.name == OURS), math.inf
    )
    best = min((row.entry.seconds for row in rows if row.entry is not None), default=math.inf)
    for row in rows:
        style = "bold" if row.name == OURS else None
        if row.entry is None or not row.is_feasible:
            table.add_row(
                row.name,
                bar(0.0),
                "-",
                "-",
                *([""] if with_shape else []),
                row.reason,
                style=style or "dim",
            )
            continue
        seconds = row.entry.seconds
        factor = f"{seconds / ours:.2f}" if math.isfinite(ours) else "-"
        shape = [shape_of(row.entry.plan)] if with_shape else []
        cells = (bar(best / seconds), TIME.short(seconds), factor, *shape, row.reason)
        table.add_row(row.name, *cells, style=style)
    return table


def rows_to_dict(rows: Sequence[ContestRow]) -> list[JsonObject]:
    """Return the rows as dicts for JSON; figures of a planner without a plan are null."""
    return list(map(_row_to_dict, rows))


def _row_to_dict(row: ContestRow) -> JsonObject:
    entry = row.entry if row.is_feasible else None
    return {
        "name": row.name,
        "feasible": row.is_feasible,
        "iteration_seconds": None if entry is None else entry.seconds,
        "samples_per_second": None if entry is None else entry.samples_per_second,
        "reason": row.reason,
        "plan": None if row.entry is None else shape_of(row.entry.plan),
        "losses": {} if entry is None else dict(entry.losses),
    }
