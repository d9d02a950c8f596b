"""Collect what a page shows of a plan: timelines under several schedules, prediction, explanation.

The unchanged plan is simulated once, and its prediction and explanation use that timeline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.explain.explanation import Explanation, explain_plan, with_prediction
from argosy.explain.memory import DeviceMemory, planned_stack
from argosy.plan.check import check_plan
from argosy.plan.plan import Plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import play, plays_whole
from argosy.timeline import Timeline
from argosy.workload.chain import Chain

# The largest number of devices that are drawn one by one.
_MOST_ROWS = 256
# An explanation takes about fifteen simulations, and other schedules take four. They are shown only
# if the plan could be simulated whole for this number of iterations.
_EXPLAINED, _SWITCHED = 2, 4


@dataclass(frozen=True, kw_only=True)
class ShownPlan:
    """A plan with its simulated timelines and explanation."""

    plan: Plan
    """The plan with its prediction."""
    timelines: tuple[tuple[ScheduleSpec, Timeline], ...]
    """The first iteration under its own schedule, then under others that it could switch to."""
    explanation: Explanation | None
    """The explanation; None for a large plan."""
    memory: tuple[DeviceMemory, ...]
    """The memory of devices by the closed form, for a plan without an explanation."""


def shown_plan(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> ShownPlan:
    """Simulate, predict and explain a plan; raise ``InputError`` if it is not valid on this
    cluster."""
    check_plan(plan, chain, cluster)
    whole = plays_whole(plan) and len(plan.devices) <= _MOST_ROWS
    schedules = (plan.schedule, *(_other_schedules(plan) if not model.blocking else ()))
    variants = [replace(plan, schedule=schedule) for schedule in schedules]
    timelines = [play(variant, chain, cluster, model, whole=whole) for variant in variants]
    own = timelines[0] if whole else None
    is_small = plays_whole(plan, iterations=_EXPLAINED)
    return ShownPlan(
        plan=with_prediction(plan, chain, cluster, model=model, timeline=timelines[0]),
        timelines=tuple(zip(schedules, timelines, strict=True)),
        explanation=explain_plan(plan, chain, cluster, model=model, timeline=own)
        if is_small
        else None,
        memory=() if is_small else planned_stack(plan, chain, cluster),
    )


def _other_schedules(plan: Plan) -> list[ScheduleSpec]:
    """Return the schedules that a small pipeline could switch to."""
    is_simple = not plan.schedule.kind.is_chunked and not plan.schedule.kind.is_split
    if len(plan.stages) == 1 or not is_simple or not plays_whole(plan, iterations=_SWITCHED):
        return []
    others = [ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B), ScheduleSpec(kind=ScheduleKind.EAGER)]
    others += [
        ScheduleSpec(kind=ScheduleKind.KFKB, k=k) for k in (2, 4) if k <= plan.num_micro_batches
    ]
    return [schedule for schedule in others if schedule != plan.schedule]
