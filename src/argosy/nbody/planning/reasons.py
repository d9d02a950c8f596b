"""Explain by simulation why a step of a gravity plan takes as long as it does, and what would
help."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from argosy.cluster.topology import Cluster
from argosy.errors import InfeasibleError
from argosy.nbody.planning.plan import Domains, PricedDomains, StepPrices, plan_step
from argosy.nbody.planning.pricing import BoxWork
from argosy.sim.engine.exact import simulate_exact
from argosy.timeline import Timeline

# The factor by which devices and links become faster in an improvement.
_MORE = 2.0


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A change of the cluster, with the step time after the box is cut again."""

    change: str
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class StepReasons:
    """The parts that a step consists of, and what would shorten it."""

    priced: PricedDomains
    timeline: Timeline
    slowest: str
    """The device that computes longest."""
    computing: float
    """The seconds in which the slowest device computes."""
    waiting: float
    """The seconds of the step in which the slowest device does not compute."""
    busiest_link: str | None
    link_share: float
    """The bytes of the busiest link over its capacity in the step."""
    improvements: tuple[Improvement, ...]


def explain_step(cluster: Cluster, box: BoxWork, domains: Domains) -> StepReasons:
    """Explain one step with these domains.

    Raises ``InfeasibleError`` if it does not end on this cluster.
    """
    prices = StepPrices.of(cluster, box, domains)
    priced = prices.priced(domains)
    if math.isinf(priced.step_seconds):
        raise InfeasibleError(
            f"no step would end on {cluster.name}: the plan needs a device or link that is lost"
        )
    timeline = simulate_exact(prices.graph(domains), cluster)
    busy = priced.busy_seconds
    link, share = _busiest_link(cluster, timeline)
    return StepReasons(
        priced=priced,
        timeline=timeline,
        slowest=cluster.devices[busy.index(max(busy))].name,
        computing=max(busy),
        waiting=max(priced.step_seconds - max(busy), 0.0),
        busiest_link=link,
        link_share=share,
        improvements=_improvements(cluster, box),
    )


def _busiest_link(cluster: Cluster, timeline: Timeline) -> tuple[str | None, float]:
    """Return the busiest link and the share of its capacity that is used."""
    shares = {
        link.name: sum(span.bytes for span in timeline.spans if link.name in span.via)
        / max(link.bandwidth.at(0.0) * timeline.end, 1.0)
        for link in cluster.links
    }
    name = max(shares, key=lambda name: shares[name], default=None)
    return (name, shares[name]) if name is not None and shares[name] > 0 else (None, 0.0)


def _improvements(cluster: Cluster, box: BoxWork) -> tuple[Improvement, ...]:
    """Return the step times with every device kind twice as fast, and with all links twice as wide.

    The box is cut again for each.
    """
    changed = []
    for kind in {device.kind.name: 0 for device in cluster.devices}:
        devices = tuple(
            replace(device, efficiency=_MORE * device.efficiency)
            if device.kind.name == kind
            else device
            for device in cluster.devices
        )
        changed.append((f"every {kind} twice as fast", replace(cluster, devices=devices)))
    links = tuple(replace(link, bandwidth=link.bandwidth.scaled(_MORE)) for link in cluster.links)
    if links:
        changed.append(("every link twice as wide", replace(cluster, links=links)))
    improvements = [
        Improvement(change=change, step_seconds=plan_step(changed_cluster, box).best.step_seconds)
        for change, changed_cluster in changed
    ]
    return tuple(sorted(improvements, key=lambda improvement: improvement.step_seconds))
