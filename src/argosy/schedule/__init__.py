"""Define the order in which pipeline stages work: actions, schedules, and the checks before a
run."""

from argosy.schedule.action import Action, ActionKind, Schedule, ScheduleKind
from argosy.schedule.check import check_schedule, in_flight, most_in_flight
from argosy.schedule.communicate import with_communication
from argosy.schedule.generate import ScheduleSpec, build_schedule

__all__ = [
    "Action",
    "ActionKind",
    "Schedule",
    "ScheduleKind",
    "ScheduleSpec",
    "build_schedule",
    "check_schedule",
    "in_flight",
    "most_in_flight",
    "with_communication",
]
