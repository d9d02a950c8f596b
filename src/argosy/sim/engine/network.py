"""The network in mid-simulation: which flows are under way, at which rate, over which route.

Rates are max-min fair over all links and hold until a flow starts or ends or a link's bandwidth
changes; between such moments every flow drains linearly, so its end is known exactly. Only the part
of the network that a change can reach is computed again; if bandwidths change often, rates are
computed for many changes at once (``foresight``). Edges in conflict never carry bytes together: a
flow that would break this waits, and nothing that needs the same edges overtakes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from argosy.cluster.topology import Cluster, Route
from argosy.sim.engine.fairshare import max_min_rates
from argosy.sim.engine.foresight import Foresight, foresee


@dataclass(slots=True, eq=False)
class ActiveFlow:
    """A flow that has been asked for and is not done."""

    number: int
    routes: tuple[Route, ...]
    bytes: float
    owner: object
    """Whom to tell when it is done."""
    started: float = math.inf
    """When its first byte left; infinity while it waits for a conflicting edge."""
    route: Route | None = None
    remaining: float = 0.0
    rate: float = 0.0
    settled: float = 0.0
    """The moment for which ``remaining`` holds."""
    version: int = 0
    """Counts changes of the rate, so that an end foreseen earlier is recognised as stale."""
    foresight: Foresight | None = None
    """How its rate changes after ``settled``, if it changes often."""
    column: int = 0
    """Of this flow in its foresight."""


Schedule = Callable[[float, ActiveFlow, int], None]
"""Told that a flow of a version will end at a time."""


class Network:
    """All flows under way on a cluster."""

    def __init__(
        self, cluster: Cluster, foresee_end: Schedule, foresee_change: Callable[[float, int], None]
    ) -> None:
        self.cluster = cluster
        self.foresee_end = foresee_end
        self.foresee_change = foresee_change
        self.on_link: dict[int, dict[int, ActiveFlow]] = {}
        """Per link in use, its flows by number."""
        self.waiting: list[ActiveFlow] = []
        self.dirty: set[int] = set()
        self.next_knot: dict[int, float] = {}
        self.carried = [0.0] * len(cluster.links)
        """Bytes that crossed each link, integrated from the rates."""
        self.started = 0
        self.sides: dict[int, list[tuple[int, int]]] = {}
        """Per link, the (conflict, side) pairs that it belongs to."""
        self.active = [[0] * len(conflict) for conflict in cluster.conflicts]
        for conflict_index, conflict in enumerate(cluster.conflicts):
            for side_index, side in enumerate(conflict):
                for link in side:
                    self.sides.setdefault(link, []).append((conflict_index, side_index))

    def request(
        self, routes: tuple[Route, ...], num_bytes: float, now: float, owner: object
    ) -> ActiveFlow:
        """Start a flow as soon as no conflict forbids it."""
        flow = ActiveFlow(self.started, routes, num_bytes, owner)
        self.started += 1
        reserved = {
            conflict for other in self.waiting for conflict in self._conflicts_of(other.routes)
        }
        if not reserved.isdisjoint(self._conflicts_of(routes)) or not self._start(flow, now):
            self.waiting.append(flow)
        return flow

    def finish(self, flow: ActiveFlow, now: float) -> None:
        """Take a flow off the network, and let those start that waited for it."""
        assert flow.route is not None
        self._settle(flow, now)
        for link in flow.route.links:
            del self.on_link[link][flow.number]
            for conflict, side in self.sides.get(link, ()):
                self.active[conflict][side] -= 1
        self.dirty.update(flow.route.links)
        if self.waiting:
            self._start_waiting(now)

    def change(self, link: int, now: float) -> None:
        """A link's bandwidth has changed, or what was foreseen of it has come to its end."""
        if self.next_knot.get(link) != now:
            return  # something else was foreseen since
        del self.next_knot[link]
        if self.on_link.get(link):
            self.dirty.add(link)

    def refresh(self, now: float) -> None:
        """Compute the rates again where something has changed."""
        links, flows = self._component(self.dirty)
        self.dirty.clear()
        capacity = {link: self.cluster.links[link].bandwidth.at(now) for link in links}
        rates = max_min_rates([_links(flow) for flow in flows], capacity) if flows else []
        foresight = self._foresee(links, flows, rates, now)
        for link in links:
            self._watch(link, now, foresight)
        for column, (flow, rate) in enumerate(zip(flows, rates, strict=True)):
            if rate == flow.rate and flow.version and foresight is flow.foresight:
                continue
            self._settle(flow, now)
            flow.rate, flow.foresight, flow.column = rate, foresight, column
            flow.version += 1
            end = math.inf
            if foresight is not None:
                end = foresight.end_of(column, flow.remaining)
            elif rate > 0:
                end = now + flow.remaining / rate
            if end < math.inf:
                self.foresee_end(end, flow, flow.version)

    def _foresee(
        self, links: Sequence[int], flows: Sequence[ActiveFlow], rates: Sequence[float], now: float
    ) -> Foresight | None:
        """The rates for about twice as long as the first of these flows lasts; None if they hardly
        change."""
        bandwidths = {link: self.cluster.links[link].bandwidth for link in links}
        if all(trace.is_constant for trace in bandwidths.values()):
            return None
        lasting = [
            (flow.remaining - self._moved(flow, now)) / rate
            for flow, rate in zip(flows, rates, strict=True)
            if rate
        ]
        until = now + 2 * min(lasting, default=math.inf)
        return foresee([_links(flow) for flow in flows], bandwidths, now, until)

    def under_way(self) -> list[ActiveFlow]:
        """The flows that have started, in the order of their requests."""
        flows = {number: flow for there in self.on_link.values() for number, flow in there.items()}
        return [flows[number] for number in sorted(flows)]

    def is_foreseen(self) -> bool:
        """Whether rates of flows under way are known over many changes."""
        return any(
            flow.foresight is not None for there in self.on_link.values() for flow in there.values()
        )

    def carried_until(self, now: float) -> list[float]:
        """Bytes that crossed each link up to a time since which no rate has changed."""
        carried = [*self.carried]
        for flow in self.under_way():
            for link in _links(flow):
                carried[link] += flow.rate * (now - flow.settled)
        return carried

    def shift(self, seconds: float, carried: Sequence[float]) -> None:
        """Everything as it is, so much later, after so many more bytes over each link."""
        for flow in self.under_way():
            flow.started += seconds
            flow.settled += seconds
        self.carried = [before + more for before, more in zip(self.carried, carried, strict=True)]

    def _start(self, flow: ActiveFlow, now: float) -> bool:
        route = self._choose(flow, now)
        if route is None:
            return False
        flow.route, flow.started, flow.settled, flow.remaining = route, now, now, flow.bytes
        for link in route.links:
            self.on_link.setdefault(link, {})[flow.number] = flow
            for conflict, side in self.sides.get(link, ()):
                self.active[conflict][side] += 1
        self.dirty.update(route.links)
        return True

    def _choose(self, flow: ActiveFlow, now: float) -> Route | None:
        """Of the routes that no conflict forbids now, the one with the earliest end at today's
        load."""
        free = [route for route in flow.routes if not self._is_blocked(route)]
        if len(free) < 2:
            return free[0] if free else None

        def foreseen(route: Route) -> float:
            share = min(
                self.cluster.links[link].bandwidth.at(now) / (len(self.on_link.get(link, ())) + 1)
                for link in route.links
            )
            return flow.bytes / share + self.cluster.latency(route, now) if share else math.inf

        return min(free, key=foreseen)

    def _is_blocked(self, route: Route) -> bool:
        if not self.sides:
            return False
        mine = {place for link in route.links for place in self.sides.get(link, ())}
        return any(
            count and side != own
            for conflict, own in mine
            for side, count in enumerate(self.active[conflict])
        )

    def _conflicts_of(self, routes: Iterable[Route]) -> set[int]:
        if not self.sides:
            return set()
        return {
            conflict
            for route in routes
            for link in route.links
            for conflict, _ in self.sides.get(link, ())
        }

    def _start_waiting(self, now: float) -> None:
        still: list[ActiveFlow] = []
        reserved: set[int] = set()
        for flow in self.waiting:
            wanted = self._conflicts_of(flow.routes)
            if not reserved.isdisjoint(wanted) or not self._start(flow, now):
                reserved |= wanted
                still.append(flow)
        self.waiting = still

    def _moved(self, flow: ActiveFlow, now: float) -> float:
        """Bytes since ``flow.settled``."""
        if flow.foresight is None:
            return flow.rate * (now - flow.settled)
        return flow.foresight.bytes_until(flow.column, now)

    def _settle(self, flow: ActiveFlow, now: float) -> None:
        moved = min(self._moved(flow, now), flow.remaining)
        flow.remaining -= moved
        flow.settled = now
        for link in _links(flow):
            self.carried[link] += moved

    def _component(self, seeds: Iterable[int]) -> tuple[list[int], list[ActiveFlow]]:
        """The links and flows that a change of ``seeds`` can reach, in a reproducible order."""
        links: dict[int, None] = {}
        flows: dict[int, ActiveFlow] = {}
        stack = sorted(link for link in seeds if self.on_link.get(link))
        while stack:
            link = stack.pop()
            if link in links:
                continue
            links[link] = None
            for number, flow in self.on_link[link].items():
                if number not in flows:
                    flows[number] = flow
                    stack.extend(other for other in _links(flow) if other not in links)
        return sorted(links), [flows[number] for number in sorted(flows)]

    def _watch(self, link: int, now: float, foresight: Foresight | None) -> None:
        """Compute this link's rates again at its next knot, or at the end of what is foreseen."""
        trace = self.cluster.links[link].bandwidth
        if trace.is_constant:
            return
        knot = trace.next_change(now) if foresight is None else foresight.end
        if knot < math.inf and self.next_knot.get(link) != knot:
            self.next_knot[link] = knot
            self.foresee_change(knot, link)


def _links(flow: ActiveFlow) -> tuple[int, ...]:
    assert flow.route is not None
    return flow.route.links
