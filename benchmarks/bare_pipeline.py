"""A bare pipeline as a task graph: one device per stage, durations and bytes given directly.

This is the level at which schedules and engines are compared and golden values are stated;
``argosy.sim.tasks.compile`` makes the graph of a whole plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argosy.schedule import Action, ActionKind, Schedule
from argosy.sim.engine.graph import Flow, Task, TaskGraph
from argosy.sim.tasks.order import SPAN_KIND, in_dependency_order
from argosy.timeline import SpanKind


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What one micro-batch costs at one stage."""

    forward: float
    """Seconds."""
    backward: float
    """Seconds, both gradients."""
    output_bytes: float = 0.0
    """Crosses to the next stage, and its gradient back."""
    activation_bytes: float = 0.0
    """Held from forward to backward."""

    def seconds(self, kind: ActionKind) -> float:
        return {ActionKind.FORWARD: self.forward, ActionKind.BACKWARD: self.backward}.get(
            kind, self.backward / 2
        )


def pipeline_graph(
    schedule: Schedule, costs: Sequence[StageCost], devices: Sequence[str]
) -> TaskGraph:
    """Tasks of one iteration; worker w of the schedule is ``devices[w]``."""
    tasks: list[Task] = []
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    channel_last: dict[tuple[int, int, bool], int] = {}
    channel_first: dict[tuple[int, int, bool], int] = {}
    arrived: dict[tuple[int, int, bool], int] = {}
    """Per stage, micro-batch and whether it is a gradient, the transfer that brings it."""
    for action in in_dependency_order(schedule):
        worker, cost = schedule.worker_of(action.stage), costs[action.stage]
        after = [last[worker]] if worker in last else []
        awaited = (action.stage, action.micro_batch, action.kind is not ActionKind.FORWARD)
        if action.kind is not ActionKind.WEIGHT_GRADIENT and awaited in arrived:
            after.append(arrived[awaited])
        held = ((worker, cost.activation_bytes),) if cost.activation_bytes else ()
        tasks.append(
            Task(
                kind=SPAN_KIND[action.kind],
                device=worker,
                seconds=cost.seconds(action.kind),
                after=tuple(dict.fromkeys(after)),
                stage=action.stage,
                micro_batch=action.micro_batch,
                takes=held if action.kind is ActionKind.FORWARD else (),
                frees=held if action.kind.frees_activations else (),
            )
        )
        last[worker] = len(tasks) - 1
        first.setdefault(worker, len(tasks) - 1)
        consumer = _consumer(action, schedule.num_stages)
        if consumer is None or schedule.worker_of(consumer) == worker:
            continue
        target = schedule.worker_of(consumer)
        channel = (worker, target, action.kind is not ActionKind.FORWARD)
        num_bytes = costs[min(action.stage, consumer)].output_bytes
        tasks.append(
            Task(
                kind=SpanKind.TRANSFER,
                flows=(Flow(worker, target, num_bytes),),
                after=(last[worker],),
                behind=channel_last.get(channel),
                stage=action.stage,
                micro_batch=action.micro_batch,
            )
        )
        arrived[consumer, action.micro_batch, action.kind is not ActionKind.FORWARD] = (
            len(tasks) - 1
        )
        channel_last[channel] = len(tasks) - 1
        channel_first.setdefault(channel, len(tasks) - 1)
    carry = [(last[worker], first[worker]) for worker in last]
    carry += [(channel_last[channel], channel_first[channel]) for channel in channel_last]
    return TaskGraph(devices=tuple(devices), tasks=tuple(tasks), carry=tuple(carry))


def _consumer(action: Action, num_stages: int) -> int | None:
    """The neighbouring stage that waits for this action's result."""
    if action.kind is ActionKind.FORWARD and action.stage + 1 < num_stages:
        return action.stage + 1
    if action.kind.is_gradient and action.stage > 0:
        return action.stage - 1
    return None
