"""Small pictures made of characters: bars, sparklines, and names of many devices in few letters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from argosy.cluster.trace import Trace

_LEVELS = "▁▂▃▄▅▆▇█"


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


def sparkline(trace: Trace, start: float, end: float, *, width: int = 24, top: float | None = None) -> str:
    """A trace between two times (seconds), each character the mean over its part of the time.

    ``top`` is the value of the highest character (default: the trace's own highest); 0 is the lowest.

    >>> sparkline(Trace.from_steps([(4, 2.0), (6, 8.0)], initial=8.0), 0, 8, width=8)
    '████▃▃██'
    """
    top = max(trace.values) if top is None else top
    step = (end - start) / width
    means = [trace.mean(start + index * step, start + (index + 1) * step) for index in range(width)]
    return "".join(_LEVELS[min(round(mean / top * 7), 7)] if top else _LEVELS[0] for mean in means)


def names_in_short(names: Iterable[str]) -> str:
    """Device or node names, with runs of consecutive numbers drawn together.

    >>> names_in_short(["a0.0", "a0.1", "a0.2", "v1.3"])
    'a0.0..2, v1.3'
    """
    runs: list[tuple[str, list[int]]] = []
    for name in names:
        stem = name.rstrip("0123456789")
        number = int(name[len(stem) :] or -1)
        if runs and runs[-1][0] == stem and runs[-1][1][-1] + 1 == number:
            runs[-1][1].append(number)
        else:
            runs.append((stem, [number]))
    return ", ".join(_run(stem, numbers) for stem, numbers in runs)


def _run(stem: str, numbers: Sequence[int]) -> str:
    if numbers[0] < 0:
        return stem
    last = f"..{numbers[-1]}" if len(numbers) > 1 else ""
    return f"{stem}{numbers[0]}{last}"
