"""Two plain engines for the pipeline case: an event heap in Python, and SimPy. Written for speed
within their means."""

from __future__ import annotations

import bisect
import heapq
from collections import deque

import simpy

from argosy.schedule import ActionKind
from benchmarks.pipeline_case import Case

Knots = tuple[list[float], list[float], list[float]]
"""Times, cumulative bytes, bandwidths of one link."""


def link_knots(case: Case) -> list[Knots]:
    knots = []
    for link in case.cluster.links:
        times, done = link.bandwidth.knots
        knots.append((times.tolist(), done.tolist(), list(link.bandwidth.values)))
    return knots


def transfer_end(knots: Knots, start: float, size: float) -> float:
    """When ``size`` bytes that start at ``start`` have left, on a link to itself."""
    times, done, values = knots
    at = bisect.bisect_right(times, start) - 1
    target = done[at] + (start - times[at]) * values[at] + size
    to = max(bisect.bisect_left(done, target, at) - 1, at)
    return times[to] + (target - done[to]) / values[to]


def order_of(case: Case) -> list[list[tuple[bool, int]]]:
    """Per stage, (is it a forward, micro-batch)."""
    return [
        [(a.kind is ActionKind.FORWARD, a.micro_batch) for a in row] for row in case.schedule.rows
    ]


def heap_seconds(
    case: Case, candidate: int, knots: list[Knots], order: list[list[tuple[bool, int]]]
) -> float:
    """One iteration by an event heap: computations and transfers end, whatever waited for them
    starts."""
    forward, backward, sizes = (
        a[:, candidate].tolist() for a in (case.forward, case.backward, case.sizes)
    )
    last = len(order) - 1
    position, busy = [0] * len(order), [False] * len(order)
    ready = [{(True, m) for m in range(case.schedule.num_micro_batches)}] + [
        set() for _ in range(last)
    ]
    queues: list[deque[tuple[float, int, tuple[bool, int]]]] = [deque() for _ in knots]
    sending = [False] * len(knots)
    events: list[tuple[float, int, bool, int, int, tuple[bool, int]]] = []
    number = 0
    now = 0.0

    def start(stage: int) -> None:
        nonlocal number
        if not busy[stage] and position[stage] < len(order[stage]):
            work = order[stage][position[stage]]
            if work in ready[stage]:
                busy[stage] = True
                position[stage] += 1
                number += 1
                seconds = forward[stage] if work[0] else backward[stage]
                heapq.heappush(events, (now + seconds, number, True, stage, stage, work))

    def send(link: int) -> None:
        nonlocal number
        if queues[link] and not sending[link]:
            size, target, work = queues[link].popleft()
            sending[link] = True
            number += 1
            heapq.heappush(
                events, (transfer_end(knots[link], now, size), number, False, link, target, work)
            )

    start(0)
    while events:
        now, _, computed, where, target, work = heapq.heappop(events)
        if not computed:
            sending[where] = False
            ready[target].add(work)
            send(where)
            start(target)
            continue
        busy[where] = False
        is_forward, micro_batch = work
        if is_forward and where == last:
            ready[where].add((False, micro_batch))
        elif is_forward:
            queues[2 * where].append((sizes[where], where + 1, work))
            send(2 * where)
        elif where:
            queues[2 * where - 1].append((sizes[where - 1], where - 1, work))
            send(2 * where - 1)
        start(where)
    return now


def simpy_seconds(
    case: Case, candidate: int, knots: list[Knots], order: list[list[tuple[bool, int]]]
) -> float:
    """One iteration as SimPy processes: a process per device and per transfer, a resource per
    link."""
    forward, backward, sizes = (
        a[:, candidate].tolist() for a in (case.forward, case.backward, case.sizes)
    )
    last = len(order) - 1
    environment = simpy.Environment()
    links = [simpy.Resource(environment, 1) for _ in knots]
    arrived = [{work: environment.event() for work in row} for row in order]
    for micro_batch in range(case.schedule.num_micro_batches):
        arrived[0][True, micro_batch].succeed()

    def transfer(link: int, size: float, target: int, work: tuple[bool, int]):
        with links[link].request() as turn:
            yield turn
            yield environment.timeout(
                transfer_end(knots[link], environment.now, size) - environment.now
            )
        arrived[target][work].succeed()

    def device(stage: int):
        for work in order[stage]:
            yield arrived[stage][work]
            yield environment.timeout(forward[stage] if work[0] else backward[stage])
            if work[0] and stage == last:
                arrived[stage][False, work[1]].succeed()
            elif work[0]:
                environment.process(transfer(2 * stage, sizes[stage], stage + 1, work))
            elif stage:
                environment.process(transfer(2 * stage - 1, sizes[stage - 1], stage - 1, work))

    for stage in range(last + 1):
        environment.process(device(stage))
    environment.run()
    return environment.now
