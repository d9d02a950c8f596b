"""Read traces from files: Argosy's CSV with units, and two public formats of measured traces.

Argosy's CSV has a header: ``seconds``, then ``bandwidth`` or ``latency`` or both for a link,
``speed`` for a device. ``seconds`` and ``speed`` are plain numbers; the others carry their unit.
``#`` starts a comment line.

    seconds,bandwidth,latency
    0,25 Gbit/s,20 us
    30,4 Gbit/s,2 ms

Every bad row of a file is reported at once, up to a limit.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.cluster.trace import Trace
from argosy.document import read_text
from argosy.errors import InputError, Mismatch, Problem, bad_input, closest, invalid, show
from argosy.units import RATE, TIME

# Headers that a file may have.
_HEADERS = ("seconds,bandwidth", "seconds,bandwidth,latency", "seconds,latency", "seconds,speed")
# Largest number of problems that are reported for one file.
_MOST_PROBLEMS = 20

Columns = Mapping[str, Callable[[str], Any]]
"""Name of each column, in order, with the function that reads its text; it raises ``Mismatch``."""
Row = tuple[int, list[str]]
"""Line number and cells."""


@dataclass(frozen=True, kw_only=True)
class FileTrace:
    """A set of traces that a file has; ``None`` for a column that it does not have."""

    bandwidth: Trace | None = None
    """Bytes/s."""
    latency: Trace | None = None
    """Seconds."""
    speed: Trace | None = None
    """Speed relative to full speed."""


@dataclass(frozen=True)
class TraceColumns:
    """A table that holds the rows of a trace file, which several edges or devices may follow."""

    times: Sequence[float]
    values: Mapping[str, Sequence[float]]
    """Values by column."""

    def traces(
        self,
        *,
        bandwidth: float | None = None,
        latency: float | None = None,
        speed: float | None = None,
    ) -> FileTrace:
        """Return the traces; the keywords hold before the first row (SI units; by default that row
        does)."""
        initial = {"bandwidth": bandwidth, "latency": latency, "speed": speed}
        return FileTrace(
            **{
                name: _trace(self.times, values, initial[name])
                for name, values in self.values.items()
            }
        )


def read_columns(path: Path | str) -> TraceColumns:
    """Read the rows of a trace in Argosy's CSV."""
    rows = _rows(path, separator=",")
    columns = _columns(path, next(rows, (1, [])))
    times, *values = _read(path, rows, columns)
    return TraceColumns(times, dict(zip(list(columns)[1:], values, strict=True)))


def column_names(path: Path | str) -> list[str]:
    """Return the header of a trace in Argosy's CSV."""
    return list(_columns(path, next(_rows(path, separator=","), (1, []))))


def read_oboe(path: Path | str) -> Trace:
    """Return throughput in bytes/s, from lines of ``seconds Mbit/s`` without a header; the first
    holds from 0."""
    times, rates = _read(
        path, _rows(path, separator=None), {"seconds": _plain_number, "Mbit/s": _plain_number}
    )
    return _trace(times, [rate * 1e6 / 8 for rate in rates], None)


def rescaled(trace: Trace, *, capacity: float) -> Trace:
    """Return ``trace`` scaled so that its highest value is ``capacity``: it keeps its shape, not
    its measured values."""
    peak = max(trace.values)
    if peak == 0:
        raise bad_input("a trace that is not 0 everywhere", peak, "trace")
    return Trace(trace.times, tuple(value / peak * capacity for value in trace.values))


def read_bamboo(path: Path | str) -> dict[str, Trace]:
    """Return the availability (1 or 0) of each node, from lines of ``milliseconds,add|remove,node``
    without a header.

    A node that is not added at 0 starts at 0. Nodes are in the order in which they first appear.
    """
    columns: Columns = {"milliseconds": _plain_number, "action": _action, "node": str}
    steps: dict[str, list[tuple[float, float]]] = {}
    changes = _read(path, _rows(path, separator=","), columns, may_repeat=True)
    for time, available, node in zip(*changes, strict=True):
        steps.setdefault(node, []).append((time / 1000, available))
    return {node: Trace.from_steps(times, initial=0.0) for node, times in steps.items()}


