"""A task graph as a runtime plays it that does not overlap transfers with compute.

The pipeline engines of DeepSpeed and Megatron-LM (without its overlap options) exchange activations
and gradients between two actions: the sender goes on when the bytes have left, and the receiver
only takes them when it has finished what it did before. In the graph, for a transfer x that task a
of a device sends and task c of another consumes:

    (1)  what the sender does next waits for x
    (2)  x waits for what the receiver does just before c
    (3)  a device takes part in one transfer after the other, in an order that all devices share

A runtime that buffers part of what it sends waits for a share of each transfer only: then x stands
for that share of the bytes, the rest follows it beside compute, and c waits for both.

1F1B stays free of deadlock; a schedule for which (2) closes a circle is refused. (3) closes none,
because its order is one in which (1) and (2) can be played.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from argosy.errors import bad_input
from argosy.sim.engine.graph import Task, TaskGraph
from argosy.timeline import SpanKind


def with_blocking_transfers(graph: TaskGraph, share: float = 1.0) -> TaskGraph:
    """(1) to (3), for this share of every transfer."""
    if not share:
        return graph
    beside = frozenset[int]()
    if share < 1:
        graph, beside = _in_two(graph, share)
    waits = [set(task.after) for task in graph.tasks]
    before, following = _neighbours(graph)
    consumers: dict[int, list[int]] = defaultdict(list)
    for index, task in enumerate(graph.tasks):
        for earlier in task.after:
            consumers[earlier].append(index)
    for index, task in enumerate(graph.tasks):
        if task.kind is not SpanKind.TRANSFER or index in beside:
            continue
        for sender in task.after:
            if sender in following:
                waits[following[sender]].add(index)  # (1)
        waits[index] |= {before[one] for one in consumers[index] if one in before}  # (2)
    ordered, place = _in_order(graph, waits)
    return _one_at_a_time(ordered, {place[index] for index in beside})


def _in_two(graph: TaskGraph, share: float) -> tuple[TaskGraph, frozenset[int]]:
    """Every transfer as this share of its bytes, and a task for the rest, which needs no latency of
    its own; and which tasks the rests are."""
    tasks, rests = list(graph.tasks), dict[int, int]()
    for index, task in enumerate(graph.tasks):
        if task.kind is SpanKind.TRANSFER:
            first, rest = (
                tuple(replace(flow, bytes=part * flow.bytes) for flow in task.flows)
                for part in (share, 1 - share)
            )
            rests[index] = len(tasks)
            tasks[index] = replace(task, flows=first)
            tasks.append(
                replace(task, flows=rest, after=(index,), behind=None, rounds=0, takes=(), frees=())
            )
    for index, task in enumerate(graph.tasks):
        more = tuple(rests[one] for one in task.after if one in rests)
        tasks[index] = replace(tasks[index], after=(*task.after, *more))
    return replace(graph, tasks=tuple(tasks)), frozenset(rests.values())


def _one_at_a_time(graph: TaskGraph, beside: set[int]) -> TaskGraph:
    """(3) along the numbers of the tasks; those ``beside`` compute take no part."""
    last: dict[int, int] = {}
    tasks = []
    for index, task in enumerate(graph.tasks):
        if task.kind is SpanKind.TRANSFER and index not in beside:
            ends = sorted({end for flow in task.flows for end in (flow.source, flow.target)})
            earlier = {last[end] for end in ends if end in last}
            task = replace(task, after=tuple(sorted(earlier.union(task.after))))
            last |= dict.fromkeys(ends, index)
        tasks.append(task)
    return replace(graph, tasks=tuple(tasks))


def _neighbours(graph: TaskGraph) -> tuple[dict[int, int], dict[int, int]]:
    """What each device does before and after each of its tasks; reductions of a group occupy its
    devices too."""
    before: dict[int, int] = {}
    following: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, task in enumerate(graph.tasks):
        for device in _occupied(task):
            if device in last:
                before[index] = last[device]
                following[last[device]] = index
            last[device] = index
    return before, following


def _occupied(task: Task) -> set[int]:
    if task.device >= 0:
        return {task.device}
    if task.kind is SpanKind.COLLECTIVE and task.micro_batch is not None and not task.beside:
        return {flow.source for flow in task.flows}
    return set()


def _in_order(graph: TaskGraph, waits: list[set[int]]) -> tuple[TaskGraph, dict[int, int]]:
    """The graph with its tasks renumbered so that each waits for smaller numbers only, and the new
    numbers."""
    try:
        order = list(TopologicalSorter(dict(enumerate(waits))).static_order())
    except CycleError:
        expected = "a schedule that blocking transfers cannot lock up, such as 1f1b"
        raise bad_input(expected, where="schedule") from None
    place = {old: new for new, old in enumerate(order)}
    tasks = []
    for old in order:
        task = graph.tasks[old]
        behind = None if task.behind is None else place[task.behind]
        tasks.append(
            replace(task, after=tuple(sorted(place[one] for one in waits[old])), behind=behind)
        )
    carry = tuple((place[earlier], place[later]) for earlier, later in graph.carry)
    return replace(graph, tasks=tuple(tasks), carry=carry), place
