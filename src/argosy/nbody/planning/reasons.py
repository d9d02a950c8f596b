"""Why a step of a gravity plan takes as long as it does, and what would make it shorter: questions
to the simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from argosy.cluster.topology import Cluster
from argosy.errors import InfeasibleError
from argosy.nbody.planning.plan import Domains, PricedDomains, StepPrices, plan_step
from argosy.nbody.planning.pricing import BoxWork
from argosy.sim.engine.exact import simulate_exact
from argosy.timeline import Timeline

_MORE = 2.0
"""How much faster devices and links become in a question."""


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A change of the cluster, with the box cut again for it."""

    change: str
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class StepReasons:
    """What a step consists of."""

    priced: PricedDomains
    timeline: Timeline
    slowest: str
    """The device that computes longest."""
    computing: float
    """Its seconds."""
    waiting: float
    """Seconds of the step during which it does not compute."""
    busiest_link: str | None
    link_share: float
    """Bytes of that link over what it could carry in the step."""
    improvements: tuple[Improvement, ...]


def explain_step(cluster: Cluster, box: BoxWork, domains: Domains) -> StepReasons:
    """One step with these domains; ``InfeasibleError`` if it does not end on this cluster."""
    prices = StepPrices(cluster, box)
    priced = prices.priced(domains)
    if math.isinf(priced.step_seconds):
        raise InfeasibleError(
            f"no step would end on {cluster.name}: the plan needs a device or link that is lost"
        )
    timeline = simulate_exact(prices.graph(domains), cluster)
    parts = zip(priced.tree_seconds, priced.pair_seconds, priced.mesh_seconds, strict=True)
    busy = [sum(part) for part in parts]
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
    shares = {
        link.name: sum(span.bytes for span in timeline.spans if link.name in span.via)
        / max(link.bandwidth.at(0.0) * timeline.end, 1.0)
        for link in cluster.links
    }
    name = max(shares, key=lambda name: shares[name], default=None)
    return (name, shares[name]) if name is not None and shares[name] > 0 else (None, 0.0)


def _improvements(cluster: Cluster, box: BoxWork) -> tuple[Improvement, ...]:
    """Every kind of device twice as fast, and all links twice as wide, each with the best cut for
    it."""
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
    found = [
        Improvement(change=what, step_seconds=plan_step(where, box).best.step_seconds)
        for what, where in changed
    ]
    return tuple(sorted(found, key=lambda improvement: improvement.step_seconds))
