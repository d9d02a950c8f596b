"""Small pictures made of characters: bars, sparklines, and names of many devices in few letters."""

from __future__ import annotations

from collections.abc import Iterable

from argosy.cluster.trace import Trace

_LEVELS = "▁▂▃▄▅▆▇█"
_MOST_DIGITS = 18
"""Of a number in a name; Python reads no more than some thousand."""


def bar(share: float, *, width: int = 10) -> str:
    """A share of 1 as a bar; what exceeds 1 is cut.

    >>> bar(0.42)
    '████░░░░░░'
    """
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)


def percent(share: float) -> str:
    """
    >>> percent(0.4213)
    '42 %'
    """
    return f"{share:.0%}".replace("%", " %")


def sparkline(
    trace: Trace, start: float, end: float, *, width: int = 24, top: float | None = None
) -> str:
    """A trace between two times (seconds), each character the mean over its part of the time.

    ``top`` is the value of the highest character (default: the trace's own highest); 0 is the
    lowest.

    >>> sparkline(Trace.from_steps([(4, 2.0), (6, 8.0)], initial=8.0), 0, 8, width=8)
    '████▃▃██'
    """
    top = max(trace.values) if top is None else top
    step = (end - start) / width
    means = [trace.mean(start + index * step, start + (index + 1) * step) for index in range(width)]
    return "".join(_LEVELS[min(round(mean / top * 7), 7)] if top else _LEVELS[0] for mean in means)


def names_in_short(names: Iterable[str]) -> str:
    """Device or node names, with runs of consecutive numbers drawn together.

    >>> names_in_short(["a0.0", "a0.1", "a0.2", "v1.3"]), names_in_short(["gpu08", "gpu09", "gpu10", "gpu011"])
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
    """Whether one number comes after another, both written in the same way: padded with zeros, or
    not."""
    if not digits or not before or len(digits) > _MOST_DIGITS or int(digits) != int(before) + 1:
        return False
    return len(digits) == len(before) or not (digits.startswith("0") or before.startswith("0"))
