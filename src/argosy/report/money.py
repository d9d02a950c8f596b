"""Show the cost of plans, and the Pareto front of time and cost, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from argosy.choose.money import Priced
from argosy.report.tables import plain_table
from argosy.units import TIME, counted


def money_lines(chosen: Priced) -> list[str]:
    """Return the price and the cost of the plan, in the currency of the cluster file."""
    per_unit = f"{chosen.cost_per_step:.4g} a step, {chosen.cost_per_sample:.4g} a sample"
    return [
        f"{chosen.price_per_hour:.4g} an hour, {per_unit} (in the currency of the cluster file)"
    ]


def front_table(front: Sequence[Priced], chosen: Priced) -> Table:
    """Return a table of plans that no other beats in time and cost, fastest first."""
    table = plain_table(
        "time against cost", ">iteration", ">price per hour", ">cost per step", ">devices"
    )
    for point in front:
        stages = counted(len(point.plan.stages), "stage")
        mark = "this plan" if point.plan == chosen.plan else stages
        table.add_row(
            mark,
            TIME.format(point.seconds),
            f"{point.price_per_hour:.4g}",
            f"{point.cost_per_step:.4g}",
            str(len(point.plan.devices)),
        )
    return table


def priced_to_dict(point: Priced) -> dict[str, Any]:
    """Return a priced plan as a dict for JSON, in seconds and the currency of the cluster file."""
    return {
        "iteration_seconds": point.seconds,
        "price_per_hour": point.price_per_hour,
        "cost_per_step": point.cost_per_step,
        "cost_per_sample": point.cost_per_sample,
        "devices": sorted(point.plan.devices),
        "plan": repr(point.plan),
    }
