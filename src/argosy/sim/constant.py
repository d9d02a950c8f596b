"""Times of bare pipelines whose devices and links do not change, many at once: the inner loop of
the search.

Stages are the unit here, one device each (several stages share one under some schedules), a link of
its own per direction between neighbours. What is done in which order depends on the schedule, the
stages and the micro-batches alone and is kept:

    (1)  start = max(end of the worker's previous action, arrival of its input)
    (2)  the link is free again at max(end, link free) + transfer; arrival one latency later.
         Between stages of which the first has no backward there are no transfers back: ``returns``
         is 0 there
    (3)  iteration = max over stages of (last end of the worker + tail), the tail being gradient
         exchange and update

Under a zero-bubble schedule a backward is two halves: the gradients that the stage before waits
for, and those of the weights.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from argosy.cluster.trace import FloatArray
from argosy.schedule import Action, ActionKind, ScheduleSpec, build_schedule
from argosy.schedule.action import worker_of
from argosy.schedule.generate import depth_of, group_size
from argosy.sim.steady import steady_seconds

Step = tuple[int, int, int, int, int]
"""Worker; stage; forward (0), backward (1) or half a backward (2); the step whose result it waits
for (-1: none); where it sends (-1 nowhere, else the boundary)."""
Program = tuple[list[int], list[Step]]
"""The worker of every stage, and the steps of all workers."""
_FORWARD, _BACKWARD, _HALF = range(3)

_FEW = 6
"""Up to so many candidates a plain Python loop is faster than vectors."""


def pipeline_seconds(
    schedule: ScheduleSpec,
    num_micro_batches: int,
    *,
    forward: FloatArray,
    backward: FloatArray,
    transfer: FloatArray,
    latency: FloatArray,
    tail: FloatArray,
    returns: FloatArray | None = None,
) -> FloatArray:
    """(3) for every candidate; all arrays are (stages, candidates), ``transfer[s]`` and
    ``latency[s]`` between stages s and s + 1. Without ``returns`` all stages have a backward."""
    back = (transfer, latency) if returns is None else (transfer * returns, latency * returns)
    arrays = (forward, backward, transfer, latency, *back, tail)

    def seconds(count: int) -> FloatArray:
        program = _program(schedule, len(forward), count)
        if forward.shape[1] > _FEW:
            return _many(program, *arrays)
        return np.array(
            [
                _one(program, *(array[:, at].tolist() for array in arrays))
                for at in range(forward.shape[1])
            ]
        )

    return steady_seconds(seconds, schedule, len(forward), num_micro_batches)


@lru_cache(maxsize=256)
def _program(schedule: ScheduleSpec, num_stages: int, num_micro_batches: int) -> Program:
    """The worker of every stage, and all actions of a schedule, each after what it needs."""
    last = num_stages - 1
    orders = orders_of(schedule, num_stages, num_micro_batches)
    position = [0] * len(orders)
    done = [[[-1] * num_micro_batches for _ in range(num_stages)] for _ in range(2)]
    forwards, backwards = done
    steps: list[Step] = []
    remaining = len(orders)
    while remaining:
        for worker, order in enumerate(orders):
            while position[worker] < len(order):
                stage, kind, index = order[position[worker]]
                need, target = -1, -1
                if kind is ActionKind.FORWARD:
                    if stage:
                        need = forwards[stage - 1][index]
                        if need < 0:
                            break
                    forwards[stage][index] = len(steps)
                    target = stage if stage < last else -1
                elif kind is not ActionKind.WEIGHT_GRADIENT:
                    if stage < last:
                        need = backwards[stage + 1][index]
                        if need < 0:
                            break
                    backwards[stage][index] = len(steps)
                    target = stage - 1
                steps.append((worker, stage, _WORK[kind], need, target))
                position[worker] += 1
                if position[worker] == len(order):
                    remaining -= 1
    return [worker_of(schedule.kind, stage, len(orders)) for stage in range(num_stages)], steps


_WORK = {
    ActionKind.FORWARD: _FORWARD,
    ActionKind.BACKWARD: _BACKWARD,
    ActionKind.INPUT_GRADIENT: _HALF,
    ActionKind.WEIGHT_GRADIENT: _HALF,
}


def orders_of(
    schedule: ScheduleSpec, num_stages: int, num_micro_batches: int
) -> list[list[tuple[int, ActionKind, int]]]:
    """Per worker: stage, kind and micro-batch of its actions."""
    if schedule.kind.is_split or schedule.kind.is_chunked:
        rows = build_schedule(schedule, num_stages, num_micro_batches).rows
        return [[_plain(action) for action in row] for row in rows]
    depths = depth_of(schedule, num_stages, num_micro_batches)
    group = group_size(schedule, num_micro_batches)
    return [
        _family_order(stage, depth, group, num_micro_batches) for stage, depth in enumerate(depths)
    ]


def _plain(action: Action) -> tuple[int, ActionKind, int]:
    return action.stage, action.kind, action.micro_batch


def _family_order(
    stage: int, depth: int, group: int, num_micro_batches: int
) -> list[tuple[int, ActionKind, int]]:
    """As ``schedule.generate.family``, without making actions of it."""
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    order = [(stage, forward, index) for index in range(depth)]
    ahead, done = depth, 0
    while ahead < num_micro_batches:
        order += [(stage, backward, index) for index in range(done, done + group)]
        order += [
            (stage, forward, index) for index in range(ahead, min(ahead + group, num_micro_batches))
        ]
        ahead, done = ahead + group, done + group
    return order + [(stage, backward, index) for index in range(done, num_micro_batches)]


def _one(
    program: Program,
    forward: list[float],
    backward: list[float],
    transfer: list[float],
    latency: list[float],
    back_transfer: list[float],
    back_latency: list[float],
    tail: list[float],
) -> float:
    workers, steps = program
    seconds = (forward, backward, [both / 2 for both in backward])
    free = [0.0] * len(set(workers))
    size = len(forward)
    ways = (([0.0] * size, back_transfer, back_latency), ([0.0] * size, transfer, latency))
    arrival = [0.0] * len(steps)
    for number, (worker, stage, kind, need, boundary) in enumerate(steps):
        start = free[worker]
        if need >= 0 and arrival[need] > start:
            start = arrival[need]
        end = start + seconds[kind][stage]
        free[worker] = end
        if boundary >= 0:
            busy, across, after = ways[kind == _FORWARD]
            if busy[boundary] > end:
                end = busy[boundary]
            end += across[boundary]
            busy[boundary] = end
            arrival[number] = end + after[boundary]
    return max(free[worker] + more for worker, more in zip(workers, tail, strict=True))


def _many(
    program: Program,
    forward: FloatArray,
    backward: FloatArray,
    transfer: FloatArray,
    latency: FloatArray,
    back_transfer: FloatArray,
    back_latency: FloatArray,
    tail: FloatArray,
) -> FloatArray:
    workers, steps = program
    free = np.zeros((len(set(workers)), forward.shape[1]))
    link = np.zeros((2, *forward.shape))
    arrival: list[FloatArray | None] = [None] * len(steps)
    # lists of rows, because to take a row of an array costs a third of what is done with it
    rows, seconds = list(free), (list(forward), list(backward), list(backward / 2))
    ways = (
        (list(link[0]), list(back_transfer), list(back_latency)),
        (list(link[1]), list(transfer), list(latency)),
    )
    for number, (worker, stage, kind, need, boundary) in enumerate(steps):
        here = rows[worker]
        if need >= 0:
            np.maximum(here, arrival[need], out=here)  # type: ignore[arg-type]
            arrival[need] = None
        here += seconds[kind][stage]
        if boundary >= 0:
            busy_rows, transfers, latencies = ways[kind == _FORWARD]
            busy = busy_rows[boundary]
            np.maximum(busy, here, out=busy)
            busy += transfers[boundary]
            arrival[number] = busy + latencies[boundary]
    result: FloatArray = (free[workers] + tail).max(axis=0)
    return result
