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
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from argosy.cluster.catalogue import catalogue, device_kind
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document, read_text
from argosy.dtype import Dtype
from argosy.errors import ArgosyError, Mismatch, invalid, refused, show
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
# Words of a card's name beside its kind in the catalogue.
_BESIDE = re.compile(
    r"nvidia|amd|tesla|geforce|instinct|dgx|hgx|hbm\d?e?|sxm\d?|ecc", re.IGNORECASE
)
# Words of a card's name that state its memory.
_MEMORY = re.compile(r"(\d+)(?:GB|GiB)", re.IGNORECASE)
# Largest relative difference between a stated memory and that of the catalogue.
_ABOUT = 0.1
# Cells that a table has at least.
_FEWEST_CELLS = 4
# A number whose thousands are separated by commas.
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
# Texts in place of a figure: of a run that had too little memory, and of one not measured.
_OUT_OF_MEMORY = ("oom", "out of memory", "cuda oom")
_NOT_MEASURED = ("", "-", "n/a", "na", "none", "nan")
# Texts of settings that are off.
_OFF = dict.fromkeys(("0", "false", "no", "off", "", "-"), False)
# Share of NVLink's stated rate that collectives reach.
_NVLINK_REACHED = 0.79


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A row of a published table that has its file, its line and its cells by the plain names of
    their columns."""

    file: str
    line: int
    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells[plain_name(column)].strip()

    def has(self, column: str) -> bool:
        """Return whether the table has such a column."""
        return plain_name(column) in self.cells

    def value(self, column: str, parse: Callable[[str], Value], part: str | None = None) -> Value:
        """Return the parsed value of a cell, or of a part of it; raise an ``InputError`` with line
        and column if it cannot be parsed."""
        text = self[column] if part is None else part.strip()
        try:
            return parse(text)
        except Mismatch as error:
            raise invalid(
                column,
                show(text),
                error.expected,
                file=self.file,
                line=self.line,
                suggestion=error.suggestion,
            ) from None

    def count(self, column: str, default: int | None = None) -> int:
        """Return a whole number; ``default`` if it is given and the table has no such column."""
        if default is not None and not self.has(column):
            return default
        return self.value(column, whole_number)

    def is_true(self, column: str) -> bool:
        """Return whether a setting is on; False if the table has no such column."""
        return self.has(column) and self.value(column, truth)

    def amount(self, column: str) -> float:
        return self.value(column, positive)


@dataclass(frozen=True, kw_only=True)
class RowsRead(Generic[Value]):
    """A record of the values that were read from a table, and of the rows that were not."""

    values: tuple[Value, ...]
    left_out: tuple[str, ...]
    """Why rows were left out, a sentence for each."""


def read_rows(
    path: Path | str, read: Callable[[TableRow, int], Iterable[Value]], *, partly: bool
) -> RowsRead[Value]:
    """Read every row of a table, given with its number.

    The first row that cannot be read raises an ``InputError``; if ``partly``, such rows are left
    out, unless none can be read.
    """
    values: list[Value] = []
    left_out: list[str] = []
    for number, row in enumerate(read_table(path)):
        try:
            values += read(row, number)
        except (ArgosyError, Mismatch) as error:
            place = f"{row.file}:{row.line}"
            sentence = str(error) if place in str(error) else f"{place}: {error}"
            if not partly:
                raise error if place in str(error) else refused(sentence) from None
            left_out.append(sentence)
    if not values and left_out:
        raise refused(left_out[0])
    return RowsRead(values=tuple(values), left_out=tuple(left_out))


def one_of(names: Mapping[str, Value]) -> Callable[[str], Value]:
    """Return a parser of the names of these values, in upper or lower case."""

    def parse(text: str) -> Value:
        by_lower_name = {name.lower(): value for name, value in names.items()}
        if text.lower() not in by_lower_name:
            raise Mismatch(text, f"one of {', '.join(names)}")
        return by_lower_name[text.lower()]

    return parse


def whole_number(text: str) -> int:
    """Return a whole number above 0; raise a ``Mismatch`` for any other text."""
    try:
        number = int(_plain(text).removesuffix(".0"))
    except ValueError:
        number = 0
    if not 0 < number < 10**12:
        raise Mismatch(text, "a whole number above 0")
    return number


def positive(text: str) -> float:
    """Return a finite number above 0; raise a ``Mismatch`` for any other text."""
    if text.lower() in _OUT_OF_MEMORY:
        raise Mismatch(text, "a run that ended, because only such runs are judged")
    try:
        number = float(_plain(text))
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise Mismatch(text, "a finite number above 0")
    return number


def _plain(text: str) -> str:
    """Return a number without the commas that separate its thousands."""
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def truth(text: str) -> bool:
    """Return whether a setting is on; an empty text means that it is off."""
    return one_of(dict.fromkeys(("1", "true", "yes", "on"), True) | _OFF)(text)


def gibibytes(text: str) -> float | None:
    """Return the bytes of a number of GiB; None if nothing was measured."""
    if text.lower() in _NOT_MEASURED:
        return None
    try:
        amount = positive(text.lower().removesuffix("gib").strip())
    except Mismatch as error:
        is_over = text.lower() in _OUT_OF_MEMORY
        raise Mismatch(text, error.expected if is_over else "GiB, or nothing") from None
    return SIZE.parse(f"{amount} GiB")


def read_table(path: Path | str) -> list[TableRow]:
    """Read a table with a head line, whose cells are separated by commas, semicolons or tabs;
    comments and blank lines are skipped."""
    lines = read_text(path).lstrip("\ufeff").splitlines()
    kept = [(number, line) for number, line in enumerate(lines, 1) if not _is_skipped(line)]
    separator = max(",;\t", key=kept[0][1].count) if kept else ","
    rows: list[TableRow] = []
    head: list[str] = []
    text = io.StringIO("\n".join(line for _, line in kept), newline="")
    reader = csv.reader(text, strict=True, delimiter=separator)
    line = 1
    try:
        for cells in reader:
            line = kept[reader.line_num - 1][0]
            if not head:
                head = [plain_name(cell) for cell in cells]
            elif len(cells) != len(head):
                expected = f"a row of {len(head)} cells, as the head has"
                raise invalid(file=str(path), line=line, found=str(len(cells)), expected=expected)
            elif any(map(str.strip, cells)):
                by_column = dict(zip(head, cells, strict=True))
                rows.append(TableRow(file=str(path), line=line, cells=by_column))
    except csv.Error as error:
        line = kept[reader.line_num - 1][0] if reader.line_num else line
        raise invalid(
            file=str(path), line=line, found=str(error), expected="a row of a CSV"
        ) from None
    return rows


def _is_skipped(line: str) -> bool:
    """Return whether a line is blank or a comment: it begins with ``#`` and names a source or has
    hardly any cells; a head line may begin with ``#`` too."""
    if not line.strip():
        return True
    names_source = line[1:].lstrip().lower().startswith("source")
    is_short = max(map(line.count, ",;\t")) < _FEWEST_CELLS - 1
    return line.startswith("#") and (names_source or is_short)


