"""Show one plan, re-planning and hindsight over a trace, for people and as JSON."""

from __future__ import annotations

from math import ceil

from rich.table import Table

from argosy.choose.replan import Courses, Switch, TraceRun
from argosy.document import JsonObject
from argosy.report.tables import plain_table
from argosy.units import TIME

# The largest number of switches that the table lists.
_MOST_SWITCHES = 12


def course_table(courses: Courses) -> Table:
    """Return a table with a line for each way to train through the trace."""
    table = plain_table(
        "over the trace", ">iterations", ">mean", ">switches", ">migrating", ">gain"
    )
    static = courses.courses[0].iterations
    for course in courses.courses:
        gain = course.iterations / static - 1 if static else 0.0
        table.add_row(
            course.name,
            f"{course.iterations:.1f}",
            TIME.format(course.mean_seconds(courses.horizon)),
            str(len(course.switches)),
            TIME.short(course.migrating) if course.migrating else "-",
            f"{100 * gain:+.1f} %",
        )
    return table


def switch_table(course: TraceRun) -> Table:
    """Return a table of the switches of plans: when, the time to move, and when it pays off."""
    table = plain_table(">at", ">moving takes", ">pays after", "to")
    table.columns[3].no_wrap = False
    for switch in course.switches[:_MOST_SWITCHES]:
        pays = "-"
        if switch.pays_after < float("inf"):
            pays = f"{TIME.short(switch.pays_after)}, {ceil(switch.pays_after_steps)} steps"
        plan = repr(switch.new).partition(", ")[2]
        table.add_row(TIME.short(switch.time), TIME.short(switch.migration), pays, plan)
    return table


def courses_to_dict(courses: Courses) -> JsonObject:
    """Return the courses as a dict for JSON, in seconds."""
    return {
        "horizon_seconds": courses.horizon,
        "plans": courses.plans,
        "courses": [
            {
                "name": course.name,
                "iterations": course.iterations,
                "mean_seconds": course.mean_seconds(courses.horizon) if course.iterations else None,
                "migrating_seconds": course.migrating,
                "switches": [_switch_to_dict(switch) for switch in course.switches],
            }
            for course in courses.courses
        ],
    }


def _switch_to_dict(switch: Switch) -> JsonObject:
    """Return a switch of plans as a dict for JSON, in seconds."""
    pays = switch.pays_after if switch.pays_after < float("inf") else None
    return {
        "seconds": switch.time,
        "migration_seconds": switch.migration,
        "pays_after_seconds": pays,
        "pays_after_steps": switch.pays_after_steps if pays is not None else None,
        "old": repr(switch.old),
        "new": repr(switch.new),
    }
