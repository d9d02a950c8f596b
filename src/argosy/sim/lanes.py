"""Messages on links that do not change: which flows have their links to themselves, and how fast
the others are.

(1)  a flow that shares no link with any other takes its bytes over the bandwidth of its narrowest
     link
(2)  flows that share links, directly or not, form a crowd; their max-min fair rates depend on which
     of them are under way, and are found once for each such set
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
    """What one flow of a message needs."""

    links: tuple[int, ...]
    bytes: float
    latency: float
    """After its last byte has left."""


@dataclass(frozen=True, slots=True)
class LaneMessage:
    """Flows that begin together: a transfer between two bundles, or a collective."""

    lanes: tuple[Lane, ...]
    target: int = -1
    """The bundle that waits for it; -1 for a collective."""
    direction: int = 0
    """1 for a gradient."""


class LinkUsers:
    """The flows of all messages: which ones have their links to themselves, and which ones share
    them."""

    def __init__(self, messages: Sequence[LaneMessage], capacity: Sequence[float]) -> None:
        self.lanes = [lane for message in messages for lane in message.lanes]
        self.message_of = [number for number, message in enumerate(messages) for _ in message.lanes]
        self.first_flow = [
            *itertools.accumulate((len(message.lanes) for message in messages), initial=0)
        ]
        """Per message, the number of its first flow; the others follow."""
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
        """Per flow, its rate if no other ever uses its links; else 0."""
        self.is_alone = [
            all(self.alone[begin:end]) for begin, end in itertools.pairwise(self.first_flow)
        ]
        """Per message, whether it has all its links to itself."""
        self.crowds: dict[int, Crowd] = {}
        """Per other flow, those that it shares links with, directly or not."""
        for flow, rate in enumerate(self.alone):
            if not rate and flow not in self.crowds:
                crowd = Crowd(self.lanes, capacity)
                reached = [flow]
                while reached:
                    member = reached.pop()
                    if member not in self.crowds:
                        self.crowds[member] = crowd
                        reached += [
                            other for link in self.lanes[member].links for other in users[link]
                        ]

    def clear(self) -> None:
        """Take everything off the network."""
        for crowd in self.crowds.values():
            crowd.clear()


class Crowd:
    """Flows that share links: which are under way, at which rates, and when the first of them
    ends."""

    def __init__(self, lanes: Sequence[Lane], capacity: Sequence[float]) -> None:
        self.lanes = lanes
        self.capacity = dict(enumerate(capacity))
        self.rates: dict[int, list[tuple[int, float]]] = {}
        """Per set of flows under way, their rates."""
        self.version = 0
        """Counts refreshes, so that an end that was foreseen earlier is recognised as stale."""
        self.clear()

    def clear(self) -> None:
        self.under_way: dict[int, list[float]] = {}
        """Per flow: bytes left at a moment, that moment, the rate since, and the end that
        follows."""
        self.mask = 0
        self.is_changed = False

    def start(self, flow: int, now: float) -> None:
        self.under_way[flow] = [self.lanes[flow].bytes, now, 0.0, math.inf]
        self.mask |= 1 << flow

    def finish(self, flow: int) -> None:
        del self.under_way[flow]
        self.mask ^= 1 << flow

    def refresh(self, now: float) -> tuple[float, int]:
        """Find the rates from now on, and the first flow to end."""
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
