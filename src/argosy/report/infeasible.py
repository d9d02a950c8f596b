"""Why nothing fits, for people and as JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from argosy.explain.infeasible import Infeasibility, Need
from argosy.plan.file import plan_to_dict
from argosy.report.tables import plain_table


def need_table(infeasibility: Infeasibility) -> Table:
    """The plan that comes closest: what each of its devices needs, and what it may use, in GiB."""
    columns = ("stage", "layers", "on", "needs", "state", "activations", "buffers", "may use", "over")
    table = plain_table(*columns, right=(columns[0], *columns[3:]))
    plan = infeasibility.plan
    for need in infeasibility.needs:
        layers = f"{plan.stages[need.stage].first}..{plan.stages[need.stage].end - 1}" if plan is not None else ""
        sizes = [need.total, need.state, need.activations, need.buffers, need.room]
        over = f"{need.over:.2f}x" if need.over > 1 else "-"
        on = f"{need.devices}x {need.kind}"
        table.add_row(str(need.stage), layers, on, *(f"{size / 2**30:.1f}" for size in sizes), over)
    return table


def change_lines(infeasibility: Infeasibility) -> list[str]:
    """One for each change that would make a plan fit."""
    if not infeasibility.changes:
        return ["No single change that was tried makes a plan fit."]
    return ["A plan fits with any one of:", *(f"  - {change.sentence}" for change in infeasibility.changes)]


def infeasibility_to_dict(infeasibility: Infeasibility) -> dict[str, Any]:
    """For JSON; bytes."""
    return {
        "reason": infeasibility.reason,
        "plan": plan_to_dict(infeasibility.plan) if infeasibility.plan is not None else None,
        "needs": [_need_to_dict(need) for need in infeasibility.needs],
        "changes": [{**vars(change), "kind": str(change.kind)} for change in infeasibility.changes],
    }


def _need_to_dict(need: Need) -> dict[str, Any]:
    return {
        "stage": need.stage,
        "kind": need.kind,
        "devices": need.devices,
        "needed_bytes": need.total,
        "state_bytes": need.state,
        "activation_bytes": need.activations,
        "buffer_bytes": need.buffers,
        "usable_bytes": need.room,
        "over": need.over,
    }
