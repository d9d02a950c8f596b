"""Compute in advance which schedule to use at which bandwidth.

A plan can change its schedule between two iterations for free. For every edge that may change, the
time of each schedule that fits in memory is known as a function of the edge's bandwidth (``kept``).
A rule is added if another schedule than the one above is clearly faster:

    (1)  at bandwidth b the schedule is that of the rule with the lowest threshold above b, or else
         the plan's own (``Plan.schedule_at``)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from argosy.choose.kept import KeptPlans, keep
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.memory import USABLE
from argosy.cost.planned import planned_memory
from argosy.plan.plan import Plan, PolicyRule
from argosy.planner import SCHEDULES, Settings
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.solve.settings import without_deadlock
from argosy.workload.chain import Chain

# A schedule that gains less than this share is not worth a switch.
CLEARLY = 0.005
# Number of bandwidths, between the highest and the lowest, at which schedules are compared.
_GRID = 128
# A switch is free, so more schedules are tried than a search covers.
MORE_SCHEDULES = (*SCHEDULES, ScheduleSpec(kind=ScheduleKind.KFKB, k=8))


def schedules_to_try(settings: Settings, model: ComputeModel) -> tuple[ScheduleSpec, ...]:
    """Return the schedules that a plan may switch between: the requested ones, or else more than
    are searched.

    Interleaved schedules are omitted, because they need other stages; if transfers block, only 1f1b
    remains.
    """
    chosen = without_deadlock(settings, model).schedules
    candidates = MORE_SCHEDULES if chosen == SCHEDULES else chosen
    return tuple(schedule for schedule in candidates if not schedule.kind.is_chunked)


def schedules_that_fit(
    plan: Plan, chain: Chain, cluster: Cluster, schedules: Iterable[ScheduleSpec] = MORE_SCHEDULES
) -> list[Plan]:
    """Return the plan under each schedule with which it fits in memory; its own comes first."""
    result = [plan]
    if len(plan.stages) == 1 or plan.schedule.kind.is_chunked:
        return result
    for schedule in schedules:
        variant = replace(plan, schedule=schedule)
        if schedule == plan.schedule or schedule.k > plan.num_micro_batches:
            continue
        held = planned_memory(variant, chain)
        if all(size <= USABLE * cluster.device(name).kind.memory for name, size in held.items()):
            result.append(variant)
    return result


def with_policy(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    edges: Sequence[str],
    *,
    model: ComputeModel | None = None,
    schedules: Iterable[ScheduleSpec] = MORE_SCHEDULES,
) -> Plan:
    """Return the plan with rules (1) for changes of each of these edges alone.

    An edge that is down at time 0 gets no rules, because its bandwidth then is no starting point.
    """
    variants = schedules_that_fit(plan, chain, cluster, schedules)
    if len(variants) == 1:
        return replace(plan, policy=())
    up = {link.edge for link in cluster.links if link.bandwidth.at(0) > 0}
    kept = (keep(variants, chain, cluster, edge, model=model) for edge in edges if edge in up)
    rules = [rule for edge_plans in kept for rule in _rules(edge_plans)]
    return replace(plan, policy=tuple(rules))


def _rules(kept: KeptPlans) -> Iterator[PolicyRule]:
    """Yield a rule for each change of schedule, from the highest bandwidth down."""
    grid = np.geomspace(kept.high, kept.low, _GRID)
    choice, above = 0, kept.high
    for bandwidth in grid.tolist():
        best = _best(kept, bandwidth, choice)
        if best != choice:
            threshold = _threshold(kept, bandwidth, above, choice) if above > bandwidth else above
            yield PolicyRule(edge=kept.edge, below=threshold, schedule=kept.plans[best].schedule)
            choice = best
        above = bandwidth


def _best(kept: KeptPlans, bandwidth: float, now: int) -> int:
    """Return the schedule to use if ``now`` is in use: another only if it is clearly faster."""
    seconds = kept.seconds(bandwidth)
    best = int(seconds.argmin())
    return best if seconds[best] < seconds[now] * (1 - CLEARLY) else now


def _threshold(kept: KeptPlans, low: float, high: float, now: int) -> float:
    """Return the bandwidth between two at which leaving a schedule begins to pay."""
    for _ in range(20):
        middle = (low * high) ** 0.5
        is_left = _best(kept, middle, now) != now
        low, high = (middle, high) if is_left else (low, middle)
    return float(f"{high:.6g}")
