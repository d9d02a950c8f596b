"""Choose a plan for a network that changes: under all scenarios instead of for one moment.

    (1)  views       = the cluster on average, at time 0, at its lowest tenth, and without the nodes
                       that change: each searched
    (2)  candidates  = the best unlike plans of each view, each under every schedule with which it
                       fits, or under the requested schedules
    (3)  rank        = by the fluid estimate of the objective over all scenarios (``scenario`` (1),
                       (2))
    (4)  judge       = the few best, and the best for the average, by the exact engine over the same
                       scenarios; a plan that waits permanently for a lost device or link in one of
                       them comes after all that continue

The plan for the average is always among the judged, so the choice is never worse than it by the
exact engine's measure of the objective, unless that plan does not continue. The certificate of a
search holds for its own view only and is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from argosy.choose.policy import schedules_that_fit, schedules_to_try, with_policy
from argosy.choose.scenario import (
    Horizon,
    Robust,
    exact_times,
    fluid_times,
    lasting,
    objective,
    pace,
    plans_of_views,
    without_what_changes,
)
from argosy.cluster.lasting import at_time_zero, last_change
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import FloatArray
from argosy.cost.compute import ComputeModel
from argosy.cost.planned import planned_memory
from argosy.errors import InfeasibleError
from argosy.plan.plan import ClusterRef, LeftOut, Plan, Predicted, RunnerUp, Search
from argosy.planner import Settings, kept_plans
from argosy.units import TIME
from argosy.workload.chain import Chain

# The pessimistic view has every link and device at this quantile.
_LOW = 0.1
# Each view contributes at most this many plans.
_PLANS_PER_VIEW = 12
# At most this many plans are tried under every schedule.
_PLANS = 16
# The exact engine judges this many plans, and the best one for the average.
_FINALISTS = 4
# Scenarios are simulated for at least this many iterations.
_LEAST_HORIZON = 10
# Objectives that differ by no more than this share count as equal.
_EQUAL = 1e-6


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The iteration times that a plan has over all scenarios, in seconds, by the exact engine; only
    iterations that end count, if each scenario has any."""

    plan: Plan
    mean: float
    p95: float
    worst: float
    estimate: float
    """Estimate of the objective by (3)."""
    never_ends: bool = False
    """Whether an iteration never ends in some scenario."""


@dataclass(frozen=True, kw_only=True)
class RobustChoice:
    """A plan that was chosen, with its policy, and the figures of it and of others under the
    scenarios."""

    plan: Plan
    robust: Robust
    horizon: float
    chosen: Figures
    average: Figures
    """The best plan for the average network."""
    others: tuple[Figures, ...]

    @property
    def gain(self) -> float:
        """Return the relative gain of the objective over the plan for the average."""
        return self.average_value / self.value - 1

    @property
    def value(self) -> float:
        return float(getattr(self.chosen, self.robust))

    @property
    def average_value(self) -> float:
        return float(getattr(self.average, self.robust))


def find_robust_plan(
    chain: Chain,
    cluster: Cluster,
    scenarios: Sequence[Cluster],
    *,
    global_batch: int,
    robust: Robust = Robust.MEAN,
    settings: Settings | None = None,
    model: ComputeModel | None = None,
    iterations: int = 40,
) -> RobustChoice:
    """Return the best plan over the scenarios, each of which is the same cluster under other
    traces."""
    began = time.process_time()
    settings, model = replace(settings or Settings(), ends_early=False), model or ComputeModel()
    horizon = last_change(scenarios)
    search = partial(kept_plans, chain, global_batch=global_batch, settings=settings, model=model)
    by_view = plans_of_views(search, _views(cluster, scenarios, horizon), _PLANS_PER_VIEW)
    estimate = partial(
        _estimate, chain=chain, scenarios=scenarios, model=model, robust=robust, horizon=horizon
    )
    plain = _ranked({_key(plan): plan for view in by_view for plan in view}.values(), estimate)
    schedules = schedules_to_try(settings, model)
    fitting = (schedules_that_fit(plan, chain, cluster, schedules) for _, plan in plain[:_PLANS])
    variants = [variant for plan_variants in fitting for variant in plan_variants]
    average = by_view[0][0]
    ranked = _ranked({_key(plan): plan for plan in (average, *variants)}.values(), estimate)
    finalists = ranked[:_FINALISTS]
    finalists += [(value, plan) for value, plan in ranked[_FINALISTS:] if plan == average]
    limit = Horizon(seconds=max(horizon, _LEAST_HORIZON * ranked[0][0]), iterations=iterations)
    judged = [_figures(plan, value, chain, scenarios, model, limit) for value, plan in finalists]
    judged.sort(key=lambda figures: (figures.never_ends, float(getattr(figures, robust))))
    if math.isinf(judged[0].mean):
        raise InfeasibleError(
            f"no plan of {chain.name} on {cluster!r} ends an iteration in every scenario"
        )
    finished, edges = _finished(judged, chain, cluster, robust), _edges(scenarios)
    still = at_time_zero(cluster)
    plan = with_policy(finished, chain, still, edges, model=model, schedules=schedules)
    effort = Search(
        cpu_seconds=time.process_time() - began, candidates=len(plain) + len(ranked), pruned=()
    )
    return RobustChoice(
        plan=replace(plan, search=effort),
        robust=robust,
        horizon=limit.seconds,
        chosen=judged[0],
        average=next(figures for figures in judged if figures.plan == average),
        others=tuple(figures for figures in judged[1:] if figures.plan != average),
    )


