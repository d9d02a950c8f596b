"""An oracle that knows the future and pays for its moves: a dynamic programme over moments and
plans.

    (1)  done(p, t) = most samples by time t if plan p is in force then, on a grid of ``GRID``
         seconds
    (2)  stay   done(p, t + GRID) >= done(p, t) + pace of p at t x GRID
    (3)  move   done(q, first moment of the grid after t + m) >= done(p, t) + pace of q x the time
                left until then, where m is the price of the move at time t

It is an upper bound for a controller that starts with the same plan and has only these plans, up to
the grid: steps are not whole, an outage is noticed at once, process groups cost nothing, and as
much optimizer state as possible travels while the first step computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import permutations

from argosy.adapt.play import Playback
from argosy.cost.moving import DeviceGroup, Migration, migration, process_groups
from argosy.plan.plan import Plan

# Seconds between two moments of the programme.
GRID = 2.0


def paying_oracle(stage: Playback, plans: Sequence[Plan], seconds: float) -> float:
    """Return the samples per second of the oracle, which starts with the first plan."""
    cluster, count = stage.cluster, int(seconds / GRID)
    moments = [at * GRID for at in range(count)]
    paces = [[plan.global_batch / stage.lasting(plan, time) for time in moments] for plan in plans]
    groups = [process_groups(plan, stage.chain) for plan in plans]
    known = frozenset[DeviceGroup]().union(*groups)

    @cache
    def moves(old: int, new: int, unavailable: tuple[bool, ...], time: float) -> Migration:
        del unavailable  # it decides together with the plans who can send what
        return migration(plans[old], plans[new], stage.chain, cluster, time)

    @cache
    def first_like(unavailable: tuple[bool, ...]) -> float:
        return next(time for time in moments if _unavailable(stage, time) == unavailable)

    done = [[-math.inf] * (count + 1) for _ in plans]
    done[0][0] = 0.0
    for at, time in enumerate(moments):
        unavailable = _unavailable(stage, time)
        for plan, pace in enumerate(paces):
            done[plan][at + 1] = max(done[plan][at + 1], done[plan][at] + pace[at] * GRID)  # (2)
        for old, new in permutations(range(len(plans)), 2):
            if math.isinf(done[old][at]):
                continue
            needed = moves(old, new, unavailable, first_like(unavailable))
            arrival = time + needed.seconds_before_step(cluster, time, known=known)
            step = stage.lasting(plans[new], time)
            state = needed.state.seconds(cluster, time)
            arrival += max(0.0, state - step) if math.isfinite(step) else state
            if arrival < seconds:
                cell = int(arrival / GRID)
                gained = paces[new][cell] * ((cell + 1) * GRID - arrival)
                done[new][cell + 1] = max(done[new][cell + 1], done[old][at] + gained)  # (3)
    return max(samples[count] for samples in done) / seconds


def _unavailable(stage: Playback, time: float) -> tuple[bool, ...]:
    """Return which changing links and devices are lost at a time."""
    return tuple(trace.at(time) == 0 for trace in stage.moving)
