"""Plan for networks that change and for prices, as parts of ``argosy plan``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from argosy.cli.command import given
from argosy.cli.inputs import PlanningTask, refuse_options
from argosy.cli.names import known_name
from argosy.cli.terminal import print_json, stdout_console
from argosy.errors import bad_input, refused
from argosy.plan.plan import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType

    from argosy.choose.replan import Courses
    from argosy.cli.planning.plan import PlanOptions


# The value of --robust that chooses a plan which stays good if the cost model is wrong.
MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A plan, and what else is printed about the choice."""

    plan: Plan
    beside: dict[str, Any] = field(default_factory=dict)
    """Values for JSON, next to the plan."""
    shown: tuple[RenderableType, ...] = ()
    """Texts and tables for people, after the plan."""


def check_what_counts(options: PlanOptions) -> None:
    """Raise ``InputError`` if options contradict each other, because one of them would be ignored.

    The check comes before any search.
    """
    from argosy.choose.scenario import Robust

    scenarios, robust, for_trace = options.scenario, options.robust, options.for_trace
    known_name("--objective", options.objective, ("throughput", "cost"), "objectives")
    known_name("--robust", robust, (*Robust, MODEL), "objectives")
    cost = {"--objective cost": True} if options.objective == "cost" else {}
    prices = {**cost, **given(options, "max_price_per_hour", "max_cost_per_step")}
    if for_trace is not None:
        refuse_options(
            {**given(options, "scenario", "output"), **prices},
            "cannot be combined with --for-trace, which compares plans and chooses none",
        )
    if scenarios:
        refuse_options(prices, "cannot be combined with --scenario")
    if robust == MODEL:
        others = {**given(options, "scenario", "for_trace"), **prices}
        refuse_options(others, f"cannot be combined with --robust {MODEL}")
    if not scenarios and robust not in (Robust.MEAN, MODEL):
        raise refused(f"--robust {robust} needs --scenario")


def plan_for_scenarios(task: PlanningTask, names: Sequence[str], robust: str) -> ChosenPlan:
    """Plan for ``--scenario`` and ``--robust``."""
    from argosy.choose.robust import find_robust_plan
    from argosy.choose.scenario import Robust
    from argosy.cli.planning.scenarios import load_scenarios
    from argosy.report.robust import robust_lines, robust_to_dict, scenario_table

    wanted = Robust(known_name("--robust", robust, Robust, "objectives"))
    choice = find_robust_plan(
        task.chain,
        task.cluster,
        load_scenarios(task.cluster, names),
        global_batch=task.global_batch,
        robust=wanted,
        settings=task.settings,
        model=task.model,
    )
    return ChosenPlan(
        plan=choice.plan,
        beside={"scenarios": robust_to_dict(choice)},
        shown=(scenario_table(choice), *robust_lines(choice)),
    )


def plan_within_error(task: PlanningTask) -> ChosenPlan:
    """Plan for ``--robust model``."""
    from argosy.choose.model_error import find_plan_within_error

    plan = find_plan_within_error(
        task.chain,
        task.cluster,
        global_batch=task.global_batch,
        settings=task.settings,
        model=task.model,
    )
    return ChosenPlan(plan=plan)


def plan_for_money(
    task: PlanningTask, objective: str, max_price: float | None, max_cost: float | None
) -> ChosenPlan:
    """Plan for ``--objective cost``, ``--max-price-per-hour`` and ``--max-cost-per-step``."""
    from argosy.choose.money import MoneyLimits, choose, find_front
    from argosy.report.money import front_table, money_lines, priced_to_dict

    limits = MoneyLimits(
        price_per_hour=math.inf if max_price is None else max_price,
        cost_per_step=math.inf if max_cost is None else max_cost,
    )
    front = find_front(
        task.chain,
        task.cluster,
        global_batch=task.global_batch,
        limits=limits,
        settings=task.settings,
        model=task.model,
    )
    chosen = choose(front, cheapest=objective == "cost", limits=limits)
    return ChosenPlan(
        plan=chosen.plan,
        beside={
            "pareto": [priced_to_dict(point) for point in front],
            "cost": priced_to_dict(chosen),
        },
        shown=(*money_lines(chosen), front_table(front, chosen)),
    )


def courses_over(task: PlanningTask, name: str) -> Courses:
    """Compare one plan, re-planning and hindsight for ``--for-trace``."""
    from argosy.choose.replan import compare_courses
    from argosy.cli.planning.scenarios import load_scenarios
    from argosy.cluster.lasting import last_change

    (cluster,) = load_scenarios(task.cluster, [name])
    horizon = last_change([cluster])
    if not horizon:
        raise bad_input("a scenario in which something changes", name, "--for-trace")
    return compare_courses(
        task.chain,
        cluster,
        global_batch=task.global_batch,
        horizon=horizon,
        settings=task.settings,
        model=task.model,
    )


def show_courses(courses: Courses, *, json: bool, width: int | None) -> None:
    """Print one plan, re-planning and hindsight over a trace."""
    from argosy.report.courses import course_table, courses_to_dict, switch_table

    if json:
        print_json("plan", {"courses": courses_to_dict(courses)})
        return
    console = stdout_console(width)
    console.print(course_table(courses))
    replanned = courses.courses[2]
    if replanned.switches:
        console.print("\nre-planned:", style="bold")
        console.print(switch_table(replanned))
