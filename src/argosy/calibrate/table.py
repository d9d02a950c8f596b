"""Read published tables of measured runs (CSV), and build the machines that they ran on.

The first line of a table may name its source. A table states little about the machines. Here they
are nodes of eight devices, joined inside by the links of the device's kind and outside at the rate
that the datasheet or the table's source states. Kinds without such links exchange over PCIe, at the
rate of their copies to the host. Collectives are assumed to reach 0.79 of the links' stated rate,
as fitted on every second row of torchtitan's reports.
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
from argosy.dtype import Dtype
from argosy.errors import Mismatch, invalid, show
from argosy.units import SIZE
from argosy.workload.chain import Chain
from argosy.workload.huggingface import read_config
from argosy.workload.transformer import build_chain

Value = TypeVar("Value")

# Devices of a node.
PER_NODE = 8
_INSIDE = {
    "P100": 80,
    "V100": 150,
    "A100": 300,
    "A800": 200,
    "H100": 450,
    "H800": 200,
    "H20": 450,
    "H200": 450,
    "GH200": 450,
    "B200": 900,
    "GB200": 900,
    "MI300X": 448,
    "MI325X": 448,
    "MI355X": 537.6,
    "Gaudi2": 262.5,
    "Gaudi3": 525,
}
"""Links of a device to those of its node, one way, in GB/s: NVLink of NVIDIA's SXM modules, seven
links of AMD's modules, 21 ports of Intel's; datasheets."""
# Names of cards end in these words if they have no such links.
_CARDS = ("PCIe", "NVL")
_OUTSIDE = {"V100": 100, "A100": 1600, "A800": 1600}
"""NICs of a node together, in Gbit/s."""
# NICs of a node of any other kind, in Gbit/s: one of 400 Gbit/s for each device.
_OUTSIDE_OTHERS = 3200
# Share of NVLink's stated rate that collectives reach.
_NVLINK_REACHED = 0.79


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A row of a published table that has its file, its line and its cells by column."""

    file: str
    line: int
    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells[column].strip()

    def value(self, column: str, parse: Callable[[str], Value], part: str | None = None) -> Value:
        """Return the parsed value of a cell, or of a part of it; raise an ``InputError`` with line
        and column if it cannot be parsed."""
        text = self[column] if part is None else part.strip()
        try:
            return parse(text)
        except Mismatch as error:
            raise invalid(
                column, show(text), error.expected, file=self.file, line=self.line
            ) from None

    def count(self, column: str) -> int:
        return self.value(column, whole_number)

    def amount(self, column: str) -> float:
        return self.value(column, positive)


def one_of(names: Mapping[str, Value]) -> Callable[[str], Value]:
    """Return a parser of the names of these values."""

    def parse(text: str) -> Value:
        if text not in names:
            raise Mismatch(text, f"one of {', '.join(names)}")
        return names[text]

    return parse


def whole_number(text: str) -> int:
    """Return a whole number above 0; raise a ``Mismatch`` for any other text."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number < 10**12:
        raise Mismatch(text, "a whole number above 0")
    return number


def positive(text: str) -> float:
    """Return a finite number above 0; raise a ``Mismatch`` for any other text."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise Mismatch(text, "a finite number above 0")
    return number


def gibibytes(text: str) -> float | None:
    """Return the bytes of a number of GiB; None for an empty text."""
    if not text:
        return None
    try:
        amount = positive(text)
    except Mismatch:
        raise Mismatch(text, "GiB, or nothing") from None
    return SIZE.parse(f"{amount} GiB")


def read_table(path: Path | str) -> list[TableRow]:
    """Read a CSV with a head line; lines before it that name the source are skipped."""
    text = read_text(path).lstrip("\ufeff")
    lines = text.splitlines()
    skipped = next(
        (at for at, line in enumerate(lines) if line.strip() and not _is_source(line)), len(lines)
    )
    reader = csv.reader(io.StringIO("\n".join(lines[skipped:]), newline=""), strict=True)
    rows: list[TableRow] = []
    head: list[str] = []
    try:
        for cells in reader:
            line = skipped + reader.line_num
            if not head:
                head = [cell.strip() for cell in cells]
            elif len(cells) == len(head):
                by_column = dict(zip(head, cells, strict=True))
                rows.append(TableRow(file=str(path), line=line, cells=by_column))
            elif cells:
                expected = f"a row of {len(head)} cells, as the head has"
                raise invalid(file=str(path), line=line, found=str(len(cells)), expected=expected)
    except csv.Error as error:
        line = skipped + reader.line_num
        raise invalid(
            file=str(path), line=line, found=str(error), expected="a row of a CSV"
        ) from None
    return rows


def _is_source(line: str) -> bool:
    """Return whether a line is a comment about the source; a head line may begin with ``#`` too."""
    return line.startswith("#") and line[1:].lstrip().lower().startswith("source")


def columns_of(path: Path | str) -> frozenset[str]:
    """Return the columns of a table with at least one row; none for any other file."""
    if Path(path).suffix != ".csv":
        return frozenset()
    rows = read_table(path)
    return frozenset(rows[0].cells) if rows else frozenset()


def kind_named(text: str) -> str:
    """Return the name of a device kind of the catalogue."""
    return device_kind(text.strip().replace("_", "-")).name


@cache
def machines(kind: str, count: int) -> Cluster:
    """Return a cluster of ``count`` devices of one kind, in nodes of eight."""
    family, *rest = kind.split("-")
    is_linked = family in _INSIDE and not set(rest) & set(_CARDS)
    inside = (
        _NVLINK_REACHED * _INSIDE[family] if is_linked else device_kind(kind).host_bandwidth / 1e9
    )
    outside = _OUTSIDE.get(family, _OUTSIDE_OTHERS)
    node: dict[str, Any] = {"name": "n", "devices": {"kind": kind, "count": min(count, PER_NODE)}}
    if count > 1:
        medium = "nvlink" if is_linked else "pcie"
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


@cache
def published_gpt(name: str, source: str, tokens: int, vocabulary: int, *shape: int) -> Chain:
    """Return a GPT as tables describe it, whose ``shape`` is its width, heads and layers."""
    hidden, heads, layers = shape
    config = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": tokens,
        "vocab_size": vocabulary,
    }
    return build_chain(
        read_config(Document(name, config, {})).architecture,
        name=name,
        sequence_length=tokens,
        dtype=Dtype.FP16,
        optimizer="adam",
        source=source,
        fused_attention=False,
    )
