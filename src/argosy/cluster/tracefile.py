"""Traces from files: our CSV with units, and two public formats of measured traces.

Ours has a header: ``seconds``, then ``bandwidth`` or ``latency`` or both for a link, ``speed`` for a device.
``seconds`` and ``speed`` are plain numbers; the others carry their unit. ``#`` starts a comment line.

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
from argosy.errors import InputError, Mismatch, Problem, bad_input, closest, show
from argosy.units import RATE, TIME

_HEADERS = ("seconds,bandwidth", "seconds,bandwidth,latency", "seconds,latency", "seconds,speed")
_MOST_PROBLEMS = 20

Columns = Mapping[str, Callable[[str], Any]]
"""Name of each column, in order, and how its text is read; a reader raises ``Mismatch``."""
Row = tuple[int, list[str]]
"""Line number and cells."""


@dataclass(frozen=True, kw_only=True)
class FileTrace:
    """The columns of a trace file; ``None`` for a column that it does not have."""

    bandwidth: Trace | None = None
    """Bytes/s."""
    latency: Trace | None = None
    """Seconds."""
    speed: Trace | None = None
    """Relative to full speed."""


def read_trace(
    path: Path | str,
    *,
    bandwidth: float | None = None,
    latency: float | None = None,
    speed: float | None = None,
) -> FileTrace:
    """A trace in our CSV; the keywords hold before its first row (SI units; by default that row does)."""
    header, *rows = _rows(path, separator=",") or [(1, [])]
    columns = _columns(path, header)
    values = _read(path, rows, columns)
    initial = {"bandwidth": bandwidth, "latency": latency, "speed": speed}
    times = [row[0] for row in values]
    traces = {}
    for index, name in enumerate(columns):
        if name != "seconds":
            traces[name] = _trace(times, [row[index] for row in values], initial[name])
    return FileTrace(**traces)


def read_oboe(path: Path | str) -> Trace:
    """Throughput in bytes/s, from lines of ``seconds  Mbit/s`` without a header; the first holds from 0."""
    values = _read(path, _rows(path, separator=None), {"seconds": _plain_number, "Mbit/s": _plain_number})
    return _trace([row[0] for row in values], [row[1] * 1e6 / 8 for row in values], None)


def rescaled(trace: Trace, *, capacity: float) -> Trace:
    """``trace`` scaled so that its highest value is ``capacity``: its shape, not its measured values."""
    peak = max(trace.values)
    if peak == 0:
        raise bad_input("a trace that is not 0 everywhere", peak, where="trace")
    return Trace(trace.times, tuple(value / peak * capacity for value in trace.values))


def read_bamboo(path: Path | str) -> dict[str, Trace]:
    """Availability (1 or 0) of each node, from lines of ``milliseconds,add|remove,node`` without a header.

    A node that is not added at 0 starts at 0. Nodes are in the order in which they first appear.
    """
    columns: Columns = {"milliseconds": _plain_number, "action": _action, "node": str}
    steps: dict[str, list[tuple[float, float]]] = {}
    for time, available, node in _read(path, _rows(path, separator=","), columns, may_repeat=True):
        steps.setdefault(node, []).append((time / 1000, available))
    return {node: Trace.from_steps(changes, initial=0.0) for node, changes in steps.items()}


def _trace(times: Sequence[float], values: Sequence[float], initial: float | None) -> Trace:
    start = values[0] if initial is None else initial
    return Trace.from_steps(zip(times, values, strict=True), initial=start)


def _rows(path: Path | str, *, separator: str | None) -> list[Row]:
    """Lines that are not blank and no comment, cut into cells; without a separator at white space."""
    rows = []
    for line, text in enumerate(read_text(path).removeprefix("\ufeff").splitlines(), start=1):
        if text.strip() and not text.lstrip().startswith("#"):
            try:
                cells = text.split() if separator is None else next(csv.reader([text], delimiter=separator))
            except csv.Error as error:
                raise InputError([Problem(file=str(path), line=line, found=str(error), expected="cells")]) from None
            rows.append((line, [cell.strip() for cell in cells]))
    return rows


def _columns(path: Path | str, header: Row) -> Columns:
    line, cells = header
    found = ",".join(cells)
    if found not in _HEADERS or len(cells) != found.count(",") + 1:
        raise InputError(
            [
                Problem(
                    file=str(path),
                    line=line,
                    path="header",
                    found=show(found) if found else "nothing",
                    expected="one of the headers " + " ".join(_HEADERS),
                    suggestion=closest(found, _HEADERS),
                )
            ]
        )
    readers = {
        "seconds": _plain_number,
        "bandwidth": RATE.parse,
        "latency": TIME.parse,
        "speed": _plain_number,
    }
    return {name: readers[name] for name in cells}


def _read(path: Path | str, rows: Iterable[Row], columns: Columns, *, may_repeat: bool = False) -> list[list[Any]]:
    """The rows as values. The first column is a time: it increases, or stays if it ``may_repeat``."""
    values: list[list[Any]] = []
    problems: list[Problem] = []
    latest = -math.inf
    for line, cells in rows:
        row, wrong = _read_row(cells, columns)
        if not wrong and (row[0] < latest or (row[0] == latest and not may_repeat)):
            name = next(iter(columns))
            wrong = [(name, Mismatch(row[0], f"{name} that increase, after {latest:g}"))]
        if not wrong:
            latest = row[0]
            values.append(row)
        problems += [_problem(path, line, name, mismatch) for name, mismatch in wrong]
    if not values and not problems:
        problems = [Problem(file=str(path), expected="at least one row of values", found="none")]
    if problems:
        raise InputError(_capped(path, problems))
    return values


def _read_row(cells: list[str], columns: Columns) -> tuple[list[Any], list[tuple[str | None, Mismatch]]]:
    """Values, and what is wrong as (column, mismatch)."""
    if len(cells) != len(columns):
        expected = f"{len(columns)} columns ({', '.join(columns)})"
        return [], [(None, Mismatch(len(cells), expected))]
    row: list[Any] = []
    wrong: list[tuple[str | None, Mismatch]] = []
    for cell, (name, read) in zip(cells, columns.items(), strict=True):
        try:
            row.append(read(cell))
        except Mismatch as mismatch:
            wrong.append((name, mismatch))
    return row, wrong


def _problem(path: Path | str, line: int, column: str | None, mismatch: Mismatch) -> Problem:
    return Problem(
        file=str(path),
        line=line,
        path=column,
        found=mismatch.found,
        expected=mismatch.expected,
        suggestion=mismatch.suggestion,
    )


def _capped(path: Path | str, problems: list[Problem]) -> Iterator[Problem]:
    yield from problems[:_MOST_PROBLEMS]
    if len(problems) > _MOST_PROBLEMS:
        more = f"{len(problems) - _MOST_PROBLEMS} more problems like these"
        yield Problem(file=str(path), found=more, expected="none")


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
    """What a node's availability becomes."""
    known = {"add": 1.0, "remove": 0.0}
    if text not in known:
        raise Mismatch(text, '"add" or "remove"', closest(text, known))
    return known[text]