def _views(cluster: Cluster, scenarios: Sequence[Cluster], horizon: float) -> list[Cluster]:
    """Return the constant clusters that plans are found for; the first is the average."""
    return [
        lasting(cluster, scenarios, horizon),
        at_time_zero(cluster),
        lasting(cluster, scenarios, horizon, _LOW),
        without_what_changes(cluster, scenarios),
    ]


def _key(plan: Plan) -> tuple[object, ...]:
    return plan.stages, plan.schedule, plan.num_micro_batches


def _ranked(plans: Iterable[Plan], estimate: partial[float]) -> list[tuple[float, Plan]]:
    return sorted(((estimate(plan), plan) for plan in plans), key=lambda ranked: ranked[0])


def _estimate(
    plan: Plan,
    chain: Chain,
    scenarios: Sequence[Cluster],
    model: ComputeModel,
    robust: Robust,
    horizon: float,
) -> float:
    """Return the estimate of the objective (3)."""
    rates = [pace(plan, chain, scenario, model, max(horizon, 1e-9)) for scenario in scenarios]
    return objective([fluid_times(rate, max(horizon, 1e-9)) for rate in rates], robust)


def _figures(
    plan: Plan,
    value: float,
    chain: Chain,
    scenarios: Sequence[Cluster],
    model: ComputeModel,
    limit: Horizon,
) -> Figures:
    """Return the figures of a plan by the exact engine (4)."""
    times: list[FloatArray] = [
        exact_times(plan, chain, scenario, model, limit) for scenario in scenarios
    ]
    never_ends = any(np.isinf(seconds[-1]) for seconds in times)
    times = [
        seconds[np.isfinite(seconds)] if np.isfinite(seconds[0]) else seconds for seconds in times
    ]
    mean, p95, worst = (objective(times, robust) for robust in Robust)
    return Figures(
        plan=plan, mean=mean, p95=p95, worst=worst, estimate=value, never_ends=never_ends
    )


def _edges(scenarios: Sequence[Cluster]) -> list[str]:
    """Return the edges whose bandwidth changes in any scenario."""
    return sorted(
        {
            link.edge
            for scenario in scenarios
            for link in scenario.links
            if not link.bandwidth.is_constant
        }
    )


def _finished(judged: Sequence[Figures], chain: Chain, cluster: Cluster, robust: Robust) -> Plan:
    """Return the best judged plan with its mean as the prediction, the reasons why others lost, and
    the devices it omits."""
    best, used = judged[0], set(judged[0].plan.devices)
    predicted = Predicted(
        iteration_seconds=best.mean,
        samples_per_second=best.plan.global_batch / best.mean,
        peak_memory_bytes=tuple(planned_memory(best.plan, chain).items()),
        bottleneck="",
    )
    runner_ups = [
        RunnerUp(
            description=repr(loser.plan),
            iteration_seconds=loser.mean,
            reason=_why(loser, best, robust),
        )
        for loser in judged[1:4]
        if np.isfinite(loser.mean)
    ]
    return replace(
        best.plan,
        cluster=ClusterRef.of(cluster),
        predicted=predicted,
        certificate=None,
        runner_ups=tuple(runner_ups),
        left_out=tuple(
            LeftOut(
                device=device.name,
                reason=f"no plan with it has a better {robust} over the scenarios",
            )
            for device in cluster.devices
            if device.name not in used
        ),
    )


def _why(loser: Figures, best: Figures, robust: Robust) -> str:
    if loser.never_ends and not best.never_ends:
        return "an iteration never ends in one of the scenarios"
    least, value = float(getattr(best, robust)), float(getattr(loser, robust))
    if value <= least * (1 + _EQUAL):
        return f"as fast: the same {robust} over the scenarios"
    return f"{robust} {' against '.join(TIME.apart(value, least))} over the scenarios"
