"""Limit the work of level 1: which shapes and units it searches, and how many plans it
simulates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from argosy.solve.finalists.candidate import Candidate, diverse
from argosy.solve.finalists.incumbents import Incumbents

# On a large cluster level 1 closes a shape whose lower bound is within 2 % of the best plan.
CLOSE = 1.02
# On a large cluster level 1 tries no pipelines of a shape if they are estimated slower than this
# factor times the best plan.
HARDLY = 1.1
# Level 1 searches again if the exact engine finds its best plan slower than judged by more than
# this factor.
MISLED = 1.02
# On a large cluster level 1 simulates at most this many plans until one is as fast as judged.
PLAYS = 2
# The finalists that the exact engine simulates on level 1 have about this many tasks in all.
TASKS = 1_500
# On a large cluster level 1 simulates only finalists within this factor of the best.
_LIKELY = 1.005
# Level 1 searches finer units on at most this many devices, if at most this many vectors of units
# can be left.
REFINED, _FEW_STATES = 32, 160
# Rounds of steps that level 1 spends on a proof for few devices, and the gap at which it stops.
QUICK_ROUNDS, QUICK_GAP = 36, 0.003
# Further rounds, if there are plans with groups across nodes.
SPANNING_ROUNDS = 60
# Rounds for these plans if the settings leave them open.
MIXING_ROUNDS = 12
# A restricted search gets this factor times the best plan of the others as its ceiling, because
# level 1 skips shapes that it estimates near the ceiling.
ROOM = 1.2


def finalists(incumbents: Incumbents, level: int, *, is_quick: bool) -> list[Candidate]:
    """Return as many finalists as the exact engine simulates in a fraction of the search time."""
    found = incumbents.found
    tasks = 4 * len(found[0].plan) * found[0].shape.num_micro_batches
    most = max(1, TASKS // tasks) if level == 1 else max(4, 20 * TASKS // tasks)
    return diverse(incumbents.likely(_LIKELY) if is_quick else found, min(most, 8))


def is_refined(num_devices: int, counts: Sequence[int]) -> bool:
    """Return whether level 1 searches units of which there are ``counts``, although coarser ones
    have a plan."""
    return num_devices <= REFINED and math.prod(count + 1 for count in counts) <= _FEW_STATES
