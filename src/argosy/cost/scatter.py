"""Decide which gradients travel beside compute under ZeRO 2 and 3.

After the backward of layer i, a vector with its gradients is sent and another one arrives, 2 s_i
bytes for s_i bytes of weights. They may stay while the next layer computes if everything that is
held then fits into the bytes B that ``cost.memory``, (8), counts for a backward. In the order of a
backward, j follows i and k follows j:

    (1)  ZeRO 2    2 s_i + s_j <= B           vectors, gradients of j
    (2)  ZeRO 3    2 s_i + 2 s_j + s_k <= B   and weights of j, and of k, which arrive
    (3)  the last layer's gradients travel beside the next forward; j and k are then those of the
         next backward, and under ZeRO 3 2 s_i + (the most of two neighbours) <= B, too

Other layers wait until their gradients have been scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from argosy.cost.memory import times_whole


def travel_beside(sizes: Sequence[float], zero: int, holders: int) -> tuple[bool, ...]:
    """Return for each layer of a stage, by the bytes of its weights, whether its gradients travel
    beside compute."""
    room = times_whole(zero, holders, backward=True) * max(sizes, default=0.0)
    order = [index for index in reversed(range(len(sizes))) if sizes[index]]
    beside = [False] * len(sizes)
    neighbours = max((a + b for a, b in pairwise([*sizes, 0.0])), default=0.0)
    for at, index in enumerate(order):
        second, third = (sizes[order[(at + steps) % len(order)]] for steps in (1, 2))
        needed = 2 * second + third if zero == 3 else second
        if zero == 3 and at + 1 == len(order):
            needed = max(needed, neighbours)
        beside[index] = 2 * sizes[index] + needed <= room
    return tuple(beside)