def _trace(times: Sequence[float], values: Sequence[float], initial: float | None) -> Trace:
    start = values[0] if initial is None else initial
    return Trace.from_steps(zip(times, values, strict=True), initial=start)


def _rows(path: Path | str, *, separator: str | None) -> Iterator[Row]:
    """Yield lines that are neither blank nor comments, cut into cells; at white space without a
    separator."""
    for line, text in enumerate(read_text(path).removeprefix("\ufeff").splitlines(), start=1):
        if text.strip() and not text.lstrip().startswith("#"):
            if separator is None or '"' not in text:
                cells = text.split(separator)
            else:
                cells = _quoted_cells(path, line, text, separator)
            yield line, [cell.strip() for cell in cells]


def _quoted_cells(path: Path | str, line: int, text: str, separator: str) -> list[str]:
    try:
        return next(csv.reader([text], delimiter=separator))
    except csv.Error as error:
        raise invalid(file=str(path), line=line, found=str(error), expected="cells") from None


def _columns(path: Path | str, header: Row) -> Columns:
    line, cells = header
    actual = ",".join(cells)
    if actual not in _HEADERS or len(cells) != actual.count(",") + 1:
        raise invalid(
            "header",
            show(actual) if actual else "nothing",
            "one of the headers " + " ".join(_HEADERS),
            file=str(path),
            line=line,
            suggestion=closest(actual, _HEADERS),
        )
    readers = {
        "seconds": _plain_number,
        "bandwidth": RATE.parse,
        "latency": TIME.parse,
        "speed": _plain_number,
    }
    return {name: readers[name] for name in cells}


def _read(
    path: Path | str, rows: Iterable[Row], columns: Columns, *, may_repeat: bool = False
) -> list[list[Any]]:
    """Return the columns as values. The first one is a time, which must increase, or may stay equal
    if ``may_repeat``."""
    first = next(iter(columns))
    values: list[list[Any]] = [[] for _ in columns]
    readers = list(zip(columns, columns.values(), values, strict=True))
    problems: list[Problem] = []
    latest = -math.inf
    for line, cells in rows:
        known = len(problems)
        if len(cells) != len(readers):
            expected = f"{len(columns)} columns ({', '.join(columns)})"
            problems.append(Mismatch(len(cells), expected).at(file=str(path), line=line))
            continue
        for cell, (name, read, column) in zip(cells, readers, strict=True):
            try:
                column.append(read(cell))
            except Mismatch as mismatch:
                column.append(None)
                problems.append(mismatch.at(file=str(path), line=line, path=name))
        if len(problems) > known:
            continue
        time = values[0][-1]
        if time < latest or (time == latest and not may_repeat):
            late = Mismatch(time, f"{first} that increase, after {latest:g}")
            problems.append(late.at(file=str(path), line=line, path=first))
        else:
            latest = time
    if not values[0] and not problems:
        problems = [Problem(file=str(path), expected="at least one row of values", found="none")]
    if problems:
        raise InputError(_capped(path, problems))
    return values


def _capped(path: Path | str, problems: list[Problem]) -> Iterator[Problem]:
    yield from problems[:_MOST_PROBLEMS]
    if len(problems) > _MOST_PROBLEMS:
        more = f"{len(problems) - _MOST_PROBLEMS} more problems like these"
        yield Problem(file=str(path), message=more)


def _plain_number(text: str) -> float:
    expected = "a number of at least 0, without a unit"
    try:
        value = float(text)
    except ValueError:
        raise Mismatch(text, expected) from None
    if not 0 <= value < math.inf:
        raise Mismatch(text, expected)
    return value + 0.0  # -0.0 is 0


def _action(text: str) -> float:
    """Return the availability of a node after an action."""
    known = {"add": 1.0, "remove": 0.0}
    if text not in known:
        raise Mismatch(text, '"add" or "remove"', closest(text, known))
    return known[text]
