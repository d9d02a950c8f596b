"""Keep the state of the network during a simulation: flows under way, their rates and routes.

Rates are max-min fair over all links and hold until a flow starts or ends or a link's bandwidth
changes; in between every flow drains linearly, so its end is known exactly. Only the part of the
network that a change can reach is computed again; if bandwidths change often, rates are computed
for many changes at once (``foresight``). Edges in conflict never carry bytes at the same time: a
flow that would break this waits, and no later flow that needs the same edges overtakes it.
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
    """A flow that has been requested and has not ended."""

    number: int
    routes: tuple[Route, ...]
    bytes: float
    owner: object
    """The value by which the caller recognises the flow when it ends."""
    started: float = math.inf
    """The time at which its first byte left; infinity while it waits for a conflicting edge."""
    route: Route | None = None
    remaining: float = 0.0
    rate: float = 0.0
    settled: float = 0.0
    """The time for which ``remaining`` holds."""
    version: int = 0
    """The number of changes of the rate; an end that was predicted before the latest one is
    stale."""
    foresight: Foresight | None = None
    """The rates after ``settled``, if they change often."""
    column: int = 0
    """The column of this flow in its foresight."""


Schedule = Callable[[float, ActiveFlow, int], None]
"""A callback for (time, flow, version): the flow ends at that time unless its version changes."""


class Network:
    """The flows that are under way on a cluster, and those that wait."""

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
            conflict
            for waiting_flow in self.waiting
            for conflict in self._conflicts_of(waiting_flow.routes)
        }
        if not reserved.isdisjoint(self._conflicts_of(routes)) or not self._start(flow, now):
            self.waiting.append(flow)
        return flow

    def finish(self, flow: ActiveFlow, now: float) -> None:
        """Remove a flow from the network, and start the flows that waited for it."""
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
        """Mark a link whose bandwidth has changed, or whose predicted rates have ended."""
        if self.next_knot.get(link) != now:
            return  # a later prediction replaced this event
        del self.next_knot[link]
        if self.on_link.get(link):
            self.dirty.add(link)

    def refresh(self, now: float) -> None:
        """Compute the rates again for the part of the network that has changed."""
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
        """Predict the rates for about twice as long as the first of these flows lasts.

        Returns None if the rates hardly change.
        """
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
        """Return the flows that have started, in the order of their requests."""
        flows = {
            number: flow
            for flows_there in self.on_link.values()
            for number, flow in flows_there.items()
        }
        return [flows[number] for number in sorted(flows)]

    def is_foreseen(self) -> bool:
        """Return whether the rates of flows under way are predicted over many changes."""
        return any(
            flow.foresight is not None
            for flows_there in self.on_link.values()
            for flow in flows_there.values()
        )

    def carried_until(self, now: float) -> list[float]:
        """Return the bytes that crossed each link up to ``now``; no rate may have changed since
        then."""
        carried = [*self.carried]
        for flow in self.under_way():
            for link in _links(flow):
                carried[link] += flow.rate * (now - flow.settled)
        return carried

    def shift(self, seconds: float, carried: Sequence[float]) -> None:
        """Move everything ``seconds`` later, after ``carried`` more bytes over each link."""
        for flow in self.under_way():
            flow.started += seconds
            flow.settled += seconds
        self.carried = [before + added for before, added in zip(self.carried, carried, strict=True)]

    def _start(self, flow: ActiveFlow, now: float) -> bool:
        """Start a flow on its best route; return False if conflicts block all routes."""
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
        """Return the route with the earliest end at the present load, among those that no conflict
        blocks."""
        free = [route for route in flow.routes if not self._is_blocked(route)]
        if len(free) < 2:
            return free[0] if free else None

        def foreseen(route: Route) -> float:
            """Return the seconds of the flow over a route at the present load."""
            share = min(
                self.cluster.links[link].bandwidth.at(now) / (len(self.on_link.get(link, ())) + 1)
                for link in route.links
            )
            return flow.bytes / share + self.cluster.latency(route, now) if share else math.inf

        return min(free, key=foreseen)

    def _is_blocked(self, route: Route) -> bool:
        """Return whether an edge in conflict with a route carries bytes."""
        if not self.sides:
            return False
        own_sides = {place for link in route.links for place in self.sides.get(link, ())}
        return any(
            count and side != own
            for conflict, own in own_sides
            for side, count in enumerate(self.active[conflict])
        )

    def _conflicts_of(self, routes: Iterable[Route]) -> set[int]:
        """Return the conflicts that any of the routes takes part in."""
        if not self.sides:
            return set()
        return {
            conflict
            for route in routes
            for link in route.links
            for conflict, _ in self.sides.get(link, ())
        }

    def _start_waiting(self, now: float) -> None:
        """Start the waiting flows that no conflict blocks, in the order of their requests."""
        still: list[ActiveFlow] = []
        reserved: set[int] = set()
        for flow in self.waiting:
            wanted = self._conflicts_of(flow.routes)
            if not reserved.isdisjoint(wanted) or not self._start(flow, now):
                reserved |= wanted
                still.append(flow)
        self.waiting = still

    def _moved(self, flow: ActiveFlow, now: float) -> float:
        """Return the bytes that a flow has moved since ``flow.settled``."""
        if flow.foresight is None:
            return flow.rate * (now - flow.settled)
        return flow.foresight.bytes_until(flow.column, now)

    def _settle(self, flow: ActiveFlow, now: float) -> None:
        """Account for the bytes that a flow has moved until ``now``."""
        moved = min(self._moved(flow, now), flow.remaining)
        flow.remaining -= moved
        flow.settled = now
        for link in _links(flow):
            self.carried[link] += moved

    def _component(self, seeds: Iterable[int]) -> tuple[list[int], list[ActiveFlow]]:
        """Return the links and flows that a change of ``seeds`` can reach, in a reproducible
        order."""
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
                    stack.extend(neighbour for neighbour in _links(flow) if neighbour not in links)
        return sorted(links), [flows[number] for number in sorted(flows)]

    def _watch(self, link: int, now: float, foresight: Foresight | None) -> None:
        """Schedule the next computation of a link's rates: at its next knot, or when predicted
        rates end."""
        trace = self.cluster.links[link].bandwidth
        if trace.is_constant:
            return
        knot = trace.next_change(now) if foresight is None else foresight.end
        if knot < math.inf and self.next_knot.get(link) != knot:
            self.next_knot[link] = knot
            self.foresee_change(knot, link)


def _links(flow: ActiveFlow) -> tuple[int, ...]:
    """Return the links of a flow that has started."""
    assert flow.route is not None
    return flow.route.links
