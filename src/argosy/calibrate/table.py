"""Published tables of measured runs: a CSV whose first line may name its source, and the machines
that they ran on.

A table says little about the machines. Here they are nodes of eight devices, joined inside by
NVLink at the rate of the device's generation and outside by the rate that its datasheet or the
table's source states. Of NVLink's stated rate collectives are taken to reach 0.79, as fitted on
every second row of torchtitan's reports.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from argosy.cluster.catalogue import device_kind
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document, read_text
from argosy.errors import InputError, Mismatch, Problem, show
from argosy.units import SIZE

Value = TypeVar("Value")

PER_NODE = 8
_INSIDE = {
    "V100": 150,
    "A100": 300,
    "A800": 200,
    "H100": 450,
    "H800": 200,
    "H200": 450,
    "B200": 900,
    "GB200": 900,
}
"""NVLink of a device, one way, in GB/s: datasheets of NVIDIA's SXM modules."""
_OUTSIDE = {"V100": 100, "A100": 1600, "A800": 1600}
"""NICs of a node together, in Gbit/s; all others: one 400 Gbit/s NIC for each device."""
_OUTSIDE_OTHERS = 3200
_NVLINK_REACHED = 0.79
_PCIE = 16
"""GB/s one way, for kinds without NVLink."""


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """The rows of a published table, each by its columns' names, with the line it stands on."""

    file: str
    rows: tuple[tuple[int, Mapping[str, str]], ...]

    def value(
        self, line: int, row: Mapping[str, str], column: str, parse: Callable[[str], Value]
    ) -> Value:
        """Parse a cell; one that cannot be parsed is an error that names line and column."""
        text = row[column].strip()
        try:
            return parse(text)
        except (ValueError, Mismatch) as error:
            expected = error.expected if isinstance(error, Mismatch) else _expected(parse)
            problem = Problem(
                file=self.file, line=line, path=column, found=show(text), expected=expected
            )
            raise InputError([problem]) from None

    def count(self, line: int, row: Mapping[str, str], column: str) -> int:
        return self.value(line, row, column, whole_number)

    def amount(self, line: int, row: Mapping[str, str], column: str) -> float:
        return self.value(line, row, column, positive)


def _expected(parse: Callable[[str], object]) -> str:
    return (parse.__doc__ or "another value").split("\n")[0].rstrip(".")


def whole_number(text: str) -> int:
    """a whole number above 0."""
    number = int(text)
    if not 0 < number < 10**12:
        raise ValueError
    return number


def positive(text: str) -> float:
    """a finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def gibibytes(text: str) -> float | None:
    """GiB, or nothing."""
    return SIZE.parse(f"{positive(text)} GiB") if text else None


def read_table(path: Path | str) -> PublishedTable:
    """Read a CSV with a head line, without the lines in front of it that name its source."""
    text = read_text(path).lstrip("\ufeff")
    lines = text.splitlines()
    skipped = next(
        (at for at, line in enumerate(lines) if line.strip() and not _is_source(line)), len(lines)
    )
    reader = csv.reader(io.StringIO("\n".join(lines[skipped:]), newline=""), strict=True)
    rows: list[tuple[int, dict[str, str]]] = []
    head: list[str] = []
    try:
        for cells in reader:
            line = skipped + reader.line_num
            if not head:
                head = [cell.strip() for cell in cells]
            elif len(cells) == len(head):
                rows.append((line, dict(zip(head, cells, strict=True))))
            elif cells:
                expected = f"a row of {len(head)} cells, as the head has"
                raise InputError(
                    [Problem(file=str(path), line=line, found=str(len(cells)), expected=expected)]
                )
    except csv.Error as error:
        problem = Problem(
            file=str(path),
            line=skipped + reader.line_num,
            found=str(error),
            expected="a row of a CSV",
        )
        raise InputError([problem]) from None
    return PublishedTable(file=str(path), rows=tuple(rows))


def _is_source(line: str) -> bool:
    """Whether a line is a comment about the source; a head may begin with a number sign, too."""
    return line.startswith("#") and line[1:].lstrip().lower().startswith("source")


def columns_of(path: Path | str) -> frozenset[str]:
    """The columns of a table with at least one row; none for any other file."""
    if Path(path).suffix != ".csv":
        return frozenset()
    rows = read_table(path).rows
    return frozenset(rows[0][1]) if rows else frozenset()


def kind_named(text: str) -> str:
    """a device kind of the catalogue."""
    return device_kind(text.strip().replace("_", "-")).name


@cache
def machines(kind: str, count: int) -> Cluster:
    """A cluster of so many devices of one kind, in nodes of eight."""
    family = kind.split("-")[0]
    inside = _NVLINK_REACHED * _INSIDE[family] if family in _INSIDE else _PCIE
    outside = _OUTSIDE.get(family, _OUTSIDE_OTHERS)
    node: dict[str, Any] = {"name": "n", "devices": {"kind": kind, "count": min(count, PER_NODE)}}
    if count > 1:
        medium = "nvlink" if family in _INSIDE else "pcie"
        node["intra"] = [{"medium": medium, "bandwidth": f"{inside} GB/s", "latency": "3 us"}]
    if count > PER_NODE:
        if count % PER_NODE:
            raise Mismatch(count, f"a multiple of {PER_NODE} devices")
        node |= {
            "count": count // PER_NODE,
            "nic": {"bandwidth": f"{outside} Gbit/s", "latency": "5 us"},
        }
    content = {"name": f"{kind.lower()}-x{count}", "nodes": [node]}
    return build_cluster(Document("table", content, {}), folder=Path())
