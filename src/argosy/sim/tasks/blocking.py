"""Change a task graph to that of a runtime that does not overlap transfers with compute.

The pipeline engines of DeepSpeed and Megatron-LM (without its overlap options) exchange activations
and gradients between two actions: the sender continues when the bytes have left, and the receiver
only takes them when it has finished its previous action. In the graph, for a transfer x that task a
of a device sends and task c of another consumes:

    (1)  the sender's next task waits for x
    (2)  x waits for the receiver's task before c
    (3)  a device takes part in one transfer after the other, in an order that all devices share

A runtime that buffers part of what it sends waits for a share of each transfer only: then x is that
share of the bytes, the rest follows beside compute, and c waits for both.

1F1B stays free of deadlock; a schedule for which (2) closes a cycle is rejected. (3) closes none,
because its order is one in which (1) and (2) can be executed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from argosy.errors import impossible
from argosy.sim.engine.graph import Task, TaskGraph
from argosy.timeline import SpanKind


def with_blocking_transfers(graph: TaskGraph, share: float = 1.0) -> TaskGraph:
    """Return the graph in which devices wait for ``share`` of the bytes of every transfer (1) to
    (3)."""
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
        receivers = [consumer for consumer in consumers[index] if consumer in before]
        waits[index] |= {before[receiver] for receiver in receivers}  # (2)
    ordered, place = _in_order(graph, waits)
    return _one_at_a_time(ordered, {place[index] for index in beside})


def _in_two(graph: TaskGraph, share: float) -> tuple[TaskGraph, frozenset[int]]:
    """Split every transfer into ``share`` of its bytes and a task for the rest.

    The rest has no latency of its own. Returns the graph and the numbers of the tasks for the
    rests.
    """
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
        rests_before = tuple(rests[earlier] for earlier in task.after if earlier in rests)
        tasks[index] = replace(tasks[index], after=(*task.after, *rests_before))
    return replace(graph, tasks=tuple(tasks)), frozenset(rests.values())


def _one_at_a_time(graph: TaskGraph, beside: set[int]) -> TaskGraph:
    """Let devices take part in one transfer after the other, in the order of task numbers (3).

    The tasks ``beside`` compute are exempt.
    """
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
    """Return the tasks of a device before and after each of its tasks.

    Reductions of a group occupy its devices too.
    """
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
    """Return the devices that a task occupies."""
    if task.device >= 0:
        return {task.device}
    if task.kind is SpanKind.COLLECTIVE and task.micro_batch is not None and not task.beside:
        return {flow.source for flow in task.flows}
    return set()


def _in_order(graph: TaskGraph, waits: list[set[int]]) -> tuple[TaskGraph, dict[int, int]]:
    """Renumber tasks so that each waits for smaller numbers only; return the graph and the new
    numbers."""
    try:
        order = list(TopologicalSorter(dict(enumerate(waits))).static_order())
    except CycleError:
        reason = "its blocking transfers deadlock"
        raise impossible("simulate this schedule", reason, "another one, such as 1f1b") from None
    place = {old: new for new, old in enumerate(order)}
    tasks = []
    for old in order:
        task = graph.tasks[old]
        behind = None if task.behind is None else place[task.behind]
        tasks.append(
            replace(
                task,
                after=tuple(sorted(place[earlier_task] for earlier_task in waits[old])),
                behind=behind,
            )
        )
    carry = tuple((place[earlier], place[later]) for earlier, later in graph.carry)
    return replace(graph, tasks=tuple(tasks), carry=carry), place
