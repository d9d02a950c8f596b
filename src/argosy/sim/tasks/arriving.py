"""Add to an iteration the optimizer state that arrives while it runs, after a move from another
plan.

    (1)  each transfer begins with the iteration; one that passes bytes on begins when all that its
         source receives has arrived
    (2)  the update of a device waits for all transfers from it and to it
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from argosy.cost.moving import Transfer, Transfers
from argosy.sim.engine.graph import Flow, Task, TaskGraph
from argosy.timeline import SpanKind


def with_arriving(graph: TaskGraph, state: Transfers) -> TaskGraph:
    """Return the graph of an iteration with transfers of optimizer state, by (1) and (2)."""
    transfers = (*state.direct, *state.passed_on)
    ends = {name for source, target, _ in transfers for name in (source, target)}
    devices = (*graph.devices, *sorted(ends - set(graph.devices)))
    index = {name: at for at, name in enumerate(devices)}
    arriving: dict[str, list[int]] = defaultdict(list)
    for at, (_, target, _) in enumerate(state.direct):
        arriving[target].append(at)

    def sending(transfer: Transfer, after: tuple[int, ...] = ()) -> Task:
        source, target, size = transfer
        flows = (Flow(index[source], index[target], size),)
        return Task(kind=SpanKind.TRANSFER, flows=flows, beside=True, after=after)

    tasks = [sending(transfer) for transfer in state.direct]
    tasks += [sending(transfer, tuple(arriving[transfer[0]])) for transfer in state.passed_on]
    awaited: dict[int, list[int]] = defaultdict(list)
    for at, (source, target, _) in enumerate(transfers):
        awaited[index[source]].append(at)
        awaited[index[target]].append(at)
    added = len(tasks)
    for task in graph.tasks:
        after = tuple(added + earlier for earlier in task.after)
        if task.kind is SpanKind.UPDATE:
            after = (*awaited[task.device], *after)
        behind = None if task.behind is None else added + task.behind
        tasks.append(replace(task, after=after, behind=behind))
    resident = graph.resident and (*graph.resident, *[0.0] * (len(devices) - len(graph.devices)))
    carry = tuple((added + earlier, added + later) for earlier, later in graph.carry)
    return TaskGraph(devices=devices, tasks=tuple(tasks), carry=carry, resident=resident)
