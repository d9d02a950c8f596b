"""Estimate links and devices in one step from the timestamps of its messages and computations.

A message m of b_m bytes leaves at s_m and arrives at a_m, when its receiver has stopped waiting for
it. For a link and the messages that cross it:

    (1)  sample of m = max over j of (sum of b over the messages that left from s_j on and arrived
         by a_m) / (a_m - s_j): at most what the link can carry, and exactly that if the link was
         busy and the receiver waited
    (2)  rate of a link on a route = median of (1) over the messages of the route in the step that
         a receiver waited for

The rate of a route tells little about its wide links. So a rate counts if it is about the believed
bandwidth of the link, or more. If no link of a route is that busy, some link has become slow:

    (3)  among the links that no other route has seen busy, those on the edges that most of the
         unexplained routes have in common are blamed; their rates count, others' do not

Devices of a stage exchange tensors while they compute (a tensor-parallel group, or replicas under
ZeRO 2 and 3), and a device that finishes first waits there for the others. These seconds are
measured separately and are attributed to no device:

    (4)  speed of a device = predicted over measured seconds of its own part of a micro-batch,
         exchanges counted in neither; measured: the median over the step; predicted for a member of
         a group: by its ratio of the work

A plan assumes ratios; a runtime cuts whole columns and heads and computes on every member what
cannot be cut. The speeds contain that difference, like every other one between the cost model and a
device. A group whose members report no exchange is not judged: nothing was cut, or nothing was
measured.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel, Portion, stage_seconds
from argosy.plan.plan import Plan
from argosy.workload.chain import Chain

# A rate below its link's believed bandwidth by more than this share does not explain a slow route
# (3).
TOLERANCE = 0.15
# At most this many earlier messages may have kept the link busy; it bounds the cost of (1).
_WINDOW = 8
# A receiver must have waited for at least this share of a message's time; otherwise the message may
# have arrived earlier than its timestamp.
_WAITED = 0.1
# Messages with fewer bytes are ignored, because they measure latency.
_LEAST_BYTES = 4096


class ObservedTransfer(NamedTuple):
    """A transfer of one or more tensors that was observed between two devices."""

    source: str
    target: str
    bytes: float
    sent: float
    """Seconds on a clock that all devices share."""
    awaited: float
    """Seconds at which the receiver began to wait."""
    arrived: float
    """Seconds at which the receiver had the message."""

    @property
    def was_awaited(self) -> bool:
        return self.arrived - max(self.awaited, self.sent) > _WAITED * (self.arrived - self.sent)


class ObservedWork(NamedTuple):
    """The time that a device spent on one micro-batch, forward and backward."""

    own: float
    """Seconds without exchanges."""
    together: float
    """Seconds of exchanges with other devices of the stage, waiting for them included."""


def bandwidths_seen(
    messages: Sequence[ObservedTransfer], cluster: Cluster, believed: Mapping[str, float]
) -> dict[str, float]:
    """Return bytes/s by link, for the links that the step allows to estimate, by (1) to (3)."""
    name_of = [link.name for link in cluster.links]
    routes: dict[tuple[str, str], tuple[int, ...]] = {}
    crossing: dict[int, list[ObservedTransfer]] = defaultdict(list)
    for message in messages:
        pair = (message.source, message.target)
        if message.bytes < _LEAST_BYTES or message.source == message.target:
            continue
        if pair not in routes:
            routes[pair] = cluster.fastest(*pair, message.bytes).links
        for link in routes[pair]:
            crossing[link].append(message)
    rates: dict[tuple[str, str], dict[int, float]] = {}
    for pair, links in routes.items():
        awaited = [m for m in messages if (m.source, m.target) == pair and m.was_awaited]
        if awaited:
            latency = cluster.latency(cluster.fastest(*pair, awaited[0].bytes))
            rates[pair] = {link: _rate(awaited, crossing[link], latency) for link in links}
    seen: dict[int, float] = {}
    unexplained = []
    for route_rates in rates.values():
        busy = {
            link: rate
            for link, rate in route_rates.items()
            if rate >= (1 - TOLERANCE) * believed[name_of[link]]
        }
        for link, rate in busy.items():
            seen[link] = max(rate, seen.get(link, 0.0))
        if not busy:
            unexplained.append(route_rates)
    seen |= _blamed(unexplained, seen, cluster)
    return {name_of[link]: rate for link, rate in seen.items()}


def _rate(
    awaited: Sequence[ObservedTransfer], crossing: Sequence[ObservedTransfer], latency: float
) -> float:
    """Return the rate of a link on a route, by (1) and (2)."""
    ordered = sorted(crossing, key=lambda message: message.sent)
    samples = []
    for last in awaited:
        before = [message for message in ordered if message.sent <= last.sent][-_WINDOW:]
        rates = [
            sum(
                message.bytes
                for message in ordered
                if message.sent >= first.sent and message.arrived <= last.arrived
            )
            / max(last.arrived - first.sent - latency, 1e-9)
            for first in before
        ]
        samples.append(max(rates))
    return statistics.median(samples)


def _blamed(
    unexplained: Sequence[Mapping[int, float]], busy: Mapping[int, float], cluster: Cluster
) -> dict[int, float]:
    """Return the rates of the links that are blamed for unexplained slow routes (3)."""
    suspects = [
        {link: rate for link, rate in rates.items() if link not in busy} or rates
        for rates in unexplained
    ]
    votes: dict[str, int] = defaultdict(int)
    for rates in suspects:
        for edge in {cluster.links[link].edge for link in rates}:
            votes[edge] += 1
    blamed: dict[int, float] = {}
    for rates in suspects:
        most = max(votes[cluster.links[link].edge] for link in rates)
        blamed |= {
            link: rate for link, rate in rates.items() if votes[cluster.links[link].edge] == most
        }
    return blamed


def work_of(kinds: Mapping[str, Sequence[ObservedWork]]) -> ObservedWork:
    """Return the work of a micro-batch, as the sum over kinds of computation of their medians.

    >>> forward = [ObservedWork(1.0, 0.5), ObservedWork(1.5, 4.0), ObservedWork(9.0, 1.0)]
    >>> work_of({"forward": forward, "backward": [ObservedWork(2.0, 1.0)]})
    ObservedWork(own=3.5, together=2.0)
    """
    own = sum(statistics.median(work.own for work in works) for works in kinds.values())
    return ObservedWork(
        own, sum(statistics.median(work.together for work in works) for works in kinds.values())
    )


def speeds_seen(
    works: Mapping[tuple[int, str], ObservedWork],
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    model: ComputeModel,
) -> dict[str, float]:
    """Return the speed of each device by (4), from ``works`` by stage and device."""
    predicted: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)
    for index, stage in enumerate(plan.stages):
        for replica in stage.replicas:
            for name, share in zip(replica.devices, replica.shares, strict=True):
                work = works.get((index, name))
                if work is None or (replica.width > 1 and work.together <= 0):
                    continue
                device = cluster.device(name)
                portion = Portion(
                    device=device, samples=replica.samples, share=share, width=replica.width
                )
                predicted[name] += sum(stage_seconds(model, chain, stage, portion))
                measured[name] += work.own
    return {name: predicted[name] / measured[name] for name in measured if measured[name] > 0}
