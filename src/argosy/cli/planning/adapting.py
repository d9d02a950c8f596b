"""``argosy simulate --adapt``: the controller and other policies against a cluster's future."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from argosy.cli.inputs import (
    MOST_ITERATIONS,
    Scenario,
    another_cost_model,
    cost_model_for,
    note_of_other_kinds,
    parse_time,
    too_long,
)
from argosy.cli.names import known_name
from argosy.errors import bad_input

if TYPE_CHECKING:
    from argosy.adapt.controller import AdaptationLevel
    from argosy.adapt.play import PolicyRun
    from argosy.plan.plan import Plan
    from argosy.runtime.processes.run_spec import RunSpec

_MOST_DECISIONS = 12


def show_courses(
    scenario: Scenario,
    adapt: str,
    *,
    until: str | None,
    horizon: int,
    min_gain: float,
    width: int | None,
    json: bool,
    quiet: bool,
) -> None:
    """Play every policy up to the one asked for, and the oracle; print what each reached."""
    from argosy.adapt.controller import AdaptationLevel, ControllerLimits
    from argosy.cli.terminal import print_json, progress, stdout_console
    from argosy.report.plan import plan_title

    check_reach(adapt)
    end = parse_time("--until", until)
    if math.isinf(end):
        raise bad_input('a time such as --until "10 min" with --adapt', where="--until")
    limits = ControllerLimits(reach=AdaptationLevel(adapt), horizon=horizon, min_gain=min_gain)
    with progress(f"playing policies on {scenario.plan!r}", quiet=quiet):
        courses = _courses(scenario, limits, end)
    if courses is None:
        raise too_long(until)
    if json:
        print_json(
            "simulate",
            {"adapt": adapt, "courses": [_to_dict(name, course) for name, course in courses]},
        )
        return
    console = stdout_console(width)
    console.print(f"{plan_title(scenario.plan)}\n")
    console.print(_table(courses))
    asked = next(course for name, course in courses if name == _name(AdaptationLevel(adapt)))
    for line in _decisions(asked):
        console.print(line)


def check_reach(adapt: str) -> None:
    from argosy.adapt.controller import AdaptationLevel

    known_name("--adapt", adapt, AdaptationLevel)


def check_adapting(plan: Plan, spec: RunSpec, *, quiet: bool = False) -> None:
    """Whether a run of a plan can adapt: predictions need the plan's cluster, and its model or
    another's costs."""
    from argosy.cluster.file import cluster_from_content
    from argosy.plan.check import check_plan
    from argosy.plan.runnable import check_movable

    if spec.adapt == "full":
        check_movable(plan)
    if spec.adapt != "off":
        chain = spec.chain(plan.model)
        cluster = cluster_from_content(plan.cluster.content)
        check_plan(plan, chain, cluster)
        costs = cost_model_for(plan, None, chain, profiles=spec.profiles)
        if spec.profiles and not quiet:
            note_of_other_kinds(costs.profiles, cluster)
        fit = costs.cluster(cluster).fit
        difference = another_cost_model(plan, costs.chain(chain), fit, costs.compute_model)
        if difference is not None:
            sys.stderr.write(f"warning: {difference} to adapt\n")


def _name(reach: AdaptationLevel) -> str:
    from argosy.adapt.controller import AdaptationLevel

    return {
        AdaptationLevel.OFF: "static",
        AdaptationLevel.K: "adaptive k",
        AdaptationLevel.SHARES: "k and shares",
        AdaptationLevel.FULL: "full",
    }[reach]


def _courses(scenario: Scenario, limits: Any, until: float) -> list[tuple[str, PolicyRun]] | None:
    """What each policy reached; None where one of them does more steps than can be told."""
    from dataclasses import replace

    from argosy.adapt.controller import AdaptationLevel
    from argosy.adapt.play import Playback, play, play_oracle
    from argosy.choose.policy import schedules_that_fit, schedules_to_try
    from argosy.cluster.lasting import last_change
    from argosy.planner import Settings, find_plan

    plan, chain, model = scenario.plan, scenario.chain, scenario.model

    def replan(cluster: Any) -> Plan:
        return find_plan(
            chain, cluster, global_batch=plan.global_batch, settings=Settings(), model=model
        )

    stage = Playback(chain, scenario.cluster, model)
    calm = last_change([scenario.cluster])
    if (until - calm) / stage.lasting(plan, calm) >= MOST_ITERATIONS:  # known without playing them
        return None
    variants = schedules_that_fit(
        plan, chain, scenario.cluster, schedules_to_try(Settings(), scenario.model)
    )
    courses = []
    for reach in (reach for reach in AdaptationLevel if limits.reach.allows(reach)):
        own = replace(limits, reach=reach)
        course = play(
            stage,
            plan,
            until=until,
            limits=own,
            schedules=variants,
            replan=replan,
            most_steps=MOST_ITERATIONS,
        )
        courses.append((_name(reach), course))
        if len(course.steps) >= MOST_ITERATIONS:
            return None
    future = replan if limits.reach is AdaptationLevel.FULL else None
    oracle = play_oracle(stage, variants, until=until, replan=future, most_steps=MOST_ITERATIONS)
    return None if len(oracle.steps) >= MOST_ITERATIONS else [*courses, ("oracle", oracle)]


def _table(courses: list[tuple[str, PolicyRun]]) -> Any:
    from argosy.report.tables import plain_table

    table = plain_table(
        "policy",
        "samples/s",
        "over static",
        "steps",
        "changes",
        right=("samples/s", "over static", "steps", "changes"),
    )
    still = courses[0][1].samples_per_second
    for name, course in courses:
        ratio = f"{course.samples_per_second / still:.3f}" if still else "-"
        table.add_row(
            name,
            f"{course.samples_per_second:.4g}",
            ratio,
            str(len(course.steps)),
            str(len(course.decisions)),
        )
    return table


def _decisions(course: PolicyRun) -> list[str]:
    from argosy.units import TIME

    lines = [""] if course.decisions else ["\nnothing was changed"]
    for one in course.decisions[:_MOST_DECISIONS]:
        moving = f", moving {TIME.format(one.moving, digits=3)}" if one.moving else ""
        times = f"{TIME.format(one.before, digits=3)} -> {TIME.format(one.after, digits=3)} a step{moving}"
        lines.append(
            f"after step {one.step}: {one.what}, {one.plan.schedule!r}, {times}; {one.why}"
        )
    more = len(course.decisions) - _MOST_DECISIONS
    return [*lines, f"and {more} more"] if more > 0 else lines


def _to_dict(name: str, course: PolicyRun) -> dict[str, Any]:
    from argosy.plan.file import schedule_to_dict

    return {
        "policy": name,
        "samples_per_second": course.samples_per_second,
        "end_seconds": course.end,
        "steps": [
            {
                "start": step.start,
                "seconds": step.seconds,
                "lost": step.was_lost,
                "schedule": schedule_to_dict(step.plan.schedule),
            }
            for step in course.steps
        ],
        "decisions": [
            {
                "step": one.step,
                "what": str(one.what),
                "schedule": schedule_to_dict(one.plan.schedule),
                "before_seconds": one.before if math.isfinite(one.before) else None,
                "after_seconds": one.after,
                "moving_seconds": one.moving,
                "why": one.why,
            }
            for one in course.decisions
        ],
    }
