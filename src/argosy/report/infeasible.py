"""Show why no plan fits, for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from argosy.document import JsonObject
from argosy.explain.infeasible import Infeasibility, Need
from argosy.explain.remedy import Change
from argosy.plan.file import plan_to_dict
from argosy.report.tables import plain_table
from argosy.units import GIB, TIME


def need_table(infeasibility: Infeasibility) -> Table:
    """Return a table of the plan that comes closest: what its devices need and may use, in GiB."""
    sizes = (">needs", ">state", ">activations", ">buffers", ">may use", ">over")
    table = plain_table(">stage", "layers", "on", *sizes)
    plan = infeasibility.plan
    for need in infeasibility.needs:
        layers = (
            f"{plan.stages[need.stage].first}..{plan.stages[need.stage].end - 1}"
            if plan is not None
            else ""
        )
        amounts = (need.total, need.state, need.activations, need.buffers, need.room)
        over = f"{need.over:.2f}x" if need.over > 1 else "-"
        on = f"{need.devices}x {need.kind}"
        table.add_row(str(need.stage), layers, on, *(f"{size / GIB:.1f}" for size in amounts), over)
    return table


def change_lines(
    infeasibility: Infeasibility, command: Callable[[Change], str | None] | None = None
) -> list[str]:
    """Return a line for each change that would make a plan fit, with its step time and command."""
    if not infeasibility.changes:
        return ["No single change that was tried makes a plan fit."]
    lines = ["A plan fits with any one of:"]
    for change in infeasibility.changes:
        seconds = "" if change.seconds is None else f" ({TIME.short(change.seconds)} per step)"
        lines.append(f"  - {change.sentence}{seconds}")
        pasted = command(change) if command is not None else None
        if pasted is not None:
            lines.append(f"      {pasted}")
    return lines


def infeasibility_to_dict(infeasibility: Infeasibility) -> JsonObject:
    """Return the reasons as a dict for JSON, in bytes."""
    return {
        "reason": infeasibility.reason,
        "plan": plan_to_dict(infeasibility.plan) if infeasibility.plan is not None else None,
        "needs": [_need_to_dict(need) for need in infeasibility.needs],
        "changes": [_change_to_dict(change) for change in infeasibility.changes],
    }


def _change_to_dict(change: Change) -> JsonObject:
    """Return a change as a dict for JSON."""
    options = [text for option in change.options for text in option]
    return {**vars(change), "kind": change.kind, "options": options}


def _need_to_dict(need: Need) -> JsonObject:
    """Return the memory that a part of a stage needs as a dict for JSON, in bytes."""
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
