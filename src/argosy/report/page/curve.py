"""Small charts: how a search went, the best plan from above and the bound from below; one iteration
after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from argosy.units import TIME

Moments = Sequence[tuple[float, float, float]]
"""(CPU seconds, best iteration, bound)."""
WIDTH, HEIGHT = 640.0, 150.0
_LEFT, _BOTTOM = 70.0, 22.0
_MOST_POINTS = 100


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Two step lines in the coordinates of an SVG, with the numbers at its edges."""

    best: str
    """Points of a polyline."""
    bound: str
    ticks: tuple[tuple[float, str], ...]
    """(y, iteration time)."""
    end: str
    """CPU time at the right edge."""
    in_words: str


def search_curve(history: Moments) -> Curve | None:
    """None where there is nothing to draw."""
    if len(history) < 2:
        return None
    last = history[-1]
    low = min(bound for _, _, bound in history)
    high = max(best for _, best, _ in history)
    span = (high - low) or high or 1.0

    def x(seconds: float) -> float:
        return _LEFT + (WIDTH - _LEFT) * seconds / (last[0] or 1.0)

    def y(value: float) -> float:
        return 8 + (HEIGHT - _BOTTOM - 16) * (high - value) / span

    def steps(column: int) -> str:
        points, before = [], None
        for moment in history:
            if before is not None:
                points.append((x(moment[0]), y(before)))
            before = moment[column]
            points.append((x(moment[0]), y(before)))
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)

    first = history[0]
    words = (
        f"The best plan went from {TIME.format(first[1])} to {TIME.format(last[1])}, the bound from "
        f"{TIME.format(first[2])} to {TIME.format(last[2])}, in {TIME.format(last[0], digits=3)} of CPU time."
    )
    if any(later[2] < earlier[2] for earlier, later in pairwise(history)):
        words += " The bound falls where finer plans are let in: each is one for all that had been let in by then."
    values = dict.fromkeys((high, last[1], last[2], low))
    kept: list[float] = []
    for value in values:
        if all(abs(y(value) - y(other)) > 13 for other in kept):
            kept.append(value)
    ticks = tuple((round(y(value), 1), TIME.format(value, digits=3)) for value in kept)
    return Curve(
        best=steps(1),
        bound=steps(2),
        ticks=ticks,
        end=TIME.format(last[0], digits=3),
        in_words=words,
    )


def spark_line(seconds: Sequence[float], top: float) -> str:
    """Points of a polyline in a box of 100 by 20, from 0 at the bottom to ``top``; of iterations
    that would share a point the slowest is drawn, and one that never ends touches the upper
    edge."""
    group = -(-len(seconds) // _MOST_POINTS)
    worst = [max(seconds[first : first + group]) for first in range(0, len(seconds), group)]
    heights = [19 - 18 * (value / top if math.isfinite(value) else 1.0) for value in worst]
    step = 100 / len(heights)
    return " ".join(
        f"{at * step:.1f},{y:.1f} {(at + 1) * step:.1f},{y:.1f}" for at, y in enumerate(heights)
    )
