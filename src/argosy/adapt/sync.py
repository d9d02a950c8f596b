"""Choose the number of steps that islands train between two exchanges, from the measured seconds of
steps and exchanges.

    (1)  H = the least number with which exchanges add at most ``share`` of the time of steps,
         within limits
    (2)  H changes only if (1) is off by more than ``_HYSTERESIS``, so that noise changes nothing

If steps continue during exchanges, H is the least number with which an exchange ends before its
result is due.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# H stays if its relative change would be at most this.
_HYSTERESIS = 0.25


@dataclass(frozen=True, kw_only=True)
class SyncLimits:
    """A range of numbers of steps that H may take."""

    least: int = 1
    most: int = 500
    share: float = 0.05
    """Share of the time of steps that exchanges may add."""


def next_sync_every(
    current: int,
    step_seconds: float,
    exchange_seconds: float,
    limits: SyncLimits,
    *,
    fragments: int = 1,
    overlap: int = 0,
) -> int:
    """Return H for the following exchanges; every island computes it from the same numbers."""
    if step_seconds <= 0 or exchange_seconds <= 0:
        return current
    if overlap:
        wanted = fragments * max(overlap + 1, math.ceil(exchange_seconds / step_seconds) + 1)
    else:
        wanted = math.ceil(fragments * exchange_seconds / (limits.share * step_seconds))
    least = max(limits.least, fragments * (overlap + 1))
    wanted = min(max(wanted, least), max(limits.most, least))
    wanted = -(-wanted // fragments) * fragments
    return wanted if abs(wanted - current) > _HYSTERESIS * current else current
