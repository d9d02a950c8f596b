"""Compute the rates of messages on links that do not change.

(1)  A flow that shares no link with another flow takes its bytes over the bandwidth of its
     narrowest link.
(2)  Flows that share links, directly or through other flows, form a crowd; their max-min fair rates
     depend on which of them are under way, and are computed once for each such set.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from argosy.sim.engine.fairshare import max_min_rates


@dataclass(frozen=True, slots=True)
class Lane:
    """The needs of one flow of a message: it holds the links, the bytes and the latency."""

    links: tuple[int, ...]
    bytes: float
    latency: float
    """Seconds between the departure of the last byte and its arrival."""


@dataclass(frozen=True, slots=True)
class LaneMessage:
    """A transfer between two bundles, or a collective, whose flows are sent together."""

    lanes: tuple[Lane, ...]
    target: int = -1
    """The bundle that waits for the message; -1 for a collective."""
    direction: int = 0
    """0 for activations, 1 for gradients."""


class LinkUsers:
    """The flows of all messages, divided into those that share links and those that do not."""

    def __init__(self, messages: Sequence[LaneMessage], capacity: Sequence[float]) -> None:
        self.lanes = [lane for message in messages for lane in message.lanes]
        self.message_of = [number for number, message in enumerate(messages) for _ in message.lanes]
        self.first_flow = [
            *itertools.accumulate((len(message.lanes) for message in messages), initial=0)
        ]
        """Per message, the number of its first flow; its other flows follow."""
        users: dict[int, list[int]] = defaultdict(list)
        for flow, lane in enumerate(self.lanes):
            for link in lane.links:
                users[link].append(flow)
        self.alone = [
            min(capacity[link] for link in lane.links)
            if all(len(users[link]) == 1 for link in lane.links)
            else 0.0
            for lane in self.lanes
        ]
        """Per flow, its rate in bytes/s if no other flow ever uses its links; else 0."""
        self.is_alone = [
            all(self.alone[begin:end]) for begin, end in itertools.pairwise(self.first_flow)
        ]
        """Per message, whether no other message uses its links."""
        self.crowds: dict[int, Crowd] = {}
        """Per flow that shares links, the crowd that it belongs to (2)."""
        for flow, rate in enumerate(self.alone):
            if not rate and flow not in self.crowds:
                crowd = Crowd(self.lanes, capacity)
                reached = [flow]
                while reached:
                    member = reached.pop()
                    if member not in self.crowds:
                        self.crowds[member] = crowd
                        reached += [
                            neighbour
                            for link in self.lanes[member].links
                            for neighbour in users[link]
                        ]

    def clear(self) -> None:
        """Remove all flows from the network."""
        for crowd in self.crowds.values():
            crowd.clear()


class Crowd:
    """A set of flows that share links: it knows which are under way, their rates and the first
    end."""

    def __init__(self, lanes: Sequence[Lane], capacity: Sequence[float]) -> None:
        self.lanes = lanes
        self.capacity = dict(enumerate(capacity))
        self.rates: dict[int, list[tuple[int, float]]] = {}
        """Per set of flows under way (as a bit mask), each flow and its rate in bytes/s."""
        self.version = 0
        """The number of refreshes; an end that was predicted before the latest one is stale."""
        self.clear()

    def clear(self) -> None:
        """Remove all flows of the crowd."""
        self.under_way: dict[int, list[float]] = {}
        """Per flow: bytes left at some time, that time, the rate since then, and the resulting
        end."""
        self.mask = 0
        self.is_changed = False

    def start(self, flow: int, now: float) -> None:
        """Add a flow that starts ``now``."""
        self.under_way[flow] = [self.lanes[flow].bytes, now, 0.0, math.inf]
        self.mask |= 1 << flow

    def finish(self, flow: int) -> None:
        """Remove a flow that has ended."""
        del self.under_way[flow]
        self.mask ^= 1 << flow

    def refresh(self, now: float) -> tuple[float, int]:
        """Compute the rates from ``now`` on; return the time and the flow of the first end."""
        self.is_changed = False
        self.version += 1
        rates = self.rates.get(self.mask)
        if rates is None:
            flows = list(self.under_way)
            fair = (
                max_min_rates([self.lanes[flow].links for flow in flows], self.capacity)
                if flows
                else []
            )
            rates = self.rates[self.mask] = list(zip(flows, fair, strict=True))
        first, first_flow = math.inf, -1
        for flow, rate in rates:
            state = self.under_way[flow]
            if state[2] != rate:
                state[0] = max(state[0] - state[2] * (now - state[1]), 0.0)
                state[1], state[2] = now, rate
                state[3] = now + state[0] / rate if rate else math.inf
            if state[3] < first:
                first, first_flow = state[3], flow
        return first, first_flow
