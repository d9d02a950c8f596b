"""The batch engine for bare pipelines whose devices and links do not change: the inner loop of the search.

Stages are the unit here, one device each, a link of its own per direction between neighbours. The recurrence is that
of ``batch`` with constant rates; only the program differs, which depends on the shape alone (stages, micro-batches,
depths, group) and is kept:

    (1)  start = max(end of the worker's previous action, arrival of its input)
    (2)  arrival = max(end, link free) + transfer;  the link is free again one latency earlier, which is not modelled
         here
    (3)  iteration = max over stages of (last end + tail), the tail being gradient exchange and update
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from argosy.cluster.trace import FloatArray

Step = tuple[int, bool, int, int]
"""Stage, whether it is a forward, the step whose result it waits for (-1: none), where it sends (-1 nowhere, else the
boundary)."""

_FEW = 6
"""Up to so many candidates a plain Python loop is faster than vectors."""


def pipeline_seconds(
    depth: Sequence[int],
    group: int,
    num_micro_batches: int,
    *,
    forward: FloatArray,
    backward: FloatArray,
    transfer: FloatArray,
    tail: FloatArray,
) -> FloatArray:
    """(3) for every candidate; all arrays are (stages, candidates), ``transfer[s]`` between stages s and s + 1."""
    steps = _program(tuple(depth), group, num_micro_batches)
    if forward.shape[1] <= _FEW:
        columns = range(forward.shape[1])
        ends = [_one(steps, *(a[:, c].tolist() for a in (forward, backward, transfer, tail))) for c in columns]
        return np.array(ends)
    return _many(steps, forward, backward, transfer, tail)


@lru_cache(maxsize=256)
def _program(depth: tuple[int, ...], group: int, num_micro_batches: int) -> list[Step]:
    """All actions of a schedule of the family (``schedule.generate``), each after what it needs."""
    orders = [_order(ahead, group, num_micro_batches) for ahead in depth]
    last = len(depth) - 1
    position = [0] * len(depth)
    forwards = [[-1] * num_micro_batches for _ in depth]
    backwards = [[-1] * num_micro_batches for _ in depth]
    steps: list[Step] = []
    remaining = len(depth)
    while remaining:
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                is_forward, index = order[position[stage]]
                if is_forward:
                    need = forwards[stage - 1][index] if stage else -1
                    if stage and need < 0:
                        break
                    forwards[stage][index] = len(steps)
                    steps.append((stage, True, need, stage if stage < last else -1))
                else:
                    need = backwards[stage + 1][index] if stage < last else -1
                    if stage < last and need < 0:
                        break
                    backwards[stage][index] = len(steps)
                    steps.append((stage, False, need, stage - 1 if stage else -1))
                position[stage] += 1
                if position[stage] == len(order):
                    remaining -= 1
    return steps


def _order(depth: int, group: int, num_micro_batches: int) -> list[tuple[bool, int]]:
    order = [(True, index) for index in range(depth)]
    ahead, done = depth, 0
    while ahead < num_micro_batches:
        order += [(False, index) for index in range(done, done + group)]
        order += [(True, index) for index in range(ahead, min(ahead + group, num_micro_batches))]
        ahead, done = ahead + group, done + group
    return order + [(False, index) for index in range(done, num_micro_batches)]


def _one(
    steps: list[Step], forward: list[float], backward: list[float], transfer: list[float], tail: list[float]
) -> float:
    free = [0.0] * len(forward)
    link = [[0.0] * len(forward), [0.0] * len(forward)]
    arrival = [0.0] * len(steps)
    for number, (stage, is_forward, need, boundary) in enumerate(steps):
        start = free[stage]
        if need >= 0 and arrival[need] > start:
            start = arrival[need]
        end = start + (forward[stage] if is_forward else backward[stage])
        free[stage] = end
        if boundary >= 0:
            busy = link[is_forward]
            end = max(busy[boundary], end) + transfer[boundary]
            busy[boundary] = end
        arrival[number] = end
    return max(end + more for end, more in zip(free, tail, strict=True))


def _many(
    steps: list[Step], forward: FloatArray, backward: FloatArray, transfer: FloatArray, tail: FloatArray
) -> FloatArray:
    free = np.zeros_like(forward)
    link = np.zeros((2, *forward.shape))
    arrival: list[FloatArray | None] = [None] * len(steps)
    for number, (stage, is_forward, need, boundary) in enumerate(steps):
        here = free[stage]
        if need >= 0:
            np.maximum(here, arrival[need], out=here)  # type: ignore[arg-type]
            arrival[need] = None
        here += forward[stage] if is_forward else backward[stage]
        if boundary >= 0:
            busy = link[int(is_forward), boundary]
            np.maximum(busy, here, out=busy)
            busy += transfer[boundary]
            arrival[number] = busy.copy()
    result: FloatArray = (free + tail).max(axis=0)
    return result
