"""What a step says about links and devices, from messages and computations that were timed anyway.

A message m of b_m bytes leaves at s_m and is there at a_m, when its receiver has stopped waiting
for it. For a link, of the messages that cross it:

    (1)  sample of m = max over j of (sum of b over the messages that left from s_j on and came by
         a_m) / (a_m - s_j) no more than what the link can carry, and just that where the link was
         busy and the receiver waited
    (2)  rate of a link on a route = median of (1) over the messages of the route in the step that
         were waited for

What a route carries says little about its wide links. So a rate counts where it is about what the
link is believed to carry, or more; and where no link of a route is that busy, something has become
slow:

    (3)  of the links that no other route has seen busy, those on the edges that most of the
         unexplained routes have in common are to blame; their rates count, others' do not

Devices of a stage exchange tensors while they compute (a tensor-parallel group, or replicas under
ZeRO 2 and 3), and who is done first waits there for the others. Seconds spent so are measured apart
and count for nobody:

    (4)  speed of a device = predicted over measured seconds of its own part of a micro-batch,
         exchanges counted in neither; measured: the median over the step; predicted for a member of
         a group: by its ratio of the work

A plan counts with ratios, a runtime cuts whole columns and heads and computes on every member what
cannot be cut; that difference is in the speeds, as every other between the cost model and a device
is. A group whose members tell of no exchange is not judged: nothing was cut, or nobody measured it.
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
_WINDOW = 8
"""Messages before one that may have kept the link busy."""
_WAITED = 0.1
"""Share of a message's time that its receiver must have waited for it."""
_LEAST_BYTES = 4096
"""Smaller messages measure latency."""


class ObservedTransfer(NamedTuple):
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


class ObservedWork(NamedTuple):
    """What one micro-batch took a device, forward and backward."""

    own: float
    """Seconds without exchanges."""
    together: float
    """Seconds of exchanges with other devices of the stage, waiting for them included."""


def bandwidths_seen(
    messages: Sequence[ObservedTransfer], cluster: Cluster, believed: Mapping[str, float]
) -> dict[str, float]:
    """(1) to (3): bytes/s by link, of the links that the step says something about."""
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
    for found in rates.values():
        busy = {
            link: rate
            for link, rate in found.items()
            if rate >= (1 - TOLERANCE) * believed[name_of[link]]
        }
        for link, rate in busy.items():
            seen[link] = max(rate, seen.get(link, 0.0))
        if not busy:
            unexplained.append(found)
    seen |= _blamed(unexplained, seen, cluster)
    return {name_of[link]: rate for link, rate in seen.items()}


def _rate(
    awaited: Sequence[ObservedTransfer], crossing: Sequence[ObservedTransfer], latency: float
) -> float:
    """(1), (2)."""
    ordered = sorted(crossing, key=lambda message: message.sent)
    samples = []
    for last in awaited:
        before = [message for message in ordered if message.sent <= last.sent][-_WINDOW:]
        rates = [
            sum(
                one.bytes
                for one in ordered
                if one.sent >= first.sent and one.arrived <= last.arrived
            )
            / max(last.arrived - first.sent - latency, 1e-9)
            for first in before
        ]
        samples.append(max(rates))
    return statistics.median(samples)


def _blamed(
    unexplained: Sequence[Mapping[int, float]], busy: Mapping[int, float], cluster: Cluster
) -> dict[int, float]:
    """(3)."""
    suspects = [
        {link: rate for link, rate in found.items() if link not in busy} or found
        for found in unexplained
    ]
    votes: dict[str, int] = defaultdict(int)
    for found in suspects:
        for edge in {cluster.links[link].edge for link in found}:
            votes[edge] += 1
    blamed: dict[int, float] = {}
    for found in suspects:
        most = max(votes[cluster.links[link].edge] for link in found)
        blamed |= {
            link: rate for link, rate in found.items() if votes[cluster.links[link].edge] == most
        }
    return blamed


def work_of(kinds: Mapping[str, Sequence[ObservedWork]]) -> ObservedWork:
    """A micro-batch of a step, from those of its kinds of computation: the median of each.

    >>> work_of({"forward": [Work(1.0, 0.5), Work(1.5, 4.0), Work(9.0, 1.0)], "backward": [Work(2.0, 1.0)]})
    Work(own=3.5, together=2.0)
    """
    own = sum(statistics.median(work.own for work in found) for found in kinds.values())
    return ObservedWork(
        own, sum(statistics.median(work.together for work in found) for found in kinds.values())
    )


def speeds_seen(
    works: Mapping[tuple[int, str], ObservedWork],
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    model: ComputeModel,
) -> dict[str, float]:
    """(4) by device. ``works``: by stage and device."""
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
