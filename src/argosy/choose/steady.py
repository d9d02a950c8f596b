"""Compute the seconds of an iteration in many constant states of the network at once.

A task graph has a static order, so its time is a longest path; with every rate constant it is a
recurrence over the tasks, evaluated for a whole vector of states per numpy call:

    (1)  over(i) = max(over of the tasks that i waits for, left of the task it queues behind) +
         amount(i) / rate(i) + latency(i)
    (2)  T = max over tasks of over(i), and never less than any shared link needs for all its bytes

Every channel has its route to itself here, so T is a lower bound if links are shared. Together with
(1), the derivative of the path by the seconds per byte x of one edge is computed; it turns T into a
piece of a convex function:

    (3)  T(x) = max over paths of (a + c x)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from argosy.cluster.topology import Cluster
from argosy.cluster.trace import FloatArray
from argosy.sim.engine.graph import TaskGraph


class _Leg(NamedTuple):
    links: tuple[int, ...]
    bytes: float
    latency: float


class _Row(NamedTuple):
    after: tuple[int, ...]
    behind: int
    device: int
    seconds: float
    legs: tuple[_Leg, ...]


class SteadyNetwork(NamedTuple):
    """The states that are evaluated side by side: seconds per byte of every link, and seconds per
    second of work of every device."""

    inverse: FloatArray
    """Array (links, states)."""
    slow: FloatArray
    """Array (devices of the graph, states)."""


class SteadyGraph:
    """A task graph that has its routes resolved, for repeated evaluation."""

    def __init__(self, graph: TaskGraph, cluster: Cluster) -> None:
        self.graph = graph
        self.cluster = graph.on(cluster)
        self.rows = [self._row(index) for index in range(len(graph.tasks))]
        self.shared = self._shared_loads()

    def _row(self, index: int) -> _Row:
        task = self.graph.tasks[index]
        legs = []
        for flow in task.flows:
            route = self.cluster.fastest(*self.graph.ends(flow, self.cluster), 1e6)
            legs.append(_Leg(route.links, flow.bytes, task.rounds * self.cluster.latency(route)))
        behind = -1 if task.behind is None else task.behind
        return _Row(task.after, behind, task.device, task.seconds, tuple(legs))

    def _shared_loads(self) -> dict[int, float]:
        """Return the bytes over every link that several pairs of devices use."""
        pairs: dict[int, set[tuple[int, int]]] = defaultdict(set)
        loads: dict[int, float] = defaultdict(float)
        for task, row in zip(self.graph.tasks, self.rows, strict=True):
            for flow, leg in zip(task.flows, row.legs, strict=True):
                for link in leg.links:
                    pairs[link].add((flow.source, flow.target))
                    loads[link] += flow.bytes
        return {link: load for link, load in loads.items() if len(pairs[link]) > 1}

    def at(self, times: Sequence[float]) -> SteadyNetwork:
        """Return the states of the cluster's own traces at these moments."""
        with np.errstate(divide="ignore"):
            inverse = 1 / np.array(
                [[link.bandwidth.at(time) for time in times] for link in self.cluster.links]
            )
            speeds = [self.cluster.device(name).speed for name in self.graph.devices]
            slow = 1 / np.array([[speed.at(time) for time in times] for speed in speeds])
        return SteadyNetwork(inverse.reshape(len(self.cluster.links), -1), slow)

    def seconds(self, network: SteadyNetwork) -> FloatArray:
        """Return the seconds of an iteration in each state (2)."""
        return self._run(network, None)[0]

    def lines(self, network: SteadyNetwork, links: frozenset[int]) -> tuple[FloatArray, FloatArray]:
        """Return for each state T, and c for the seconds per byte that ``links`` have in common
        (3)."""
        return self._run(network, links)

    def _run(
        self, network: SteadyNetwork, links: frozenset[int] | None
    ) -> tuple[FloatArray, FloatArray]:
        """Evaluate the recurrence over the tasks (1), with or without the derivative."""
        width = network.inverse.shape[1]
        zero = np.zeros(width)
        over: list[tuple[FloatArray, FloatArray]] = []
        left: list[tuple[FloatArray, FloatArray]] = []
        known: dict[_Leg, tuple[FloatArray, FloatArray]] = {}
        worst = (zero, zero)
        for row in self.rows:
            here = (zero, zero)
            for earlier in row.after:
                here = _later(here, over[earlier], links)
            if row.behind >= 0:
                here = _later(here, left[row.behind], links)
            if row.legs:
                sent = [
                    (_plus(here, self._leg(leg, network, links, known), links), leg)
                    for leg in row.legs
                ]
                gone, done = sent[0][0], _delayed(*sent[0])
                for end, leg in sent[1:]:
                    gone, done = _later(gone, end, links), _later(done, _delayed(end, leg), links)
            else:
                work = row.seconds * network.slow[row.device] if row.seconds else zero
                gone = done = (here[0] + work, here[1])
            over.append(done)
            left.append(gone)
            worst = _later(worst, done, links)
        for link, load in self.shared.items():
            needed = (
                load * network.inverse[link],
                np.full(width, load if links and link in links else 0.0),
            )
            worst = _later(worst, needed, links)
        return worst

    def _leg(
        self,
        leg: _Leg,
        network: SteadyNetwork,
        links: frozenset[int] | None,
        known: dict[_Leg, tuple[FloatArray, FloatArray]],
    ) -> tuple[FloatArray, FloatArray]:
        if leg not in known:
            inverse = network.inverse[list(leg.links)]
            slowest = inverse.max(axis=0)
            slope = np.zeros_like(slowest)
            if links is not None and any(link in links for link in leg.links):
                own = network.inverse[[link for link in leg.links if link in links]].max(axis=0)
                slope = np.where(own >= slowest, leg.bytes, 0.0)
            seconds = leg.bytes * slowest if leg.bytes else np.zeros_like(slowest)
            known[leg] = (seconds, slope)
        return known[leg]


def _later(
    left: tuple[FloatArray, FloatArray],
    right: tuple[FloatArray, FloatArray],
    links: frozenset[int] | None,
) -> tuple[FloatArray, FloatArray]:
    if links is None:
        return np.maximum(left[0], right[0]), left[1]
    first = left[0] >= right[0]
    return np.where(first, left[0], right[0]), np.where(first, left[1], right[1])


def _plus(
    start: tuple[FloatArray, FloatArray],
    more: tuple[FloatArray, FloatArray],
    links: frozenset[int] | None,
) -> tuple[FloatArray, FloatArray]:
    return start[0] + more[0], start[1] if links is None else start[1] + more[1]


def _delayed(end: tuple[FloatArray, FloatArray], leg: _Leg) -> tuple[FloatArray, FloatArray]:
    return (end[0] + leg.latency, end[1]) if leg.latency else end
