"""The batch engine: one task graph, many candidates and scenarios at once, no event queue.

The order on every device and channel is static, so an iteration is a longest-path recurrence over the tasks in number
order, evaluated for a whole vector of candidates per numpy call:

    (1)  start(i) = max over the tasks that i waits for
    (2)  a computation ends at the integral of its device's speed, a transfer's last byte leaves at the integral of its
         route's bandwidth: T(C(start) + amount), with T the inverse of the cumulative C (``Trace.knots``)
    (3)  a transfer is over one latency later; the next one on its channel starts when its last byte has left
    (4)  iteration = max over all tasks, and never less than any link needs for all the bytes that cross it

Every channel has its route to itself here; (4) is what contention costs at least. Where nothing is shared this is exact and
equals the exact engine; where something is, it ranks, and the exact engine judges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from argosy.cluster.topology import Cluster, Route
from argosy.cluster.trace import FloatArray, Trace
from argosy.errors import bad_input
from argosy.sim.graph import Task, TaskGraph


@dataclass(frozen=True)
class Amounts:
    """How much each task of a graph has to do, per candidate: row ``row[i]`` of ``values`` belongs to task i.

    Seconds for a computation, bytes for a transfer. Tasks that always cost the same share a row.
    """

    row: Sequence[int]
    values: FloatArray
    """(rows, candidates)."""

    @classmethod
    def of(cls, graph: TaskGraph) -> Amounts:
        """The amounts that the graph itself states: one candidate. Flows of a collective are equal or dominated by the
        largest."""
        values = [max((f.bytes for f in t.flows), default=0.0) if t.flows else t.seconds for t in graph.tasks]
        unique, row = np.unique(np.asarray(values), return_inverse=True)
        return cls(row.tolist(), unique[:, None])


def simulate_batch(graph: TaskGraph, clusters: Sequence[Cluster], amounts: Amounts | None = None) -> FloatArray:
    """(4) as an array (scenarios, candidates): seconds of one iteration from time 0. The scenarios are the same cluster
    under different traces."""
    amounts = amounts or Amounts.of(graph)
    if len(amounts.row) != len(graph.tasks):
        raise bad_input(f"a row for each of the {len(graph.tasks)} tasks", len(amounts.row), where="amounts")
    return np.stack([_evaluate(graph, cluster, amounts) for cluster in clusters])


def _evaluate(graph: TaskGraph, cluster: Cluster, amounts: Amounts) -> FloatArray:
    values = amounts.values
    over = np.empty((len(graph.tasks), values.shape[1]))
    left: dict[int, FloatArray] = {}
    routes = _Routes(graph, cluster)
    speeds = [cluster.device(name).speed for name in graph.devices]
    lagging = {task.behind for task in graph.tasks if task.behind is not None}
    for index, task in enumerate(graph.tasks):
        here = over[index]
        waits = [over[earlier] for earlier in task.after]
        if task.behind is not None:
            waits.append(left[task.behind])
        _latest(waits, here)
        amount = values[amounts.row[index]]
        if not task.kind.is_communication:
            _advance(speeds[task.device], here, amount)
            continue
        legs = routes.of(task)
        if len(legs) == 1:
            _advance(legs[0].bandwidth, here, amount)
        elif legs:
            ends = [_advance(leg.bandwidth, here.copy(), amount * leg.part) for leg in legs]
            np.maximum.reduce(ends, out=here)
        latency = max((leg.latency.at(0) for leg in legs), default=0.0) * task.rounds
        changing = [leg.latency for leg in legs if not leg.latency.is_constant]
        if index in lagging:
            left[index] = here.copy() if latency or changing else here
        if changing:
            here += task.rounds * np.maximum.reduce([_value_at(leg.latency, here) for leg in legs])
        elif latency:
            here += latency
    result: FloatArray = over.max(axis=0)
    for link, rows in routes.rows_on_shared_links(amounts).items():
        load = np.sum([values[row] * part for row, part in rows], axis=0)
        np.maximum(result, _advance(cluster.links[link].bandwidth, np.zeros_like(load), load), out=result)
    return result


def _latest(waits: list[FloatArray], out: FloatArray) -> None:
    """(1), into ``out``."""
    if not waits:
        out[:] = 0.0
    elif len(waits) == 1:
        out[:] = waits[0]
    else:
        np.maximum(waits[0], waits[1], out=out)
        for other in waits[2:]:
            np.maximum(out, other, out=out)


def _advance(trace: Trace, start: FloatArray, amount: FloatArray) -> FloatArray:
    """(2), in place."""
    if trace.is_constant:
        value = trace.values[0]
        if value == 1.0:
            start += amount
        elif value > 0:
            start += amount / value
        else:
            start[amount > 0] = np.inf
        return start
    times, done = trace.knots
    target = np.interp(start, times, done)
    target += amount
    if trace.always_positive:
        start[:] = np.interp(target, done, times)
        return start
    # Where the trace is 0 the inverse jumps: take the left end, the moment at which the amount was first reached.
    right = np.searchsorted(done, target, side="left")
    inside = np.minimum(right, len(done) - 1)
    before = np.maximum(inside - 1, 0)
    step = done[inside] - done[before]
    share = np.divide(target - done[before], step, out=np.zeros_like(target), where=step > 0)
    end = times[before] + share * (times[inside] - times[before])
    start[:] = np.where(amount <= 0, start, np.where(right == len(done), np.inf, end))
    return start


def _value_at(trace: Trace, time: FloatArray) -> FloatArray:
    index = np.searchsorted(np.asarray(trace.times), time, side="right") - 1
    return np.asarray(trace.values)[np.maximum(index, 0)]


@dataclass(frozen=True, slots=True)
class _Leg:
    """One flow of a task on the route it takes."""

    bandwidth: Trace
    latency: Trace
    part: float
    """Its bytes over those of the task's largest flow."""
    links: tuple[int, ...]


