"""The batch engine: one task graph, many candidates and scenarios at once, no event queue.

The order on every device and channel is static, so an iteration is a longest-path recurrence over the tasks in number
order, evaluated for a whole vector of candidates per numpy call:

    (1)  start(i) = max over the tasks that i waits for
    (2)  a computation ends at the integral of its device's speed, a transfer's last byte leaves at the integral of its
         route's bandwidth: T(C(start) + amount), with C and its inverse T from ``Trace.knots``
    (3)  each flow arrives its latency later; the next one on its channel starts when the last byte has left
    (4)  iteration = max over all tasks, and never less than any link needs for all the bytes that cross it

Every channel has its route to itself here; (4) is what contention costs at least. Where nothing is shared this is exact
and equals the exact engine; where something is, it ranks, and the exact engine judges.

Nearly all the time goes into looking up C and T. Neighbouring candidates that stand at neighbouring moments make that
three times faster, so the candidates are put in order of time again and again on the way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from argosy.cluster.topology import Cluster
from argosy.cluster.trace import FloatArray, Trace, total
from argosy.errors import bad_input
from argosy.sim.graph import Flow, TaskGraph

_CHUNK = 1024
"""Candidates per pass: vectors that stay in the processor's cache."""
_REORDER = 192
"""Tasks between two orderings of the candidates."""


@dataclass(frozen=True)
class Amounts:
    """How much each task of a graph has to do, per candidate: row ``row[i]`` of ``values`` belongs to task i.

    Seconds for a computation, bytes for a transfer, bytes of the largest flow for a collective. Tasks that always cost
    the same share a row.
    """

    row: Sequence[int]
    values: FloatArray
    """(rows, candidates)."""

    @classmethod
    def of(cls, graph: TaskGraph) -> Amounts:
        """The amounts that the graph itself states: one candidate."""
        values = [max(flow.bytes for flow in task.flows) if task.flows else task.seconds for task in graph.tasks]
        unique, row = np.unique(np.asarray(values), return_inverse=True)
        return cls(row.tolist(), unique[:, None])


