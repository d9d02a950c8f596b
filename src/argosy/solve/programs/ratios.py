"""Choose how much of everything each device takes, for a given program.

With ratio b_d of device d, the ratios come from a linear programme over operations i and
collectives:

    (1)  minimise  sum_i c_i + C m
         c_i >= (flop_i / speed_d + bytes_i / memory_d) b_d,   m >= b_d,   sum b = 1,   b_d >= least

Operations with the same mix of FLOP and bytes share one c_i, so equal layers cost nothing extra. If
all operations see the same relative speeds s_d (devices of one kind, slowed or not; otherwise
matrix products and memory traffic differ),
(1) is

    (2)  minimise  W max_d(b_d / s_d) + C max_d(b_d)   with  sum b = 1

and has a closed form: b_d is proportional to min(s_d, s_k) for one device k. All are tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from argosy.cost.group import CollectiveMethod, GroupCollective
from argosy.solve.programs.placement import Pricing, ProgramPlacement
from argosy.space.operations.rules import StateChoices

if TYPE_CHECKING:
    from argosy.solve.programs.spmd import Program

# No device gets less than this share of an even one: a device that should do nothing is left out of
# the group.
LEAST = 1e-3


def best_ratios(program: Program, choices: StateChoices, pricing: Pricing) -> tuple[float, ...]:
    """Return the ratios by (1) for a program, or its own if it has nothing to split."""
    work = _work(program, ProgramPlacement(program.graph, choices, pricing, program.ratios))
    padded = _padded_seconds(program)
    return solve_ratios(work, padded) if len(work) or padded else program.ratios


def _work(program: Program, placement: ProgramPlacement) -> NDArray[np.float64]:
    """Seconds of splittable operations per device if it did all of them, one row per mix of FLOP
    and bytes."""
    group = program.group
    mixes: dict[float, list[float]] = {}
    for index, row in enumerate(program.rows):
        flop, moved = placement.row_work(index)
        if row.units and (flop or moved):
            mix = round(flop / moved, 3) if moved else float("inf")
            total = mixes.setdefault(mix, [0.0, 0.0])
            total[0] += flop
            total[1] += moved
    speeds = list(zip(group.flops, group.memory_bandwidths, strict=True))
    rows = [[flop / s + moved / m for s, m in speeds] for flop, moved in mixes.values()]
    return np.array(rows) if rows else np.zeros((0, len(group)))


def _padded_seconds(program: Program) -> float:
    """Seconds per unit of the largest share, of collectives whose cost follows it."""
    follows = [
        move
        for move in program.moves
        if move.way is CollectiveMethod.PADDED or move.step.kind is GroupCollective.ALL_TO_ALL
    ]
    return sum(move.seconds for move in follows) / max(program.ratios)


def solve_ratios(
    work: NDArray[np.float64], padded: float, *, least: float | None = None
) -> tuple[float, ...]:
    """Return the ratios of (1).

    ``work[mix, device]`` has the seconds if the device did all of a mix; ``padded`` is C.
    """
    count = work.shape[1]
    floor = LEAST / count if least is None else least
    ratios = _closed_ratios(work, padded)
    return (
        ratios
        if ratios is not None and min(ratios) >= floor
        else _programme_ratios(work, padded, floor)
    )


def _closed_ratios(work: NDArray[np.float64], padded: float) -> tuple[float, ...] | None:
    """Return the ratios of (2) if they solve (1)."""
    total = work.sum(0)
    if not total.all() or not np.allclose(
        work * total[0], work[:, :1] * total, rtol=1e-9, atol=0.0
    ):
        return None
    return closed_form((1 / total).tolist(), 1.0, padded)[1]


def closed_form(
    speeds: Sequence[float], work: float, padded: float
) -> tuple[float, tuple[float, ...]]:
    """Return the optimum of (2) and its ratios.

    >>> closed_form([2.0, 1.0, 1.0], 4.0, 0.0)
    (1.0, (0.5, 0.25, 0.25))
    >>> closed_form([2.0, 1.0, 1.0], 0.0, 3.0)[0]
    1.0
    """
    speed = np.asarray(speeds, dtype=float)
    best, answer = math.inf, speed
    for limit in speed:
        limited = np.minimum(speed, limit)
        ratios = limited / limited.sum()
        value = work * float((ratios / speed).max()) + padded * float(ratios.max())
        if value < best:
            best, answer = value, ratios
    return best, tuple(float(ratio) for ratio in answer)


def _programme_ratios(work: NDArray[np.float64], padded: float, floor: float) -> tuple[float, ...]:
    """Return the ratios of (1) by HiGHS."""
    import highspy

    count = work.shape[1]
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    for _ in range(count):
        solver.addVar(floor, 1.0)
    solver.addRow(1.0, 1.0, count, list(range(count)), [1.0] * count)
    lines = [*work, *([np.full(count, padded)] if padded else [])]
    scale = max(float(seconds.max()) for seconds in lines)
    for number, seconds in enumerate(lines):
        # A c_i counts in seconds of its slowest device, and m in those of C.
        solver.addVar(0.0, highspy.kHighsInf)
        solver.changeColCost(count + number, float(seconds.max()) / scale)
        for device, part in enumerate(seconds / seconds.max()):
            solver.addRow(0.0, highspy.kHighsInf, 2, [count + number, device], [1.0, -float(part)])
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal, "even ratios are feasible"
    ratios = np.clip(np.array(solver.getSolution().col_value)[:count], floor, None)
    return tuple(float(ratio) for ratio in ratios / ratios.sum())