def columns_of(path: Path | str) -> frozenset[str]:
    """Return the plain names of the columns of a table with at least one row."""
    rows = read_table(path)
    return frozenset(rows[0].cells) if rows else frozenset()


@cache
def plain_name(column: str) -> str:
    """Return the name of a column without its spelling: in lower case, with one way to write units.

    >>> plain_name("Tokens/sec/GPU"), plain_name("memory (GiB)")
    ('tokens_per_s_per_gpu', 'memory_gib')
    """
    name = column.strip().lower().replace("/", " per ").replace("#", " num ")
    words = re.findall(r"[a-z0-9]+", name)
    return "_".join("s" if word in ("sec", "second") else word for word in words)


def kind_named(text: str) -> str:
    """Return the name of a device kind of the catalogue.

    Makers, sockets and kinds of memory in a card's name are ignored; a family of which the
    catalogue has one size of memory stands for that card, and so does a card whose size the
    catalogue's name omits.
    """
    words = [word for word in re.split(r"[\s_-]+", text.strip()) if not _BESIDE.fullmatch(word)]
    name = "-".join(words)
    without_size = "-".join(word for word in words if not _MEMORY.fullmatch(word))
    if without_size != name and _states_memory(without_size, words):
        name = without_size
    sizes = [
        kind.name
        for kind in catalogue()
        if re.fullmatch(rf"{re.escape(name)}-\d+GB", kind.name, re.IGNORECASE)
    ]
    is_known = any(kind.name.lower() == name.lower() for kind in catalogue())
    return sizes[0] if len(sizes) == 1 and not is_known else device_kind(name).name


def _states_memory(name: str, words: Iterable[str]) -> bool:
    """Return whether a kind of this name has the memory that one of the words states."""
    sizes = [float(found[1]) for word in words if (found := _MEMORY.fullmatch(word))]
    kinds = [kind for kind in catalogue() if kind.name.lower() == name.lower()]
    return any(abs(kind.memory / 2**30 / size - 1) < _ABOUT for kind in kinds for size in sizes)


@cache
def machines(kind: str, count: int) -> Cluster:
    """Return a cluster of ``count`` devices of one kind, in nodes of eight, or of the largest
    smaller number that divides ``count``."""
    per_node = max(size for size in range(1, PER_NODE + 1) if count % size == 0)
    family, *rest = kind.split("-")
    is_linked = family in _INSIDE and not set(rest) & set(_CARDS)
    inside = (
        _NVLINK_REACHED * _INSIDE[family] if is_linked else device_kind(kind).host_bandwidth / 1e9
    )
    outside = _OUTSIDE.get(family, _OUTSIDE_OTHERS)
    node: dict[str, Any] = {"name": "n", "devices": {"kind": kind, "count": per_node}}
    if per_node > 1:
        medium = "nvlink" if is_linked else "pcie"
        node["intra"] = [{"medium": medium, "bandwidth": f"{inside} GB/s", "latency": "3 us"}]
    if count > per_node:
        node |= {
            "count": count // per_node,
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
