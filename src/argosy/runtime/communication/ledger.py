"""Bound what a rank holds while it runs its row of the schedule. Needs no torch.

A gradient that a rank has sent is held until it has certainly arrived: until a forward arrives that
the previous stage ran after it had used the gradient (``answered``), until ``MOST_GRADIENTS`` more
were sent, or until the end of the step. ``benchmarks/memory_ledger.py`` replays these rules and
adds up the bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from argosy.plan.plan import Plan
from argosy.schedule import ActionKind, Schedule, ScheduleKind
from argosy.units import MIB

# Micro-batches whose gradients may be in flight at once, which bounds their memory.
MOST_GRADIENTS = 16
# Bytes of gradients that are summed together: large enough to be fast, small enough to need little
# additional memory.
BUCKET_BYTES = 32 * MIB
# Buckets in flight at once.
MOST_BUCKETS = 4


def lookahead(plan: Plan) -> int:
    """Return how many computations ahead receives are posted: k of each direction, at least two."""
    return 2 * max(2, plan.schedule.k if plan.schedule.kind is ScheduleKind.KFKB else 1)


def answered(schedule: Schedule) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """Return, per stage and micro-batch, the micro-batches whose gradients, sent by the stage, the
    previous stage had used when it ran the forward of that micro-batch.

    >>> from argosy.schedule import ScheduleSpec, build_schedule
    >>> answered(build_schedule(ScheduleSpec(), 2, 4))
    {(1, 0): (), (1, 1): (), (1, 2): (0,), (1, 3): (1,)}
    """
    proofs: dict[tuple[int, int], tuple[int, ...]] = {}
    used: dict[int, list[int]] = defaultdict(list)
    for row in schedule.rows:
        for action in row:
            if action.kind.is_gradient:
                used[action.stage].append(action.micro_batch)
            elif action.kind is ActionKind.FORWARD and action.stage + 1 < schedule.num_stages:
                proofs[action.stage + 1, action.micro_batch] = tuple(used.pop(action.stage, ()))
    return proofs
