"""Compute the times of many pipelines at once, on devices and links that do not change.

This is the inner loop of the search. A stage has one device (under some schedules several stages
share one) and a link of its own in each direction to each neighbour. The order of the actions
depends only on the schedule, the stages and the micro-batches, so it is cached:

    (1)  start = max(end of the worker's previous action, arrival of its input)
    (2)  the link is free again at max(end, link free) + transfer; arrival one latency later.
         If the first of two stages has no backward, no gradients return to it: ``returns`` is 0
    (3)  iteration = max over stages of (last end of the worker + tail), the tail being gradient
         exchange and update

Under a zero-bubble schedule a backward has two halves: the gradients that the previous stage waits
for, and the gradients of the weights.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from argosy.cluster.trace import FloatArray
from argosy.schedule import Action, ActionKind, ScheduleSpec, build_schedule
from argosy.schedule.action import worker_of
from argosy.schedule.generate import depth_of, group_size
from argosy.sim.steady import steady_seconds

Step = tuple[int, int, int, int, int]
"""An action: its worker; its stage; forward (0), backward (1) or half a backward (2); the number of
the step whose result it waits for (-1: none); the boundary over which it sends (-1: none)."""
Program = tuple[list[int], list[Step]]
"""The worker of every stage, and the steps of all workers in an order that respects
dependencies."""
# Kinds of work in a ``Step``.
_FORWARD, _BACKWARD, _HALF = range(3)

# Up to this number of candidates, a plain Python loop is faster than numpy vectors.
_FEW = 6


# A value per stage: a number, or a row of candidates.
Values = TypeVar("Values")


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
    """Return the seconds of one iteration for every candidate (3).

    All arrays have the shape (stages, candidates); ``transfer[s]`` and ``latency[s]`` are the
    seconds between stages s and s + 1. Without ``returns`` all stages have a backward.
    """
    back = (transfer, latency) if returns is None else (transfer * returns, latency * returns)
    arrays = _StageSeconds(forward, backward, transfer, latency, *back, tail)

    def seconds(count: int) -> FloatArray:
        program = _program(schedule, len(forward), count)
        if forward.shape[1] > _FEW:
            return _many(program, arrays)
        candidates = [
            _StageSeconds(*(array[:, candidate].tolist() for array in arrays))
            for candidate in range(forward.shape[1])
        ]
        return np.array([_one(program, seconds_of_one) for seconds_of_one in candidates])

    return steady_seconds(seconds, schedule, len(forward), num_micro_batches)


@lru_cache(maxsize=256)
def _program(schedule: ScheduleSpec, num_stages: int, num_micro_batches: int) -> Program:
    """Return the worker of every stage, and all actions of a schedule, each after those that it
    needs."""
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


# The kind of work of every kind of action, as a ``Step`` stores it.
_WORK = {
    ActionKind.FORWARD: _FORWARD,
    ActionKind.BACKWARD: _BACKWARD,
    ActionKind.INPUT_GRADIENT: _HALF,
    ActionKind.WEIGHT_GRADIENT: _HALF,
}


def orders_of(
    schedule: ScheduleSpec, num_stages: int, num_micro_batches: int
) -> list[list[tuple[int, ActionKind, int]]]:
    """Return, for each worker, the stage, kind and micro-batch of its actions in order."""
    if not schedule.kind.is_family:
        rows = build_schedule(schedule, num_stages, num_micro_batches).rows
        return [[_plain(action) for action in row] for row in rows]
    depths = depth_of(schedule, num_stages, num_micro_batches)
    group = group_size(schedule, num_micro_batches)
    return [
        _family_order(stage, depth, group, num_micro_batches) for stage, depth in enumerate(depths)
    ]


def _plain(action: Action) -> tuple[int, ActionKind, int]:
    """Return the stage, kind and micro-batch of an action."""
    return action.stage, action.kind, action.micro_batch


def _family_order(
    stage: int, depth: int, group: int, num_micro_batches: int
) -> list[tuple[int, ActionKind, int]]:
    """Return the order of ``schedule.generate.family`` for one stage, without building actions."""
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


class _StageSeconds(NamedTuple, Generic[Values]):
    """A tuple that holds the seconds of stages, with a value or a row of candidates per stage."""

    forward: Values
    backward: Values
    transfer: Values
    latency: Values
    back_transfer: Values
    back_latency: Values
    tail: Values


def _one(program: Program, given: _StageSeconds[list[float]]) -> float:
    """Return the seconds of one iteration of a single candidate (3), in plain Python."""
    workers, steps = program
    forward, backward, transfer, latency, back_transfer, back_latency, tail = given
    seconds = (forward, backward, [whole / 2 for whole in backward])
    free = [0.0] * len(set(workers))
    size = len(forward)
    directions = (([0.0] * size, back_transfer, back_latency), ([0.0] * size, transfer, latency))
    arrival = [0.0] * len(steps)
    for number, (worker, stage, kind, need, boundary) in enumerate(steps):
        start = free[worker]
        if need >= 0 and arrival[need] > start:
            start = arrival[need]
        end = start + seconds[kind][stage]
        free[worker] = end
        if boundary >= 0:
            busy, transfers, latencies = directions[kind == _FORWARD]
            if busy[boundary] > end:
                end = busy[boundary]
            end += transfers[boundary]
            busy[boundary] = end
            arrival[number] = end + latencies[boundary]
    return max(
        free[worker] + tail_seconds for worker, tail_seconds in zip(workers, tail, strict=True)
    )


def _many(program: Program, given: _StageSeconds[FloatArray]) -> FloatArray:
    """Return the seconds of one iteration of many candidates (3), in numpy vectors."""
    workers, steps = program
    forward, backward, transfer, latency, back_transfer, back_latency, tail = given
    free = np.zeros((len(set(workers)), forward.shape[1]))
    link = np.zeros((2, *forward.shape))
    arrival: list[FloatArray | None] = [None] * len(steps)
    # Lists of rows: taking a row of an array costs a third of the arithmetic on it.
    rows, seconds = list(free), (list(forward), list(backward), list(backward / 2))
    directions = (
        (list(link[0]), list(back_transfer), list(back_latency)),
        (list(link[1]), list(transfer), list(latency)),
    )
    for number, (worker, stage, kind, need, boundary) in enumerate(steps):
        worker_free = rows[worker]
        if need >= 0:
            np.maximum(worker_free, arrival[need], out=worker_free)  # type: ignore[arg-type]
            arrival[need] = None
        worker_free += seconds[kind][stage]
        if boundary >= 0:
            busy_rows, transfers, latencies = directions[kind == _FORWARD]
            busy = busy_rows[boundary]
            np.maximum(busy, worker_free, out=busy)
            busy += transfers[boundary]
            arrival[number] = busy + latencies[boundary]
    return (free[workers] + tail).max(axis=0)
