"""Independent answers to what the solvers and the simulator are asked, written as differently as
possible."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from functools import cache
from typing import cast

import simpy

from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.schedule import Action, ActionKind, Schedule
from argosy.sim.engine.graph import TaskGraph
from benchmarks.bare_pipeline import StageCost

Message = tuple[int, int, bool]
"""Stage it goes to, micro-batch, whether it is a gradient."""
Waiting = Generator[simpy.Event, object, None]


class SimpyPipeline:
    """A pipeline as SimPy processes: a worker runs its row in order, a channel carries one message
    at a time.

    Whatever takes time waits from knot to knot of the traces and counts down what is left.
    """

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost], cluster: Cluster) -> None:
        self.schedule, self.costs, self.cluster = schedule, costs, cluster
        self.env = simpy.Environment()
        self.mailboxes: dict[Message, simpy.Event] = {}
        self.channels: dict[tuple[int, int, bool], simpy.Store] = {}
        self.times: dict[Action, tuple[float, float]] = {}
        """Start and end of every action that ended."""
        self.arrivals: dict[Message, float] = {}
        for worker in range(schedule.num_workers):
            self.env.process(self._work(worker))
        self.env.run()

    @property
    def end(self) -> float:
        """Of the last action or arrival; infinity if some action never ends."""
        count = sum(len(row) for row in self.schedule.rows)
        if len(self.times) < count:
            return math.inf
        return max([end for _, end in self.times.values()] + list(self.arrivals.values()))

    def _mailbox(self, message: Message) -> simpy.Event:
        return self.mailboxes.setdefault(message, self.env.event())

    def _work(self, worker: int) -> Waiting:
        last_stage = self.schedule.num_stages - 1
        for action in self.schedule.rows[worker]:
            stage, index, kind = action.stage, action.micro_batch, action.kind
            is_gradient = kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
            before = stage + 1 if is_gradient else stage - 1
            awaits = kind is not ActionKind.WEIGHT_GRADIENT and 0 <= before <= last_stage
            if awaits and self.schedule.worker_of(before) != worker:
                yield self._mailbox((stage, index, is_gradient))
            begin = self.env.now
            cost = self.costs[stage]
            whole = cost.forward if kind is ActionKind.FORWARD else cost.backward
            halves = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
            yield from self._spend(
                [self.cluster.devices[worker].speed], whole / (2 if kind in halves else 1)
            )
            self.times[action] = (begin, self.env.now)
            after = stage - 1 if is_gradient else stage + 1
            sends = kind is not ActionKind.WEIGHT_GRADIENT and 0 <= after <= last_stage
            if sends and self.schedule.worker_of(after) != worker:
                size = self.costs[min(stage, after)].output_bytes
                self._send(
                    worker, self.schedule.worker_of(after), (after, index, is_gradient), size
                )

    def _send(self, source: int, target: int, message: Message, size: float) -> None:
        channel = (source, target, message[2])
        if channel not in self.channels:
            self.channels[channel] = simpy.Store(self.env)
            self.env.process(self._carry(channel))
        self.channels[channel].put((message, size))

    def _carry(self, channel: tuple[int, int, bool]) -> Waiting:
        source, target, _ = channel
        names = [device.name for device in self.cluster.devices]
        links = [
            self.cluster.links[at]
            for at in self.cluster.routes(names[source], names[target])[0].links
        ]
        while True:
            message, size = cast(tuple[Message, float], (yield self.channels[channel].get()))
            yield from self._spend([link.bandwidth for link in links], size)
            delay = sum(_value(link.latency, self.env.now) for link in links)
            self.env.process(self._deliver(message, delay))

    def _deliver(self, message: Message, delay: float) -> Waiting:
        yield self.env.timeout(delay)
        self.arrivals[message] = self.env.now
        self._mailbox(message).succeed()

    def _spend(self, traces: Sequence[Trace], amount: float) -> Waiting:
        left = amount
        while left > 0:
            rate = min(_value(trace, self.env.now) for trace in traces)
            later = [time for trace in traces for time in trace.times if time > self.env.now]
            until_knot = min(later) - self.env.now if later else math.inf
            needed = left / rate if rate else math.inf
            if needed <= until_knot:
                if math.isinf(needed):
                    yield self.env.event()
                yield self.env.timeout(needed)
                return
            yield self.env.timeout(until_knot)
            left -= rate * until_knot


def _value(trace: Trace, time: float) -> float:
    return [value for knot, value in zip(trace.times, trace.values, strict=True) if knot <= time][
        -1
    ]


def recurrence_end(graph: TaskGraph, cluster: Cluster) -> float:
    """Seconds of one iteration if every channel has its route to itself, task by task: a longest
    path.

    At least what any link that several pairs of devices use needs for all its bytes: so it is the
    time if nothing is shared, and a lower bound if something is.
    """
    left: list[float] = []
    over: list[float] = []
    load: dict[int, float] = {}
    users: dict[int, set[tuple[int, int]]] = {}
    for task in graph.tasks:
        waits = [over[earlier] for earlier in task.after]
        start = max([0.0, *waits, *([left[task.behind]] if task.behind is not None else [])])
        gone = arrived = start
        if task.device >= 0:
            gone = arrived = _moment_done(
                cluster.device(graph.devices[task.device]).speed, start, task.seconds
            )
        for flow in task.flows:
            route = cluster.fastest(graph.devices[flow.source], graph.devices[flow.target], 1e6)
            end = _moment_done(cluster.bandwidth(route), start, flow.bytes)
            latency = 0.0
            for link in route.links:
                load[link] = load.get(link, 0.0) + flow.bytes
                users.setdefault(link, set()).add((flow.source, flow.target))
                latency += _value(cluster.links[link].latency, end) if end < math.inf else 0.0
            gone, arrived = max(gone, end), max(arrived, end + task.rounds * latency)
        left.append(gone)
        over.append(arrived)
    shared = [link for link, pairs in users.items() if len(pairs) > 1]
    return max(
        [*over, *(_moment_done(cluster.links[link].bandwidth, 0.0, load[link]) for link in shared)]
    )


def _moment_done(trace: Trace, start: float, amount: float) -> float:
    """When an amount that is begun at ``start`` is done at the rates of a trace; infinite if it
    never is."""
    if math.isinf(start) or amount <= 0:
        return start
    knots = [*(time for time in trace.times if time > start), math.inf]
    for knot in knots:
        rate = _value(trace, start)
        if rate * (knot - start) >= amount if rate else False:
            return start + amount / rate
        amount -= rate * (knot - start) if rate else 0.0
        start = knot
    return math.inf


def dapple_end(
    forward: Sequence[float],
    backward: Sequence[float],
    num_micro_batches: int,
    warm_up: Sequence[int],
    transfer: float = 0.0,
) -> float:
    """End of an iteration by DAPPLE's recursion: ``warm_up[x]`` forwards run ahead at stage x, then
    backwards and forwards alternate. Each direction between two stages carries one message at a
    time, for ``transfer`` seconds."""
    last = len(forward) - 1
    final = num_micro_batches - 1

    @cache
    def forward_end(index: int, stage: int) -> float:
        waits = [0.0]
        if index > 0:
            waits.append(forward_end(index - 1, stage))
        if stage > 0:
            waits.append(forward_sent(index, stage - 1))
        if index >= warm_up[stage]:
            waits.append(backward_end(index - warm_up[stage], stage))
        return max(waits) + forward[stage]

    @cache
    def forward_sent(index: int, stage: int) -> float:
        free = forward_sent(index - 1, stage) if index > 0 else 0.0
        return max(free, forward_end(index, stage)) + transfer

    @cache
    def backward_end(index: int, stage: int) -> float:
        waits = [forward_end(min(index + warm_up[stage] - 1, final), stage)]
        if index > 0:
            waits.append(backward_end(index - 1, stage))
        if stage < last:
            waits.append(backward_sent(index, stage + 1))
        return max(waits) + backward[stage]

    @cache
    def backward_sent(index: int, stage: int) -> float:
        free = backward_sent(index - 1, stage) if index > 0 else 0.0
        return max(free, backward_end(index, stage)) + transfer

    return max(backward_end(final, stage) for stage in range(last + 1))


def is_max_min_fair(
    flows: Sequence[Sequence[int]],
    capacity: Mapping[int, float],
    rates: Sequence[float],
    tolerance: float = 1e-9,
) -> bool:
    """Whether the rates fit the links, and every flow has a bottleneck: a full link on which nobody
    gets more than it.

    Exactly the max-min fair allocation has both properties.
    """
    load = {
        link: sum(rate for links, rate in zip(flows, rates, strict=True) if link in links)
        for link in capacity
    }
    fits = all(load[link] <= capacity[link] * (1 + tolerance) for link in capacity)

    def has_bottleneck(flow: int) -> bool:
        return any(
            load[link] >= capacity[link] * (1 - tolerance)
            and all(
                rate <= rates[flow] * (1 + tolerance)
                for links, rate in zip(flows, rates, strict=True)
                if link in links
            )
            for link in flows[flow]
        )

    return fits and all(has_bottleneck(flow) for flow in range(len(flows)))
