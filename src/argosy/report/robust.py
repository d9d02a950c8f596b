"""Show how plans perform under scenarios, for people and as JSON."""

from __future__ import annotations

import math

from rich.table import Table

from argosy.choose.robust import Figures, RobustChoice
from argosy.document import JsonObject
from argosy.report.plan import OPTIMAL, gap_in_words
from argosy.report.tables import plain_table
from argosy.units import RATE, TIME


def scenario_table(choice: RobustChoice) -> Table:
    """Return a table of iteration times over all scenarios.

    It lists the plan, the best plan for the average network, and other candidates.
    """
    table = plain_table("over the scenarios", ">mean", ">p95", ">worst")
    table.columns[0].no_wrap = False
    rows = [("this plan", choice.chosen)]
    if choice.average.plan != choice.chosen.plan:
        rows.append(("best plan for the average network", choice.average))
    rows += [
        (repr(candidate.plan).partition(", ")[2], candidate) for candidate in choice.others[:2]
    ]
    for name, figures in rows:
        name += ", which gets stuck" if figures.never_ends else ""
        table.add_row(
            name, *(TIME.format(seconds) for seconds in (figures.mean, figures.p95, figures.worst))
        )
    return table


def robust_lines(choice: RobustChoice) -> list[str]:
    """Return the gain in a sentence, and the policy with one rule per line."""
    lines = []
    if choice.chosen.never_ends:
        lines.append(
            "every plan that was judged gets stuck in one of the scenarios; times are of "
            "iterations that end"
        )
    if choice.gain >= OPTIMAL and not choice.average.never_ends:
        lines.append(
            f"{choice.robust}: {gap_in_words(choice.gain)} faster than the best plan for the "
            "average network"
        )
    for rule in choice.plan.policy:
        lines.append(
            f"policy: {rule.schedule!r} while {rule.edge} carries less than "
            f"{RATE.format(rule.below)}"
        )
    return lines


def robust_to_dict(choice: RobustChoice) -> JsonObject:
    """Return a robust choice as a dict for JSON, in seconds."""
    return {
        "robust": choice.robust,
        "horizon_seconds": choice.horizon,
        "gain_over_average_plan": choice.gain if math.isfinite(choice.gain) else None,
        "chosen": _figures_to_dict(choice.chosen),
        "average_plan": _figures_to_dict(choice.average),
        "others": [_figures_to_dict(candidate) for candidate in choice.others],
    }


def _figures_to_dict(figures: Figures) -> JsonObject:
    """Return the times of a plan as a dict for JSON, in seconds; null if infinite."""
    times = {"mean": figures.mean, "p95": figures.p95, "worst": figures.worst}
    return {
        "plan": repr(figures.plan),
        "never_ends": figures.never_ends,
        **{
            f"{name}_seconds": seconds if math.isfinite(seconds) else None
            for name, seconds in times.items()
        },
    }
