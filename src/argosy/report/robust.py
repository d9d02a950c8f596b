"""How plans fare under scenarios, for people and as JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from argosy.choose.robust import Figures, RobustChoice
from argosy.report.plan import gap_in_percent
from argosy.report.tables import plain_table
from argosy.units import RATE, TIME


def scenario_table(choice: RobustChoice) -> Table:
    """Iteration times over all scenarios: the plan, the best for the average network, and others."""
    table = plain_table("over the scenarios", "mean", "p95", "worst", right=("mean", "p95", "worst"))
    table.columns[0].no_wrap = False
    rows = [("this plan", choice.chosen)]
    if choice.average.plan != choice.chosen.plan:
        rows.append(("best plan for the average network", choice.average))
    rows += [(repr(other.plan).partition(", ")[2], other) for other in choice.others[:2]]
    for name, figures in rows:
        table.add_row(name, *(TIME.format(seconds) for seconds in (figures.mean, figures.p95, figures.worst)))
    return table


def robust_lines(choice: RobustChoice) -> list[str]:
    """The gain in a sentence, and the policy, a rule a line."""
    lines = []
    if choice.gain > 0:
        lines.append(
            f"{choice.robust}: {gap_in_percent(choice.gain)} faster than the best plan for the average network"
        )
    for rule in choice.plan.policy:
        lines.append(f"policy: {rule.schedule!r} while {rule.edge} carries less than {RATE.format(rule.below)}")
    return lines


def robust_to_dict(choice: RobustChoice) -> dict[str, Any]:
    """For JSON; seconds."""
    return {
        "robust": str(choice.robust),
        "horizon_seconds": choice.horizon,
        "gain_over_average_plan": choice.gain,
        "chosen": _figures_to_dict(choice.chosen),
        "average_plan": _figures_to_dict(choice.average),
        "others": [_figures_to_dict(other) for other in choice.others],
    }


def _figures_to_dict(figures: Figures) -> dict[str, Any]:
    return {
        "plan": repr(figures.plan),
        "mean_seconds": figures.mean,
        "p95_seconds": figures.p95,
        "worst_seconds": figures.worst,
    }
