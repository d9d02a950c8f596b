"""Run ``argosy simulate --adapt``: simulate the controller and other policies under traces."""

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
from argosy.cli.terminal import print_json, progress, stdout_console
from argosy.cluster.file import cluster_from_content
from argosy.errors import refused
from argosy.plan.check import check_plan
from argosy.plan.file import schedule_to_dict
from argosy.plan.plan import Plan
from argosy.plan.runnable import check_movable
from argosy.units import TIME

if TYPE_CHECKING:
    from argosy.adapt.controller import AdaptationLevel
    from argosy.adapt.play import PolicyRun
    from argosy.cli.planning.simulate import SimulateOptions
    from argosy.runtime.processes.run_spec import RunSpec

# The largest number of decisions that are listed.
_MOST_DECISIONS = 12


def show_courses(scenario: Scenario, adapt: str, options: SimulateOptions) -> None:
    """Simulate every policy up to the requested one, and the oracle; print their throughput."""
    from argosy.adapt.controller import AdaptationLevel, ControllerLimits
    from argosy.report.plan import plan_title

    check_reach(adapt)
    end = parse_time("--until", options.until)
    if math.isinf(end):
        raise refused('--adapt needs --until with a time, such as --until "10 min"')
    limits = ControllerLimits(
        reach=AdaptationLevel(adapt), horizon=options.horizon, min_gain=options.min_gain
    )
    with progress(f"playing policies on {scenario.plan!r}", quiet=options.quiet):
        courses = _courses(scenario, limits, end)
    if courses is None:
        raise too_long(options.until)
    if options.json:
        print_json(
            "simulate",
            {"adapt": adapt, "courses": [_to_dict(name, course) for name, course in courses]},
        )
        return
    console = stdout_console(options.width)
    console.print(f"{plan_title(scenario.plan)}\n")
    console.print(_table(courses))
    requested = next(course for name, course in courses if name == _name(AdaptationLevel(adapt)))
    for line in _decisions(requested):
        console.print(line)


def check_reach(adapt: str) -> None:
    """Raise ``InputError`` unless ``--adapt`` names a level of adaptation."""
    from argosy.adapt.controller import AdaptationLevel

    known_name("--adapt", adapt, AdaptationLevel)


def check_adapting(plan: Plan, spec: RunSpec, *, quiet: bool = False) -> None:
    """Raise ``InputError`` if a run of a plan cannot adapt.

    Predictions need the plan's cluster, and the costs of its model or of another.
    """
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
    """Return the name of a policy."""
    from argosy.adapt.controller import AdaptationLevel

    return {
        AdaptationLevel.OFF: "static",
        AdaptationLevel.K: "adaptive k",
        AdaptationLevel.SHARES: "k and shares",
        AdaptationLevel.FULL: "full",
    }[reach]


def _courses(scenario: Scenario, limits: Any, until: float) -> list[tuple[str, PolicyRun]] | None:
    """Simulate every policy; return None if one does more steps than can be reported."""
    from dataclasses import replace

    from argosy.adapt.controller import AdaptationLevel
    from argosy.adapt.play import Playback, play, play_oracle
    from argosy.choose.policy import schedules_that_fit, schedules_to_try
    from argosy.cluster.lasting import last_change
    from argosy.planner import Settings, kept_plans

    plan, chain, model = scenario.plan, scenario.chain, scenario.model

    def replan(cluster: Any) -> list[Plan]:
        """Find good plans for the cluster as it is then."""
        return kept_plans(
            chain, cluster, global_batch=plan.global_batch, settings=Settings(), model=model
        )

    playback = Playback(chain, scenario.cluster, model)
    last = last_change([scenario.cluster])
    # This is known without simulating them.
    if (until - last) / playback.lasting(plan, last) >= MOST_ITERATIONS:
        return None
    variants = schedules_that_fit(
        plan, chain, scenario.cluster, schedules_to_try(Settings(), scenario.model)
    )
    courses = []
    for reach in (reach for reach in AdaptationLevel if limits.reach.allows(reach)):
        own = replace(limits, reach=reach)
        course = play(
            playback,
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
    oracle = play_oracle(playback, variants, until=until, replan=future, most_steps=MOST_ITERATIONS)
    return None if len(oracle.steps) >= MOST_ITERATIONS else [*courses, ("oracle", oracle)]


def _table(courses: list[tuple[str, PolicyRun]]) -> Any:
    """Return a table with a row per policy."""
    from argosy.report.tables import plain_table

    table = plain_table("policy", ">samples/s", ">over static", ">steps", ">changes")
    static = courses[0][1].samples_per_second
    for name, course in courses:
        ratio = f"{course.samples_per_second / static:.3f}" if static else "-"
        table.add_row(
            name,
            f"{course.samples_per_second:.4g}",
            ratio,
            str(len(course.steps)),
            str(len(course.decisions)),
        )
    return table


def _decisions(course: PolicyRun) -> list[str]:
    """Return a line for each decision of a policy."""
    lines = [""] if course.decisions else ["\nnothing was changed"]
    for decision in course.decisions[:_MOST_DECISIONS]:
        moving = f", moving {TIME.short(decision.moving)}" if decision.moving else ""
        times = f"{TIME.short(decision.before)} -> {TIME.short(decision.after)} a step{moving}"
        lines.append(
            f"after step {decision.step}: {decision.what}, {decision.plan.schedule!r}, "
            f"{times}; {decision.why}"
        )
    more = len(course.decisions) - _MOST_DECISIONS
    return [*lines, f"and {more} more"] if more > 0 else lines


def _to_dict(name: str, course: PolicyRun) -> dict[str, Any]:
    """Return the run of a policy as a dict for JSON, in seconds."""
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
                "step": decision.step,
                "what": decision.what,
                "schedule": schedule_to_dict(decision.plan.schedule),
                "before_seconds": decision.before if math.isfinite(decision.before) else None,
                "after_seconds": decision.after,
                "moving_seconds": decision.moving,
                "why": decision.why,
            }
            for decision in course.decisions
        ],
    }
