"""What a step says about links and devices, from messages and computations that were timed anyway.

A message m of b_m bytes leaves at s_m and is there at a_m, when its receiver has stopped waiting for it. For a link, of
the messages that cross it:

    (1)  sample of m = max over j of (sum of b over the messages that left from s_j on and came by a_m) / (a_m - s_j)
         no more than what the link can carry, and just that where the link was busy and the receiver waited
    (2)  rate of the link = median of (1) over the messages of the step that were waited for

What a route carries says little about its wide links. So a rate counts where it is about what the link is believed to
carry, or more; and where no link of a route is that busy, something has become slow:

    (3)  the edges that most of the unexplained routes have in common are to blame; their rates count, others' do not

    (4)  speed of a device = predicted over measured seconds of a micro-batch, median over the step
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from argosy.adapt.watch import TOLERANCE
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel, Portion, stage_seconds
from argosy.plan.plan import Plan
from argosy.workload.chain import Chain

_WINDOW = 8
"""Messages before one that may have kept the link busy."""
_WAITED = 0.1
"""Share of a message's time that its receiver must have waited for it."""
_LEAST_BYTES = 4096
"""Smaller messages measure latency."""


class Message(NamedTuple):
    """A tensor or several from one device to another."""

    source: str
    target: str
    bytes: float
    sent: float
    """Seconds on a clock that all share."""
    awaited: float
    """When the receiver began to wait."""
    arrived: float
    """When it had it."""

    @property
    def was_awaited(self) -> bool:
        return self.arrived - max(self.awaited, self.sent) > _WAITED * (self.arrived - self.sent)


def bandwidths_seen(messages: Sequence[Message], cluster: Cluster, believed: Mapping[str, float]) -> dict[str, float]:
    """(1) to (3): bytes/s by link, of the links that the step says something about."""
    routes: dict[tuple[str, str], tuple[int, ...]] = {}
    crossing: dict[int, list[Message]] = defaultdict(list)
    for message in messages:
        pair = (message.source, message.target)
        if message.bytes < _LEAST_BYTES or message.source == message.target:
            continue
        if pair not in routes:
            routes[pair] = cluster.fastest(*pair, message.bytes).links
        for link in routes[pair]:
            crossing[link].append(message)
    rates = {link: rate for link, found in crossing.items() if (rate := _rate(found, cluster)) is not None}
    names = {link: cluster.links[link].name for link in rates}
    busy = {link for link, rate in rates.items() if rate >= (1 - TOLERANCE) * believed[names[link]]}
    seen = {names[link]: rates[link] for link in busy}
    unexplained = [links for links in routes.values() if rates.keys() >= set(links) and busy.isdisjoint(links)]
    votes: dict[str, int] = defaultdict(int)
    for links in unexplained:
        for edge in {cluster.links[link].edge for link in links}:
            votes[edge] += 1
    for links in unexplained:
        most = max(votes[cluster.links[link].edge] for link in links)
        seen |= {names[link]: rates[link] for link in links if votes[cluster.links[link].edge] == most}
    return seen


def _rate(messages: Sequence[Message], cluster: Cluster) -> float | None:
    """(1), (2); None where nobody waited."""
    ordered = sorted(messages, key=lambda message: message.sent)
    samples = []
    for at, last in enumerate(ordered):
        if not last.was_awaited:
            continue
        latency = cluster.latency(cluster.fastest(last.source, last.target, last.bytes))
        best = 0.0
        for first in ordered[max(0, at - _WINDOW + 1) : at + 1]:
            carried = sum(one.bytes for one in ordered if one.sent >= first.sent and one.arrived <= last.arrived)
            best = max(best, carried / max(last.arrived - first.sent - latency, 1e-9))
        samples.append(best)
    return statistics.median(samples) if samples else None


def speeds_seen(
    seconds: Mapping[tuple[int, str], float], plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel
) -> dict[str, float]:
    """(4) by device. ``seconds``: of one micro-batch, forward and backward, by stage and device."""
    predicted: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)
    for index, stage in enumerate(plan.stages):
        for replica in stage.replicas:
            for name in replica.devices:
                found = seconds.get((index, name))
                if found is None:
                    continue
                portion = Portion(device=cluster.device(name), samples=replica.samples)
                predicted[name] += sum(stage_seconds(model, chain, stage, portion))
                measured[name] += found
    return {name: predicted[name] / measured[name] for name in measured if measured[name] > 0}
