"""Simulate steps on a cluster that changes, with and without re-balancing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from argosy.cluster.lasting import from_moment
from argosy.cluster.topology import Cluster
from argosy.nbody.particles import Floats
from argosy.nbody.planning.balance import Balancer, BalanceSample, Rules, takes_part
from argosy.nbody.planning.plan import Domains, StepPhase, StepPrices
from argosy.nbody.planning.pricing import BoxWork
from argosy.sim.engine.exact import simulate_exact
from argosy.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class PlayedRun:
    """The times that steps took under the cluster's changes."""

    ends: tuple[float, ...]
    """The time at which each step was over, in seconds."""
    moves: int
    """The number of re-balances."""
    stalled: bool
    """True if a needed device or link is lost permanently, so that no further step ends."""


def play_run(
    cluster: Cluster,
    box: BoxWork,
    domains: Domains,
    steps: int,
    *,
    rebalance: bool,
    until: float = math.inf,
) -> PlayedRun:
    """Simulate successive steps from time 0; with ``rebalance``, the controller decides after
    each."""
    prices = StepPrices.of(cluster, box, domains)
    first = simulate_exact(prices.graph(domains), cluster)
    if first.iteration_ends and not _changes(cluster):
        seconds = first.iteration_ends[-1]
        count = int(min(steps, until // seconds)) if until < math.inf else steps
        return PlayedRun(
            ends=tuple(seconds * (number + 1) for number in range(count)), moves=0, stalled=False
        )
    leaves = prices.leaves()
    left = np.where(takes_part(domains.ends), prices.capacity(domains.planes), 0.0)
    ranks = [cluster.devices[at].name for at in np.flatnonzero(domains.working)]
    bandwidth = slowest_hop(cluster, ranks)
    balancer = Balancer(capacity=tuple(left.tolist()), rules=Rules(bandwidth=bandwidth))
    ends: list[float] = []
    now, timeline = 0.0, first
    while len(ends) < steps and timeline.iteration_ends:
        now += timeline.iteration_ends[-1]
        if now > until:
            break
        ends.append(now)
        if rebalance:
            seconds_of = _device_seconds(timeline, prices.size)
            look = BalanceSample(
                leaves=leaves,
                ends=domains.ends,
                tree_seconds=seconds_of[:, 0],
                mesh_seconds=np.where(prices.beside, 0.0, seconds_of[:, 1]),
            )
            domains = replace(domains, ends=balancer.decide(look) or domains.ends)
        if len(ends) < steps:
            timeline = simulate_exact(prices.graph(domains), from_moment(cluster, now))
    return PlayedRun(ends=tuple(ends), moves=balancer.moves, stalled=not timeline.iteration_ends)


def step_timeline(cluster: Cluster, box: BoxWork, domains: Domains, steps: int) -> Timeline:
    """Return the timeline of ``steps`` steps with these domains, without re-balancing."""
    return simulate_exact(
        StepPrices.of(cluster, box, domains).graph(domains), cluster, iterations=steps
    )


def _device_seconds(timeline: Timeline, size: int) -> Floats:
    """Return, per device, the seconds of tree and pairs, and of the mesh."""
    index = {name: number for number, name in enumerate(timeline.devices)}
    seconds = np.zeros((size, 2))
    for span in timeline.spans:
        if not span.kind.is_communication and span.stage is not None:
            seconds[
                index[span.where], int(span.stage == list(StepPhase).index(StepPhase.MESH))
            ] += span.seconds
    return seconds


def slowest_hop(cluster: Cluster, names: Sequence[str]) -> float:
    """Return the smallest bytes/s between neighbours of these along the curve, at time 0."""
    routes = [cluster.fastest(source, target, 1e9) for source, target in itertools.pairwise(names)]
    return min((cluster.bandwidth_at(route) for route in routes), default=math.inf)


def _changes(cluster: Cluster) -> bool:
    """Return whether any device or link changes over time."""
    traces = [device.speed for device in cluster.devices]
    traces += [trace for link in cluster.links for trace in (link.bandwidth, link.latency)]
    return not all(trace.is_constant for trace in traces)
