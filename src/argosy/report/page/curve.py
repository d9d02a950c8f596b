"""Draw small charts: the progress of a search, and the times of successive iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from argosy.units import TIME

Moments = Sequence[tuple[float, float, float]]
"""(CPU seconds, best iteration in seconds, lower bound in seconds) over a search."""
# Size and margins of the chart in pixels.
WIDTH, HEIGHT = 640.0, 150.0
_LEFT, _BOTTOM = 70.0, 22.0
# The largest number of points of a spark line.
_MOST_POINTS = 100


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Two step lines that are given in the coordinates of an SVG, with the labels of its axes."""

    best: str
    """The points of the best plan's polyline."""
    bound: str
    ticks: tuple[tuple[float, str], ...]
    """(y, iteration time) of the labels at the left edge."""
    end: str
    """The CPU time at the right edge."""
    in_words: str


def search_curve(history: Moments) -> Curve | None:
    """Draw the best plan and the lower bound over a search; return None if there is nothing to
    draw."""
    if len(history) < 2:
        return None
    last = history[-1]
    low = min(bound for _, _, bound in history)
    high = max(best for _, best, _ in history)
    span = (high - low) or high or 1.0

    def x(seconds: float) -> float:
        """Return the horizontal position of a CPU time."""
        return _LEFT + (WIDTH - _LEFT) * seconds / (last[0] or 1.0)

    def y(value: float) -> float:
        """Return the vertical position of an iteration time."""
        return 8 + (HEIGHT - _BOTTOM - 16) * (high - value) / span

    def steps(column: int) -> str:
        """Return the points of a step line."""
        points, before = [], None
        for moment in history:
            if before is not None:
                points.append((x(moment[0]), y(before)))
            before = moment[column]
            points.append((x(moment[0]), y(before)))
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)

    values = dict.fromkeys((high, last[1], last[2], low))
    kept: list[float] = []
    for value in values:
        if all(abs(y(value) - y(kept_value)) > 13 for kept_value in kept):
            kept.append(value)
    ticks = tuple((round(y(value), 1), TIME.short(value)) for value in kept)
    return Curve(
        best=steps(1),
        bound=steps(2),
        ticks=ticks,
        end=TIME.short(last[0]),
        in_words=_in_words(history),
    )


def _in_words(history: Moments) -> str:
    """Return the course of a search as sentences."""
    first, last = history[0], history[-1]
    words = (
        f"The best plan went from {TIME.format(first[1])} to {TIME.format(last[1])}, the "
        f"bound from {TIME.format(first[2])} to {TIME.format(last[2])}, in "
        f"{TIME.short(last[0])} of CPU time."
    )
    if any(later[2] < earlier[2] for earlier, later in pairwise(history)):
        words += (
            " The bound falls where finer plans are let in: each is one for all that had been let "
            "in by then."
        )
    return words


def spark_line(seconds: Sequence[float], top: float) -> str:
    """Return the points of a polyline in a box of 100 by 20, from 0 at the bottom to ``top``.

    The slowest of the iterations that share a point is drawn; an iteration that never ends touches
    the upper edge.
    """
    group = -(-len(seconds) // _MOST_POINTS)
    worst = [max(seconds[first : first + group]) for first in range(0, len(seconds), group)]
    heights = [19 - 18 * (value / top if math.isfinite(value) else 1.0) for value in worst]
    step = 100 / len(heights)
    return " ".join(
        f"{at * step:.1f},{y:.1f} {(at + 1) * step:.1f},{y:.1f}" for at, y in enumerate(heights)
    )
