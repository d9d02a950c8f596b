"""Compute iteration times of a plan while the network changes, and objectives over them.

While nothing changes an iteration takes T(state); when the state changes during an iteration, the
rest continues at the new pace:

    (1)  done(t) = integral of 1 / T(state) from 0 to t,    the n-th iteration ends at done(t) = n

This fluid estimate ranks; the exact engine, which simulates every byte, judges. The objective over
the iterations of all scenarios within the horizon is

    (2)  mean (of each scenario, then of all), 95th percentile, or the worst
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from argosy.choose.steady import SteadyGraph
from argosy.cluster.lasting import at_time_zero, with_only, within_reach
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import FloatArray, Trace
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan
from argosy.sim.simulate import play, task_graph
from argosy.workload.chain import Chain

# A scenario is evaluated at no more than this many moments, which bounds the time of an estimate.
MOST_STATES = 512


class Robust(StrEnum):
    """An objective that ranks plans over all scenarios (2)."""

    MEAN = "mean"
    P95 = "p95"
    WORST = "worst"


@dataclass(frozen=True, kw_only=True)
class Horizon:
    """A limit on how far a scenario is simulated."""

    seconds: float
    iterations: int
    """Maximum number of iterations in the exact engine."""


def moments(cluster: Cluster, horizon: float) -> list[float]:
    """Return when the state changes within a horizon, 0 first; if there are too many moments, an
    evenly spaced subset."""
    knots = {0.0}
    for trace in {link.bandwidth for link in cluster.links} | {
        device.speed for device in cluster.devices
    }:
        knots.update(trace.knots_between(0.0, horizon))
    ordered = sorted(knots)
    step = math.ceil(len(ordered) / MOST_STATES)
    return ordered[::step]


def pace(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel, horizon: float) -> Trace:
    """Return 1 / T(state) over time; 0 while the plan cannot continue.

    After the horizon only one thing matters: whether the plan can continue.
    """
    steady = SteadyGraph(*task_graph(plan, chain, cluster, model, whole=False))
    times = [*moments(steady.cluster, horizon), horizon]
    seconds = steady.seconds(steady.at(times))
    if np.isfinite(seconds[-1]):
        times, seconds = times[:-1], seconds[:-1]
    rates = [float(rate) for rate in np.where(np.isfinite(seconds), 1 / seconds, 0.0)]
    return Trace.from_steps(zip(times, rates, strict=True), initial=rates[0])


def fluid_times(rate: Trace, horizon: float) -> FloatArray:
    """Return the seconds of each iteration that begins within the horizon by (1); the last may end
    long after it, or never."""
    done = rate.integral(0.0, horizon)
    count = max(1, math.ceil(done - 1e-9))
    times, sums = rate.knots
    ends = np.interp(np.arange(1, count), sums, times).tolist()
    return np.diff([0.0, *ends, rate.advance(ends[-1] if ends else 0.0, 1.0)])


def exact_times(
    plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel, horizon: Horizon
) -> FloatArray:
    """Return the seconds of each iteration that begins within the horizon, by the exact engine;
    infinity if the last of them never ends."""
    count, end = horizon.iterations, horizon.seconds
    played = play(plan, chain, cluster, model, whole=False, iterations=count, record=0, until=end)
    never = [] if played.stalled is None else [math.inf]
    return np.diff([0.0, *played.iteration_ends, *never])


def objective(times: Sequence[FloatArray], robust: Robust) -> float:
    """Return the objective (2) of the iteration times of each scenario."""
    match robust:
        case Robust.MEAN:
            return float(np.mean([seconds.mean() for seconds in times]))
        case Robust.P95:
            pooled = np.concatenate(list(times))
            return math.inf if np.isinf(pooled).any() else float(np.quantile(pooled, 0.95))
        case Robust.WORST:
            return float(np.concatenate(list(times)).max())


def lasting(
    cluster: Cluster, scenarios: Sequence[Cluster], horizon: float, quantile: float | None = None
) -> Cluster:
    """Return the cluster with every link and device constant at its average over all scenarios, or
    at a quantile over time and scenarios.

    At a quantile, a device counts as lost if it is lost for more than that share of the time, and
    so does a device that is cut off by a link which is down for as long.
    """

    def value(traces: Sequence[Trace]) -> Trace:
        if all(trace.is_constant for trace in traces) and len(set(traces)) == 1:
            return traces[0]
        if quantile is None:
            return Trace.constant(sum(trace.mean(0.0, horizon) for trace in traces) / len(traces))
        grid = np.linspace(0.0, horizon, 257)[:-1]
        samples = [trace.at(time) for trace in traces for time in grid]
        return Trace.constant(float(np.quantile(samples, quantile)))

    links = [
        replace(
            link,
            bandwidth=value([scenario.links[index].bandwidth for scenario in scenarios]),
            latency=value([scenario.links[index].latency for scenario in scenarios]),
        )
        for index, link in enumerate(cluster.links)
    ]
    devices = [
        replace(device, speed=value([scenario.devices[index].speed for scenario in scenarios]))
        for index, device in enumerate(cluster.devices)
    ]
    return within_reach(replace(cluster, links=tuple(links), devices=tuple(devices)))


def plans_of_views(
    search: Callable[[Cluster], list[Plan]], views: Sequence[Cluster], most: int
) -> list[list[Plan]]:
    """Return the ``most`` best plans that a search finds for each view of a cluster.

    The first view must have a plan. Another view has none if nothing fits on the rest of the
    cluster there.
    """
    by_view = [search(views[0])[:most]]
    for view in views[1:]:
        try:
            by_view.append(search(view)[:most])
        except InfeasibleError:
            by_view.append([])
    return by_view


def without_what_changes(cluster: Cluster, scenarios: Sequence[Cluster]) -> Cluster:
    """Return the cluster at time 0 without devices that change, or whose node's own links
    change."""
    moving = {
        index
        for scenario in scenarios
        for index, link in enumerate(scenario.links)
        if not (link.bandwidth.is_constant and link.latency.is_constant)
    }
    nodes = {
        node.name
        for node in cluster.nodes
        if not moving.isdisjoint(
            {*(node.nic or ()), *(link for m in node.media for link in (*m.outward, *m.inward))}
        )
    }
    lost = {
        device.name
        for scenario in scenarios
        for device in scenario.devices
        if not device.speed.is_constant
    } | {device.name for device in cluster.devices if device.node in nodes}
    return with_only(at_time_zero(cluster), {device.name for device in cluster.devices} - lost)
