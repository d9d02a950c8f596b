"""Links and devices as a run has shown them: what its measured timeline says, step by step
(``signals``).

(1)  rate of a link, speed of a device = the median over the steps that say something about it
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from argosy.adapt.signals import (
    ObservedTransfer,
    ObservedWork,
    bandwidths_seen,
    speeds_seen,
    work_of,
)
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import bad_input
from argosy.plan.plan import Plan
from argosy.timeline import ContactKind, SpanKind, Timeline
from argosy.workload.chain import Chain


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a run says; links and devices about which it says nothing are not there."""

    bandwidths: dict[str, float]
    """Bytes/s by link."""
    speeds: dict[str, float]
    """By device, relative to what the plan counted with."""


def seen_in(
    timeline: Timeline, plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel
) -> Seen:
    """(1) from a timeline that a run of ``plan`` has measured."""
    if timeline.clock != "measured":
        raise bad_input("a timeline that a run has measured", timeline.clock)
    strange = [name for name in timeline.devices if name not in cluster.device_index]
    if strange:
        raise bad_input(
            f"a timeline of a run on {cluster.name}, whose devices are others", strange[0]
        )
    believed = {link.name: link.bandwidth.at(0) for link in cluster.links}
    rates, speeds = defaultdict(list), defaultdict(list)
    for iteration in range(len(timeline.iteration_ends)):
        for name, rate in bandwidths_seen(
            _messages(timeline, iteration), cluster, believed
        ).items():
            rates[name].append(rate)
        for name, speed in speeds_seen(
            _works(timeline, iteration), plan, chain, cluster, model
        ).items():
            speeds[name].append(speed)
    return Seen(
        bandwidths={name: statistics.median(found) for name, found in sorted(rates.items())},
        speeds={name: statistics.median(found) for name, found in sorted(speeds.items())},
    )


def _messages(timeline: Timeline, iteration: int) -> list[ObservedTransfer]:
    """A transfer ends where its receiver stops waiting for it."""
    awaited = {
        (one.where, one.micro_batch, one.end): one.start
        for one in timeline.contacts
        if one.kind is ContactKind.WAITING and one.iteration == iteration
    }
    messages = []
    for span in timeline.spans:
        if (
            span.kind is SpanKind.TRANSFER
            and span.iteration == iteration
            and span.micro_batch is not None
        ):
            source, _, target = span.where.partition(">")
            began = awaited.get((target, span.micro_batch, span.end))
            if began is not None:
                messages.append(
                    ObservedTransfer(source, target, span.bytes, span.start, began, span.end)
                )
    return messages


def _works(timeline: Timeline, iteration: int) -> dict[tuple[int, str], ObservedWork]:
    """By stage and device."""
    found: dict[tuple[int, str], dict[str, list[ObservedWork]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for span in timeline.spans:
        if span.stage is None or span.micro_batch is None or span.kind.is_communication:
            continue
        if span.iteration == iteration:
            work = ObservedWork(max(0.0, span.seconds - span.together), span.together)
            found[span.stage, span.where][span.kind].append(work)
    return {key: work_of(kinds) for key, kinds in found.items()}
