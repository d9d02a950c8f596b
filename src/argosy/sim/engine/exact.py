"""Simulate a task graph by discrete events on a cluster whose links and devices change.

Two things take time. A computation that starts at t on a device with speed trace v ends when the
integral of v reaches its seconds (``Trace.advance``), so slow-downs and losses during a task need
no events. Bytes drain at max-min fair rates (``Network``); a flow arrives one latency after its
last byte has left, and a task is over when its last flow has arrived.

The event heap holds (time, number, action); the number breaks ties, so equal inputs give equal
outputs to the last bit. Rates are computed once per instant, after all events of that instant.
Iterations follow one another without a barrier: each device starts the next iteration as soon as
its own work allows. Iterations that repeat others are skipped (``jump``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import cast

from argosy.cluster.topology import Cluster, Route
from argosy.sim.engine.graph import Task, TaskGraph
from argosy.sim.engine.jump import Repeats
from argosy.sim.engine.network import ActiveFlow, Network
from argosy.timeline import LinkUse, Span, Timeline
from argosy.units import TIME


def simulate_exact(
    graph: TaskGraph,
    cluster: Cluster,
    *,
    iterations: int = 1,
    record: int | None = None,
    until: float = math.inf,
    jump: bool = True,
) -> Timeline:
    """Simulate ``iterations`` of the graph from time 0.

    Spans and memory are recorded for the first ``record`` iterations (default: all); no iteration
    begins after ``until`` seconds. If ``jump`` is set, iterations that are not recorded and repeat
    others are skipped.
    """
    engine = Engine(graph, cluster, iterations, iterations if record is None else record, until)
    engine.run(Repeats(engine) if jump and engine.record < iterations - 1 else None)
    return engine.timeline()


class Engine:
    """A simulation in progress, which holds the clock, the event heap, and tasks and flows under
    way."""

    def __init__(
        self, graph: TaskGraph, cluster: Cluster, iterations: int, record: int, until: float
    ) -> None:
        self.graph = graph
        self.cluster = cluster = graph.on(cluster)
        self.iterations = iterations
        self.record = record
        self.until = until
        self.size = len(graph.tasks)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.events = 0
        self.network = Network(cluster, self._foresee_end, self._foresee_change)
        self.speeds = [cluster.device(name).speed for name in graph.devices]
        self.next_tasks: list[list[int]] = [[] for _ in graph.tasks]
        self.next_on_channel: list[list[int]] = [[] for _ in graph.tasks]
        self.in_next_iteration: list[list[int]] = [[] for _ in graph.tasks]
        self.needs = [len(task.after) + (task.behind is not None) for task in graph.tasks]
        self.carried_needs = [0] * self.size
        self._link_tasks()
        self.waiting: dict[int, int] = {}
        """Per task instance (iteration * size + task), the number of tasks that it still waits
        for."""
        self.left: dict[int, int] = {}
        """Per iteration, the number of tasks that are not over."""
        self.begun: set[int] = set()
        """Iterations of which a task has started."""
        self.flows_left: dict[int, int] = {}
        self.started: dict[int, float] = {}
        self.cause: dict[int, int] = {}
        """Per instance, the span whose end let it start."""
        self.span_of: dict[int, int] = {}
        self.arrival: dict[int, float] = {}
        """Per instance, the time at which the last of its departed flows arrives."""
        self.link_names: dict[tuple[int, ...], tuple[str, ...]] = {}
        """The names of the links of a route, by their numbers."""
        self.spans: list[Span] = []
        self.busy = [0.0] * len(graph.devices)
        self.memory: list[list[tuple[float, float]]] = [[] for _ in graph.devices]
        self.iteration_ends: list[float] = []
        self.has_ended = False
        """True if an iteration has ended since ``Repeats.look`` was called last."""
        self.repeated = 0
        """The number of iterations that were skipped."""

    def _link_tasks(self) -> None:
        """Fill the lists of successors and the counts of predecessors of all tasks."""
        for index, task in enumerate(self.graph.tasks):
            for earlier in task.after:
                self.next_tasks[earlier].append(index)
            if task.behind is not None:
                self.next_on_channel[task.behind].append(index)
        for earlier, later in self.graph.carry:
            self.in_next_iteration[earlier].append(later)
            self.carried_needs[later] += 1

    def run(self, repeats: Repeats | None = None) -> None:
        """Process all events; skip iterations that repeat others if ``repeats`` is given."""
        self._open_iteration(0)
        while self.heap or self.network.dirty:
            if self.network.dirty and (not self.heap or self.heap[0][0] > self.now):
                self.network.refresh(self.now)
                continue
            if self.has_ended and repeats is not None and self.heap[0][0] > self.now:
                repeats.look()
                self.has_ended = False
            self.now, _, act, arguments = heapq.heappop(self.heap)
            act(*arguments)

    def _open_iteration(self, iteration: int) -> None:
        """Start the tasks of an iteration that wait for nothing."""
        if iteration >= self.iterations:
            return
        base = iteration * self.size
        self.left[iteration] = self.size
        ready = []
        for index in range(self.size):
            count = self.needs[index] + (self.carried_needs[index] if iteration else 0)
            if count:
                self.waiting[base + index] = count
            else:
                ready.append(base + index)
        for instance in ready:
            self._start(instance)

    def _start(self, instance: int) -> None:
        """Start a task, unless its iteration would begin too late."""
        iteration, index = divmod(instance, self.size)
        if iteration not in self.begun and self.now > self.until:
            return
        self.begun.add(iteration)
        task = self.graph.tasks[index]
        self.started[instance] = self.now
        if instance < self.record * self.size:
            for device, amount in task.takes:
                self.memory[device].append((self.now, amount))
        if task.kind.is_communication:
            self._start_flows(instance, task)
            return
        end = self.speeds[task.device].advance(self.now, task.seconds)
        if end < math.inf:
            self._at(end, self._computed, instance)

    def _start_flows(self, instance: int, task: Task) -> None:
        """Request all flows of a task."""
        self.flows_left[instance] = sum(flow.bytes > 0 for flow in task.flows)
        for flow in task.flows:
            source, target = self.graph.ends(flow, self.cluster)
            where = f"{source}>{target}"
            if flow.bytes > 0:
                routes = self.cluster.routes(source, target)
                self.network.request(routes, flow.bytes, self.now, (instance, where))
            else:  # an empty message takes its latency, and no bandwidth
                route = self.cluster.fastest(source, target, 0.0, self.now)
                self._left(instance, where, route, self.now, 0.0)
        if not self.flows_left[instance]:
            self._last_byte_left(instance)

    def _computed(self, instance: int) -> None:
        """End a computation and record it."""
        task = self.graph.tasks[instance % self.size]
        start = self.started[instance]
        self.busy[task.device] += self.now - start
        self._keep(instance, self.graph.devices[task.device], start, self.now)
        self._over(instance)

    def _flow_ended(self, flow: ActiveFlow, version: int) -> None:
        """End a flow, unless its rate has changed since the event was scheduled."""
        if version != flow.version:
            return
        flow.version = -1
        self.network.finish(flow, self.now)
        instance, where = cast(tuple[int, str], flow.owner)
        assert flow.route is not None
        self._left(instance, where, flow.route, flow.started, flow.bytes)
        self.flows_left[instance] -= 1
        if not self.flows_left[instance]:
            self._last_byte_left(instance)

    def _left(
        self, instance: int, where: str, route: Route, start: float, num_bytes: float
    ) -> None:
        """Record one flow whose last byte has left and arrives after the latency."""
        latency = self.graph.tasks[instance % self.size].rounds * self.cluster.latency(
            route, self.now
        )
        via = self.link_names.get(route.links)
        if via is None:
            via = self.link_names[route.links] = tuple(
                self.cluster.links[link].name for link in route.links
            )
        self._keep(instance, where, start, self.now + latency, num_bytes, via)
        self.arrival[instance] = max(self.arrival.get(instance, 0.0), self.now + latency)

    def _last_byte_left(self, instance: int) -> None:
        """Release the next task of the channel, and end this one when its last flow arrives."""
        del self.flows_left[instance]
        arrival = self.arrival.pop(instance, self.now)
        base = instance - instance % self.size
        for later in self.next_on_channel[instance % self.size]:
            self._release(base + later, instance)
        if arrival > self.now:
            self._at(arrival, self._over, instance)
        else:
            self._over(instance)

    def _over(self, instance: int) -> None:
        """End a task: free its memory, release its successors and open the next iteration."""
        iteration, index = divmod(instance, self.size)
        task = self.graph.tasks[index]
        base = iteration * self.size
        if iteration < self.record:
            for device, amount in task.frees:
                self.memory[device].append((self.now, -amount))
        self.left[iteration] -= 1
        # Decided here, because a task without flows that is released below ends within this call.
        last = not self.left[iteration]
        if iteration + 1 not in self.left and self.in_next_iteration[index]:
            self._open_iteration(iteration + 1)
        for later in self.next_tasks[index]:
            self._release(base + later, instance)
        if iteration + 1 in self.left:
            for later in self.in_next_iteration[index]:
                self._release(base + self.size + later, instance)
        self.started.pop(instance, None)
        if last:
            self.iteration_ends.append(self.now)
            self.has_ended = True

    def _release(self, instance: int, by: int) -> None:
        """Start an instance if ``by`` is the last task that it waited for."""
        self.waiting[instance] -= 1
        if not self.waiting[instance]:
            del self.waiting[instance]
            if instance < self.record * self.size:
                # A task without spans passes on its own cause.
                cause = self.span_of.get(by, self.cause.get(by))
                if cause is not None:
                    self.cause[instance] = cause
            self._start(instance)

    def _keep(
        self,
        instance: int,
        where: str,
        start: float,
        end: float,
        num_bytes: float = 0.0,
        via: tuple[str, ...] = (),
    ) -> None:
        """Record a span of an iteration that is to be recorded."""
        iteration, index = divmod(instance, self.size)
        if iteration >= self.record:
            return
        task = self.graph.tasks[index]
        known = self.span_of.get(instance)
        if known is None or self.spans[known].end <= end:
            self.span_of[instance] = len(self.spans)
        cause = self.cause.get(instance)
        span = Span(
            where,
            task.kind,
            start,
            end,
            task.stage,
            task.micro_batch,
            iteration,
            num_bytes,
            via,
            cause,
        )
        self.spans.append(span)

    def _at(self, time: float, act: Callable[..., None], *arguments: object) -> None:
        """Schedule a call at a time."""
        self.events += 1
        heapq.heappush(self.heap, (time, self.events, act, arguments))

    def _foresee_end(self, time: float, flow: ActiveFlow, version: int) -> None:
        """Schedule the end of a flow."""
        self._at(time, self._flow_ended, flow, version)

    def _foresee_change(self, time: float, link: int) -> None:
        """Schedule a change of a link's bandwidth."""
        self._at(time, self.network.change, link, time)

    def timeline(self) -> Timeline:
        """Return what was recorded as a timeline."""
        end = max([*self.iteration_ends, *(span.end for span in self.spans)], default=0.0)
        uses = []
        for link, carried in zip(self.cluster.links, self.network.carried, strict=True):
            if carried > 0:
                possible = link.bandwidth.integral(0.0, end)
                uses.append(
                    LinkUse(
                        link=link.name,
                        bytes=carried,
                        utilisation=carried / possible if possible else 0.0,
                    )
                )
        return Timeline(
            clock="simulated",
            devices=self.graph.devices,
            spans=tuple(self.spans),
            iteration_ends=tuple(self.iteration_ends),
            busy=tuple(self.busy),
            links=tuple(uses),
            memory=tuple(self._memory_steps(index) for index in range(len(self.graph.devices))),
            stalled=self._why_stalled(),
            repeated=self.repeated,
        )

    def _memory_steps(self, device: int) -> tuple[str, tuple[tuple[float, float], ...]]:
        """Return the bytes that a device holds as a step function of time."""
        resident = self.graph.resident[device] if self.graph.resident else 0.0
        steps = [(0.0, resident)]
        # At one moment, memory is given back before it is taken again.
        for time, amount in sorted(self.memory[device]):
            held = steps[-1][1] + amount
            if time == steps[-1][0]:
                steps[-1] = (time, held)
            else:
                steps.append((time, held))
        return self.graph.devices[device], tuple(steps)

    def _why_stalled(self) -> str | None:
        """Return why the simulation never ends; None if it ended."""
        if not self.started:
            return None
        instance = min(self.started)
        task = self.graph.tasks[instance % self.size]
        work = str(task.kind) if task.micro_batch is None else f"{task.kind} {task.micro_batch}"
        work += f" of stage {task.stage}" if task.stage is not None else ""
        fate = f"{work}, begun at {TIME.format(self.started[instance])}, never ends"
        if task.kind.is_communication:
            flow = task.flows[0]
            source, target = self.graph.ends(flow, self.cluster)
            return f"no link from {source} to {target} comes back: {fate}"
        return f"{self.graph.devices[task.device]} is lost: {fate}"
