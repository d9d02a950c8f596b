"""Estimate links and devices from the measured timeline of a run, step by step (``signals``).

(1)  rate of a link, speed of a device = the median over the steps that allow an estimate
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
    """The rates and speeds that a run shows; links and devices without an estimate are missing."""

    bandwidths: dict[str, float]
    """Bytes/s by link."""
    speeds: dict[str, float]
    """Speed by device, relative to the speed that the plan assumed."""


def seen_in(
    timeline: Timeline, plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel
) -> Seen:
    """Return the rates of links and speeds of devices (1) from a timeline that a run of ``plan``
    has measured."""
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
        bandwidths={name: statistics.median(levels) for name, levels in sorted(rates.items())},
        speeds={name: statistics.median(levels) for name, levels in sorted(speeds.items())},
    )


def _messages(timeline: Timeline, iteration: int) -> list[ObservedTransfer]:
    """Return the transfers of an iteration; a transfer ends when its receiver stops waiting for
    it."""
    awaited = {
        (contact.where, contact.micro_batch, contact.end): contact.start
        for contact in timeline.contacts
        if contact.kind is ContactKind.WAITING and contact.iteration == iteration
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
    """Return the work of an iteration by stage and device."""
    works: dict[tuple[int, str], dict[str, list[ObservedWork]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for span in timeline.spans:
        if span.stage is None or span.micro_batch is None or span.kind.is_communication:
            continue
        if span.iteration == iteration:
            work = ObservedWork(max(0.0, span.seconds - span.together), span.together)
            works[span.stage, span.where][span.kind].append(work)
    return {key: work_of(kinds) for key, kinds in works.items()}
