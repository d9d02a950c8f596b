"""Draw bars and sparklines of characters, and shorten lists of device names."""

from __future__ import annotations

from collections.abc import Iterable

from argosy.cluster.trace import Trace

# The characters of a sparkline, from lowest to highest.
_LEVELS = "▁▂▃▄▅▆▇█"
# The longest number in a name that is read as one; Python refuses numbers of some thousand digits.
_MOST_DIGITS = 18


def bar(share: float) -> str:
    """Return a share of 1 as a bar; a share above 1 is drawn as 1.

    >>> bar(0.42)
    '████░░░░░░'
    """
    full = round(min(max(share, 0.0), 1.0) * 10)
    return "█" * full + "░" * (10 - full)


def percent(share: float) -> str:
    """Return a share as a percentage.

    >>> percent(0.4213)
    '42 %'
    """
    return f"{share:.0%}".replace("%", " %")


def sparkline(trace: Trace, end: float, *, width: int = 24) -> str:
    """Draw a trace from 0 to ``end`` seconds; each character is the mean over its part of the time.

    The trace's own highest value is the highest character; 0 is the lowest.

    >>> sparkline(Trace.from_steps([(4, 2.0), (6, 8.0)], initial=8.0), 8, width=8)
    '████▃▃██'
    """
    top, step = max(trace.values), end / width
    means = [trace.mean(index * step, (index + 1) * step) for index in range(width)]
    return "".join(_LEVELS[min(round(mean / top * 7), 7)] if top else _LEVELS[0] for mean in means)


def names_in_short(names: Iterable[str]) -> str:
    """Join device or node names, with runs of consecutive numbers merged.

    >>> names_in_short(["a0.0", "a0.1", "a0.2", "v1.3"]), names_in_short(
    ...     ["gpu08", "gpu09", "gpu10", "gpu011"]
    ... )
    ('a0.0..2, v1.3', 'gpu08..10, gpu011')
    """
    runs: list[tuple[str, list[str]]] = []
    for name in names:
        stem = name.rstrip("0123456789")
        digits = name[len(stem) :]
        if runs and runs[-1][0] == stem and _follows(digits, runs[-1][1][-1]):
            runs[-1][1].append(digits)
        else:
            runs.append((stem, [digits]))
    return ", ".join(
        f"{stem}{run[0]}" + (f"..{run[-1]}" if len(run) > 1 else "") for stem, run in runs
    )


def _follows(digits: str, before: str) -> bool:
    """Return whether one number follows another, both padded with zeros or both not padded."""
    if not digits or not before or len(digits) > _MOST_DIGITS or int(digits) != int(before) + 1:
        return False
    return len(digits) == len(before) or not (digits.startswith("0") or before.startswith("0"))