class _Routes:
    """Routes and their traces, found once per pair of devices."""

    def __init__(self, graph: TaskGraph, cluster: Cluster) -> None:
        self.graph = graph
        self.cluster = cluster
        self.legs: dict[tuple[int, int, float], _Leg] = {}

    def of(self, task: Task) -> list[_Leg]:
        largest = max((flow.bytes for flow in task.flows), default=0.0)
        return [self._leg(flow.source, flow.target, flow.bytes / largest if largest else 1.0) for flow in task.flows]

    def _leg(self, source: int, target: int, part: float) -> _Leg:
        key = (source, target, part)
        if key not in self.legs:
            one, other = self.graph.devices[source], self.graph.devices[target]
            route = self.cluster.fastest(one, other, 1e6)
            self.legs[key] = _Leg(self.cluster.bandwidth(route), self._latency(route), part, route.links)
        return self.legs[key]

    def _latency(self, route: Route) -> Trace:
        traces = [self.cluster.links[link].latency for link in route.links]
        knots = sorted({time for trace in traces for time in trace.times})
        sums = [sum(trace.at(time) for trace in traces) for time in knots]
        return Trace.from_steps(zip(knots, sums, strict=True), initial=sums[0])

    def rows_on_shared_links(self, amounts: Amounts) -> dict[int, list[tuple[int, float]]]:
        """Per link that several channels cross, the amounts that cross it."""
        users: dict[int, set[tuple[int, int]]] = defaultdict(set)
        rows: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for index, task in enumerate(self.graph.tasks):
            for flow, leg in zip(task.flows, self.of(task), strict=True):
                for link in leg.links:
                    users[link].add((flow.source, flow.target))
                    rows[link].append((amounts.row[index], leg.part))
        return {link: rows[link] for link, pairs in users.items() if len(pairs) > 1}
