"""Compute the rates of the same flows over many changes of bandwidth at once.

While no flow starts or ends, only the knots T[0] < T[1] < ... of the links' traces change the
rates. They are computed for all knots of a window together, by the progressive filling of
``fairshare`` on arrays:

    (1)  rates[k, f] = max-min fair rate of flow f on [T[k], T[k+1])
    (2)  moved[k, f] = sum over j < k of rates[j, f] (T[j+1] - T[j])

The bytes that a flow has moved are linear between two knots, so its end is found by bisection in
(2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from argosy.cluster.trace import FloatArray, Trace

# A window with fewer knots than this is not worth the arrays: its knots are handled as events.
_FEWEST_KNOTS = 16
# The largest number of knots in one window, which limits the size of the arrays.
_MOST_KNOTS = 4096


@dataclass(frozen=True, eq=False)
class Foresight:
    """The bytes that flows move between the knots of a window, while no other flow starts or
    ends."""

    times: FloatArray
    rates: FloatArray
    moved: FloatArray

    @property
    def end(self) -> float:
        """Return the time of the last knot in seconds."""
        return float(self.times[-1])

    def bytes_until(self, flow: int, time: float) -> float:
        """Return the bytes that a flow has moved between the first knot and ``time``."""
        knot = min(max(int(self.times.searchsorted(time, "right")) - 1, 0), len(self.rates) - 1)
        return float(self.moved[knot, flow] + self.rates[knot, flow] * (time - self.times[knot]))

    def end_of(self, flow: int, remaining: float) -> float:
        """Return when a flow has moved ``remaining`` bytes since the first knot.

        The result is infinite if that is after the last knot.
        """
        knot = int(self.moved[:, flow].searchsorted(remaining, "left"))
        if knot == 0:
            return float(self.times[0])
        if knot == len(self.times):
            return math.inf
        before = knot - 1
        return float(
            self.times[before] + (remaining - self.moved[before, flow]) / self.rates[before, flow]
        )


def foresee(
    flows: Sequence[Sequence[int]], bandwidths: Mapping[int, Trace], now: float, until: float
) -> Foresight | None:
    """Compute the rates of flows from ``now`` to ``until``, or as far as a window reaches.

    ``flows`` has the links of every flow, ``bandwidths`` the trace of every link. Returns None if
    there are few knots before ``until``.
    """
    times = _window(bandwidths, now, until)
    if times is None:
        return None
    links = sorted(bandwidths)
    capacity = np.stack([_values(bandwidths[link], times[:-1]) for link in links], axis=1)
    place = {link: index for index, link in enumerate(links)}
    crosses = np.zeros((len(flows), len(links)))
    for flow, crossed in enumerate(flows):
        crosses[flow, [place[link] for link in crossed]] = 1.0
    rates = _fair_rates(crosses, capacity)
    moved = np.zeros((len(times), len(flows)))
    np.cumsum(rates * np.diff(times)[:, None], axis=0, out=moved[1:])
    return Foresight(times, rates, moved)


def _window(bandwidths: Mapping[int, Trace], now: float, until: float) -> FloatArray | None:
    """Return ``now`` and the knots after it, up to ``until`` or ``_MOST_KNOTS``; None if they are
    few."""
    varying = {trace for trace in bandwidths.values() if not trace.is_constant}
    end, parts = until, []
    for trace in varying:
        times = trace.steps[0]
        first = int(times.searchsorted(now, "right"))
        part = times[first : first + _MOST_KNOTS]
        if first + _MOST_KNOTS < len(times):
            end = min(end, float(part[-1]))
        parts.append(part)
    if not parts:
        return None
    knots = np.unique(np.concatenate(parts))
    knots = knots[: int(knots.searchsorted(end, "right"))][:_MOST_KNOTS]
    return np.concatenate(([now], knots)) if len(knots) >= _FEWEST_KNOTS else None


def _values(trace: Trace, times: FloatArray) -> FloatArray:
    """Return the values of a trace at some times."""
    knots, values = trace.steps
    return values[np.maximum(knots.searchsorted(times, "right") - 1, 0)]


def _fair_rates(crosses: FloatArray, capacity: FloatArray) -> FloatArray:
    """Return the max-min fair rates (1), with one row for every row of ``capacity``.

    Each round fills one link of every row.
    """
    rows = np.arange(len(capacity))
    rates = np.zeros((len(capacity), len(crosses)))
    is_open = np.ones(rates.shape)
    left = capacity.copy()
    while is_open.any():
        users = is_open @ crosses
        level = np.divide(left, users, out=np.full(left.shape, math.inf), where=users > 0)
        tightest = level.argmin(axis=1)
        filled = is_open * crosses[:, tightest].T
        share = np.where(np.isfinite(level[rows, tightest]), level[rows, tightest], 0.0)
        rates += filled * share[:, None]
        left = np.maximum(left - (filled @ crosses) * share[:, None], 0.0)
        is_open -= filled
    return rates
