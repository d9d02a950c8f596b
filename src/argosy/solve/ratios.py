"""How much of everything each device takes, for a given program.

With ratio b_d of device d, speed s_d, W seconds x speed of splittable work and C the seconds that padded collectives
would take if one device held all:

    (1)  minimise  W max_d(b_d / s_d) + C max_d(b_d)   with  sum b = 1,  b_d <= cap_d

The optimum is b_d = min(a s_d, z, cap_d) for some a and z, and lies where z = a s_k, a s_k = cap_k or z = cap_k for
one device k: scan them.
(1) holds when all operations see the same relative speeds. They do not (matrix products and memory traffic differ), so
the final ratios come from the full linear programme over operations i and collectives j:

    (2)  minimise  sum_i c_i + sum_j m_j
         c_i >= (flop_i / speed_d + bytes_i / memory_d) b_d,   m_j >= n_j b_d,   sum b = 1,
         fixed_d + variable_d b_d <= memory of d,   b_d >= least

Operations with the same mix of FLOP and bytes share one c_i, so equal layers cost nothing extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from argosy.cost.group import Collective, Way
from argosy.solve.placement import Placement, Pricing, held_bytes
from argosy.space.rules import Choices

if TYPE_CHECKING:
    from argosy.solve.spmd import Program

LEAST = 1e-3
"""No device gets less than this share of an even one: a device that should do nothing is left out of the group."""


def closed_form(
    speeds: Sequence[float], work: float, padded: float, caps: Sequence[float] | None = None
) -> tuple[float, tuple[float, ...]]:
    """(1): its optimum and the ratios.

    >>> closed_form([2.0, 1.0, 1.0], 4.0, 0.0)
    (1.0, (0.5, 0.25, 0.25))
    >>> closed_form([2.0, 1.0, 1.0], 0.0, 3.0)[0]
    1.0
    """
    speed = np.asarray(speeds, dtype=float)
    cap = np.ones_like(speed) if caps is None else np.asarray(caps, dtype=float)
    if cap.sum() < 1 - 1e-12:
        return float("inf"), tuple(cap)
    best, answer = float("inf"), cap
    trials = [_filled(np.minimum(speed, limit), cap) for limit in speed]
    if caps is not None:
        trials += [_filled(np.ones_like(cap), np.minimum(level * speed, cap)) for level in cap / speed]
        trials += [_filled(speed, np.minimum(level, cap)) for level in cap]
    for ratios in trials:
        if ratios.sum() < 1 - 1e-9:
            continue
        value = work * float((ratios / speed).max()) + padded * float(ratios.max())
        if value < best:
            best, answer = value, ratios
    return best, tuple(float(ratio) for ratio in answer)


def _filled(weights: NDArray[np.float64], cap: NDArray[np.float64]) -> NDArray[np.float64]:
    """min(a weights, cap) with a such that it sums to 1."""
    order = np.argsort(cap / weights)
    held, rest = 0.0, float(weights.sum())
    for device in order:
        level = (1 - held) / rest
        if level * weights[device] <= cap[device] + 1e-15:
            return np.minimum(level * weights, cap)
        held += float(cap[device])
        rest -= float(weights[device])
    return cap


def best_ratios(program: Program, choices: Choices, pricing: Pricing) -> tuple[float, ...]:
    """(2) for a program; the program's own ratios if it has nothing to split."""
    work = _work(program, choices, pricing)
    padded = _padded_seconds(program)
    fixed, variable = _memory(program)
    if not work and not padded:
        return program.ratios
    return solve_ratios(
        np.array(work) if work else np.zeros((0, len(program.group))),
        padded,
        caps=[(limit - fixed) / variable if variable else 1.0 for limit in program.group.memory],
    )


def _work(program: Program, choices: Choices, pricing: Pricing) -> list[tuple[float, ...]]:
    """Seconds of splittable operations per device if it did all of them, one row per mix of FLOP and bytes."""
    placement = Placement(program.graph, choices, pricing, program.ratios)
    group = program.group
    mixes: dict[float, list[float]] = {}
    for index, row in enumerate(program.rows):
        flop, moved = placement.row_work(index)
        if row.units and (flop or moved):
            mix = round(flop / moved, 3) if moved else float("inf")
            total = mixes.setdefault(mix, [0.0, 0.0])
            total[0] += flop
            total[1] += moved
    return [
        tuple(flop / s + moved / m for s, m in zip(group.flops, group.memory_bandwidths, strict=True))
        for flop, moved in mixes.values()
    ]


def _padded_seconds(program: Program) -> float:
    """Seconds per unit of the largest share, of collectives whose cost follows it."""
    found = 0.0
    largest = max(program.ratios)
    for move in program.moves:
        follows = move.way is Way.PADDED or move.step.kind is Collective.ALL_TO_ALL
        if follows and largest > 0:
            found += move.seconds / largest
    return found


def _memory(program: Program) -> tuple[float, float]:
    """Bytes that every device holds, and bytes of which it holds its share."""
    fixed = variable = 0.0
    for value, delivery in enumerate(program.deliveries):
        amount, states = held_bytes(program.graph, value, delivery)
        if all(state.is_sharded for state in states):
            variable += amount
        else:
            fixed += amount
    return fixed, variable


def solve_ratios(
    work: NDArray[np.float64], padded: float, *, caps: Sequence[float] | None = None, least: float | None = None
) -> tuple[float, ...]:
    """(2) by HiGHS: ``work[i, d]`` seconds of mix i if device d did all of it."""
    import highspy

    mixes, count = work.shape
    floor = LEAST / count if least is None else least
    upper = [min(max(cap, floor), 1.0) for cap in caps] if caps is not None else [1.0] * count
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    shares = [solver.addVariable(lb=floor, ub=top, obj=0.0) for top in upper]
    slowest = [solver.addVariable(lb=0.0, obj=1.0) for _ in range(mixes)]
    largest = solver.addVariable(lb=0.0, obj=padded)
    for mix in range(mixes):
        for device in range(count):
            solver.addConstr(slowest[mix] >= float(work[mix, device]) * shares[device])
    for device in range(count):
        solver.addConstr(largest >= shares[device])
    solver.addConstr(sum(shares[1:], shares[0] + 0.0) == 1.0)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return tuple(cap / sum(upper) for cap in upper)
    found = np.clip(np.array(solver.getSolution().col_value[:count]), floor, None)
    return tuple(float(ratio) for ratio in found / found.sum())
