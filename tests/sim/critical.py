"""Where the time of a timeline goes, written down for laws: the critical path by what it was spent
on."""

from __future__ import annotations

from collections import defaultdict

from argosy.timeline import Timeline


def critical_shares(timeline: Timeline) -> dict[str, float]:
    """Seconds, waiting included."""
    shares: dict[str, float] = defaultdict(float)
    clock = 0.0
    for span in timeline.critical_path():
        shares["waiting"] += max(span.start - clock, 0.0)
        shares[f"{span.kind} on {span.where}"] += span.end - max(span.start, min(clock, span.end))
        clock = span.end
    return {what: seconds for what, seconds in shares.items() if seconds > 0}
