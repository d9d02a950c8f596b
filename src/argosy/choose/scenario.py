"""How a plan fares while the network changes: iteration times over a trace, and what is made of
them.

While nothing changes an iteration takes T(state); when the state changes in mid-iteration, the part
that is left goes on at the new pace:

    (1)  done(t) = integral of 1 / T(state) from 0 to t,    the n-th iteration ends where done(t) = n

This fluid estimate ranks; the exact engine, which plays every byte, judges. Of the iterations of
all scenarios within the horizon the objective is

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

MOST_STATES = 512
"""Moments of a scenario that are looked at."""


class Robust(StrEnum):
    """(2)."""

    MEAN = "mean"
    P95 = "p95"
    WORST = "worst"


@dataclass(frozen=True, kw_only=True)
class Horizon:
    """How far a scenario is played."""

    seconds: float
    iterations: int
    """At most, by the exact engine."""


def moments(cluster: Cluster, horizon: float) -> list[float]:
    """When the state changes within a horizon, 0 first; evenly many of them where there are too
    many."""
    knots = {0.0}
    for trace in {link.bandwidth for link in cluster.links} | {
        device.speed for device in cluster.devices
    }:
        knots.update(trace.knots_between(0.0, horizon))
    ordered = sorted(knots)
    step = math.ceil(len(ordered) / MOST_STATES)
    return ordered[::step]


def pace(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel, horizon: float) -> Trace:
    """1 / T(state) over time; 0 while the plan cannot go on. Of what comes after the horizon only
    that counts."""
    steady = SteadyGraph(*task_graph(plan, chain, cluster, model, whole=False))
    times = [*moments(steady.cluster, horizon), horizon]
    seconds = steady.seconds(steady.at(times))
    if np.isfinite(seconds[-1]):
        times, seconds = times[:-1], seconds[:-1]
    rates = [float(rate) for rate in np.where(np.isfinite(seconds), 1 / seconds, 0.0)]
    return Trace.from_steps(zip(times, rates, strict=True), initial=rates[0])


def fluid_times(rate: Trace, horizon: float) -> FloatArray:
    """(1): seconds of each iteration that begins within the horizon; the last may end long after
    it, or never."""
    done = rate.integral(0.0, horizon)
    count = max(1, math.ceil(done - 1e-9))
    times, sums = rate.knots
    ends = np.interp(np.arange(1, count), sums, times).tolist()
    return np.diff([0.0, *ends, rate.advance(ends[-1] if ends else 0.0, 1.0)])


def exact_times(
    plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel, horizon: Horizon
) -> FloatArray:
    """Seconds of each iteration that begins within the horizon, by the exact engine; infinite where
    the last of them never ends."""
    count, end = horizon.iterations, horizon.seconds
    played = play(plan, chain, cluster, model, whole=False, iterations=count, record=0, until=end)
    never = [] if played.stalled is None else [math.inf]
    return np.diff([0.0, *played.iteration_ends, *never])


def objective(times: Sequence[FloatArray], robust: Robust) -> float:
    """(2) of the iteration times of each scenario."""
    match robust:
        case Robust.MEAN:
            return float(np.mean([one.mean() for one in times]))
        case Robust.P95:
            pooled = np.concatenate(list(times))
            return math.inf if np.isinf(pooled).any() else float(np.quantile(pooled, 0.95))
        case Robust.WORST:
            return float(np.concatenate(list(times)).max())


def lasting(
    cluster: Cluster, scenarios: Sequence[Cluster], horizon: float, quantile: float | None = None
) -> Cluster:
    """The cluster with every link and device for ever as it is on average over all scenarios, or at
    a quantile over time and scenarios. A device that is lost for more than that share of the time
    counts as lost at a quantile, and so does one that a link which is down for as long cuts off."""

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
    """The ``most`` best plans that a search finds for each view of a cluster: for the first some,
    or there is no point; for another none where nothing fits on what is left of the cluster
    there."""
    found = [search(views[0])[:most]]
    for view in views[1:]:
        try:
            found.append(search(view)[:most])
        except InfeasibleError:
            found.append([])
    return found


def without_what_changes(cluster: Cluster, scenarios: Sequence[Cluster]) -> Cluster:
    """The cluster at time 0 with every device lost that changes itself, or whose node's own links
    do."""
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