def simulate_batch(graph: TaskGraph, clusters: Sequence[Cluster], amounts: Amounts | None = None) -> FloatArray:
    """(4) as an array (scenarios, candidates): seconds of one iteration from time 0. The scenarios are the same cluster
    under different traces."""
    amounts = amounts or Amounts.of(graph)
    if len(amounts.row) != len(graph.tasks):
        raise bad_input(f"a row for each of the {len(graph.tasks)} tasks", len(amounts.row), where="amounts")
    width = amounts.values.shape[1]
    results = np.empty((len(clusters), width))
    for scenario, cluster in enumerate(clusters):
        legs = _legs(graph, cluster)
        steps = _steps(graph, cluster, legs, amounts.row)
        for begin in range(0, width, _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            results[scenario, chunk] = _evaluate(steps, amounts.values[:, chunk])
        for link, load in _shared_loads(legs, amounts).items():
            needed = _advance(cluster.links[link].bandwidth, np.zeros(width), load)
            np.maximum(results[scenario], needed, out=results[scenario])
    return results


class _Leg(NamedTuple):
    """One flow of a task on the route it takes."""

    bandwidth: Trace
    latency: Trace
    links: tuple[int, ...]
    ends: tuple[int, int]
    """The two devices."""
    part: float
    """Its bytes over those of the task's largest flow."""


class _Step(NamedTuple):
    """A task with everything that does not depend on the candidate looked up. A *slot* is a vector of moments: when a
    task is over, and, where latency makes it differ, when its last byte has left."""

    waits: list[int]
    """Slots; first one that nobody needs afterwards, if there is one."""
    reuses: bool
    """Whether the result may overwrite the first of ``waits``."""
    over: int
    left: int
    """Equal to ``over`` without latency."""
    row: int
    trace: Trace | None
    """What the amount is advanced along; None: see ``legs``."""
    legs: tuple[_Leg, ...]
    """Of a collective, all its flows, of which the latest counts; of anything with latency, its flows."""
    rounds: int
    dies: list[int]
    """Slots that nobody needs after this step, the overwritten one excepted."""
    is_last: bool
    """Whether no task waits for this one."""


def _steps(graph: TaskGraph, cluster: Cluster, legs: list[tuple[_Leg, ...]], row: Sequence[int]) -> list[_Step]:
    speeds = [cluster.device(name).speed for name in graph.devices]
    delayed = [any(leg.latency.values != (0.0,) for leg in flows) for flows in legs]
    waits = []
    last_use: dict[int, int] = {}
    for index, task in enumerate(graph.tasks):
        slots = [2 * earlier for earlier in task.after]
        if task.behind is not None:
            slots.append(2 * task.behind + delayed[task.behind])
        for slot in slots:
            last_use[slot] = index
        waits.append(slots)
    steps = []
    for index, (task, slots) in enumerate(zip(graph.tasks, waits, strict=True)):
        dying = [slot for slot in slots if last_use[slot] == index]
        over, left = 2 * index, 2 * index + delayed[index]
        unused = [slot for slot in {over, left} if slot not in last_use]
        trace = speeds[task.device] if task.device >= 0 else legs[index][0].bandwidth if len(legs[index]) == 1 else None
        steps.append(
            _Step(
                [*dying, *(slot for slot in slots if slot not in dying)] if dying else slots,
                bool(dying),
                over,
                left,
                row[index],
                trace,
                legs[index],
                task.rounds,
                dying[1:] + unused,
                over not in last_use,
            )
        )
    return steps


def _evaluate(steps: list[_Step], values: FloatArray) -> FloatArray:
    """(1) to (3), and the maximum of (4)."""
    width = values.shape[1]
    order = np.arange(width)
    result = np.zeros(width)
    slots: dict[int, FloatArray] = {}
    pool: list[FloatArray] = []
    for number, step in enumerate(steps):
        if step.reuses:
            here = slots.pop(step.waits[0])
        else:
            here = pool.pop() if pool else np.empty(width)
            here[:] = slots[step.waits[0]] if step.waits else 0.0
        for slot in step.waits[1:]:
            np.maximum(here, slots[slot], out=here)
        if step.trace is not None:
            _advance(step.trace, here, values[step.row])
        elif step.legs:
            ends = [_advance(leg.bandwidth, here.copy(), values[step.row] * leg.part) for leg in step.legs]
            np.maximum.reduce(ends, out=here)
        if step.left != step.over:
            slots[step.left] = here
            here = _arrival(step, ends if step.trace is None else [here])
        slots[step.over] = here
        if step.is_last:
            np.maximum(result, here, out=result)
        for slot in step.dies:
            pool.append(slots.pop(slot))
        if number % _REORDER == _REORDER - 1 and width > 1:
            by_time = np.argsort(here)
            order, result, values = order[by_time], result[by_time], values[:, by_time]
            slots = {slot: moments[by_time] for slot, moments in slots.items()}
    ordered = np.empty(width)
    ordered[order] = result
    return ordered


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
    if not trace.always_positive:
        return _advance_over_gaps(trace, start, amount)
    times, done = trace.knots
    target = np.interp(start, times, done, right=np.inf)
    target += amount
    start[:] = np.interp(target, done, times, right=np.inf)
    return start


def _advance_over_gaps(trace: Trace, start: FloatArray, amount: FloatArray) -> FloatArray:
    """(2) where the trace is sometimes 0 and T jumps: take the moment at which the amount was first reached."""
    times, done = trace.knots
    target = np.interp(start, times, done) + amount
    right = np.searchsorted(done, target, side="left")
    inside = np.minimum(right, len(done) - 1)
    before = np.maximum(inside - 1, 0)
    value = np.asarray(trace.values)[before]
    end = times[before] + np.divide(target - done[before], value, out=np.zeros_like(target), where=value > 0)
    never = (right == len(done)) | np.isinf(start)
    start[:] = np.where(amount <= 0, start, np.where(never, np.inf, end))
    return start


def _arrival(step: _Step, ends: list[FloatArray]) -> FloatArray:
    """(3): when the last of several flows arrives, each after the latency at the moment at which it ends."""
    latest = np.zeros_like(ends[0])
    for leg, end in zip(step.legs, ends, strict=True):
        trace = leg.latency
        index = np.searchsorted(np.asarray(trace.times), end, side="right") - 1
        np.maximum(latest, end + step.rounds * np.asarray(trace.values)[np.maximum(index, 0)], out=latest)
    return latest


def _legs(graph: TaskGraph, cluster: Cluster) -> list[tuple[_Leg, ...]]:
    """Per task, its flows on their routes."""
    whole: dict[tuple[int, int], _Leg] = {}
    known: dict[tuple[Flow, ...], tuple[_Leg, ...]] = {}

    def find(flow: Flow, largest: float) -> _Leg:
        ends = (flow.source, flow.target)
        if ends not in whole:
            route = cluster.fastest(graph.devices[flow.source], graph.devices[flow.target], 1e6)
            latency = total(cluster.links[link].latency for link in route.links)
            whole[ends] = _Leg(cluster.bandwidth(route), latency, route.links, ends, 1.0)
        return whole[ends] if flow.bytes == largest else whole[ends]._replace(part=flow.bytes / largest)

    for task in graph.tasks:
        if task.flows not in known:
            largest = max((flow.bytes for flow in task.flows), default=0.0)
            known[task.flows] = tuple(find(flow, largest) for flow in task.flows)
    return [known[task.flows] for task in graph.tasks]


def _shared_loads(legs: list[tuple[_Leg, ...]], amounts: Amounts) -> dict[int, FloatArray]:
    """Per link that several channels cross, all the bytes that cross it."""
    users: dict[int, set[tuple[int, int]]] = defaultdict(set)
    weight: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for flows, row in zip(legs, amounts.row, strict=True):
        for leg in flows:
            for link in leg.links:
                users[link].add(leg.ends)
                weight[link][row] += leg.part
    shared = {link: weight[link] for link, pairs in users.items() if len(pairs) > 1}
    zero = np.zeros(amounts.values.shape[1])
    return {link: sum((amounts.values[r] * part for r, part in rows.items()), zero) for link, rows in shared.items()}
