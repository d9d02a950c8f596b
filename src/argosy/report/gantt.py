"""A timeline as a Gantt chart made of characters: a row per stage, time from left to right.

Every column stands for an equal part of the window. It shows what the device did for at least half
of that time: the kind of work that took longest, else a dot. An action that is wide enough carries
its micro-batch:

    0 a0.0..3 |F0-F1-......B0====F2-B1====|

Devices of a stage share a row while none of their actions lie more than half a column apart.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from rich.text import Text

from argosy.errors import bad_input
from argosy.report.marks import names_in_short
from argosy.report.summary import node_pair
from argosy.timeline import SpanKind, Timeline
from argosy.units import TIME

_MOST_LABEL = 20
_LEAST_COLUMNS = 20


class SpanStyle(NamedTuple):
    """How one kind of span is drawn."""

    letter: str
    filler: str
    style: str
    meaning: str


LOOKS = {
    SpanKind.FORWARD: SpanStyle("F", "-", "black on cyan", "forward"),
    SpanKind.BACKWARD: SpanStyle("B", "=", "black on green", "backward"),
    SpanKind.INPUT_GRADIENT: SpanStyle("I", "=", "black on green", "input gradient"),
    SpanKind.WEIGHT_GRADIENT: SpanStyle("W", "~", "black on yellow", "weight gradient"),
    SpanKind.UPDATE: SpanStyle("U", "u", "black on magenta", "update"),
    SpanKind.COLLECTIVE: SpanStyle(":", ":", "blue", "collective"),
    SpanKind.TRANSFER: SpanStyle(">", ">", "blue", "transfer"),
    SpanKind.COPY: SpanStyle(">", ">", "blue", "copy"),
}
_IDLE = SpanStyle(".", ".", "dim", "idle")


@dataclass(frozen=True)
class GanttBlock:
    """One thing to draw: from when to when (seconds), and what."""

    start: float
    end: float
    kind: SpanKind
    micro_batch: int | None = None

    @property
    def label(self) -> str:
        letter = "" if self.kind is SpanKind.TRANSFER else LOOKS[self.kind].letter
        return letter if self.micro_batch is None else f"{letter}{self.micro_batch}"


@dataclass(frozen=True)
class GanttRow:
    """A labelled line of the chart."""

    label: str
    blocks: tuple[GanttBlock, ...]


@dataclass(frozen=True, kw_only=True)
class Window:
    """The part of time that is drawn, and on how many columns."""

    start: float
    end: float
    columns: int

    @property
    def step(self) -> float:
        """Seconds per column."""
        return (self.end - self.start) / self.columns


def gantt(
    timeline: Timeline,
    *,
    iteration: int = 0,
    between: tuple[float, float] | None = None,
    width: int = 80,
    transfers: bool = False,
    most_rows: int = 24,
    legend: bool = True,
) -> Text:
    """One iteration, or all that happened ``between`` two times (seconds), at most ``width``
    characters wide."""
    start, end = between or iteration_bounds(timeline, iteration)
    draft = Window(start=start, end=end, columns=max(width - 12, _LEAST_COLUMNS))
    rows = _device_rows(timeline, draft)
    hidden = max(len(rows) - most_rows, 0)
    rows = rows[:most_rows] + (_transfer_rows(timeline, draft) if transfers else [])
    margin = max((len(row.label) for row in rows), default=0)
    window = replace(draft, columns=max(width - margin - 3, _LEAST_COLUMNS))
    chart = Text("\n").join([_line(row, window, margin) for row in rows])
    if hidden:
        chart.append(f"\n{'...':<{margin}}  {hidden} more rows")
    chart.append("\n" + " " * (margin + 2) + axis(window), style="dim")
    if legend:
        chart.append("\n").append_text(_legend(rows, margin + 2, width))
    return chart


def iteration_bounds(timeline: Timeline, iteration: int) -> tuple[float, float]:
    """From the first computation of an iteration to its last end."""
    spans = [span for span in timeline.spans if span.iteration == iteration]
    if not spans:
        recorded = max((span.iteration for span in timeline.spans), default=-1) + 1
        raise bad_input(
            f"one of the {recorded} recorded iterations, from 0", iteration, where="iteration"
        )
    computing = [span.start for span in spans if not span.kind.is_communication]
    return min(computing, default=min(span.start for span in spans)), max(
        span.end for span in spans
    )


def _device_rows(timeline: Timeline, window: Window) -> list[GanttRow]:
    """A row for each set of devices of a stage that do the same at the same time."""
    blocks: dict[str, list[GanttBlock]] = {device: [] for device in timeline.devices}
    stage_of: dict[str, int] = {}
    for span in timeline.spans:
        device = span.where.partition(">")[0]
        if span.kind in (SpanKind.TRANSFER, SpanKind.COPY) or device not in blocks:
            continue
        if span.stage is not None and not span.kind.is_communication:
            stage_of[device] = min(span.stage, stage_of.get(device, span.stage))
        if span.end > window.start and span.start < window.end:
            numbered = None if span.kind is SpanKind.COLLECTIVE else span.micro_batch
            blocks[device].append(GanttBlock(span.start, span.end, span.kind, numbered))
    groups: list[tuple[int, list[str]]] = []
    for device in timeline.devices:
        stage = stage_of.get(device, -1)
        for other, members in groups:
            if other == stage and _alike(blocks[members[0]], blocks[device], window.step / 2):
                members.append(device)
                break
        else:
            groups.append((stage, [device]))
    return [
        GanttRow(_label(stage, members), tuple(blocks[members[0]])) for stage, members in groups
    ]


def _alike(one: Sequence[GanttBlock], other: Sequence[GanttBlock], tolerance: float) -> bool:
    """Whether the same is computed in the same order, at times that differ by no more than
    ``tolerance``."""
    pairs = [
        [block for block in row if block.kind is not SpanKind.COLLECTIVE] for row in (one, other)
    ]
    return len(pairs[0]) == len(pairs[1]) and all(
        (a.kind, a.micro_batch) == (b.kind, b.micro_batch)
        and abs(a.start - b.start) <= tolerance
        and abs(a.end - b.end) <= tolerance
        for a, b in zip(*pairs, strict=True)
    )


def _label(stage: int, devices: Sequence[str]) -> str:
    text = names_in_short(devices) if stage < 0 else f"{stage} {names_in_short(devices)}"
    return text if len(text) <= _MOST_LABEL else text[: _MOST_LABEL - 1] + "…"


def _transfer_rows(timeline: Timeline, window: Window) -> list[GanttRow]:
    """A row for each ordered pair of nodes, with the time from the first to the last byte of each
    micro-batch."""
    extent: dict[tuple[str, int, int | None, int | None], tuple[float, float]] = {}
    for span in timeline.spans:
        is_drawn = span.kind in (SpanKind.TRANSFER, SpanKind.COPY)
        if is_drawn and span.end > window.start and span.start < window.end:
            row = node_pair(span.where) if span.kind is SpanKind.TRANSFER else span.where
            key = (row, span.iteration, span.stage, span.micro_batch)
            start, end = extent.get(key, (math.inf, -math.inf))
            extent[key] = (min(start, span.start), max(end, span.end))
    rows: dict[str, list[GanttBlock]] = defaultdict(list)
    for (pair, _, _, micro_batch), (start, end) in extent.items():
        rows[pair].append(GanttBlock(start, end, SpanKind.TRANSFER, micro_batch))
    return [GanttRow(pair, tuple(blocks)) for pair, blocks in rows.items()]


def _line(row: GanttRow, window: Window, margin: int) -> Text:
    line = Text(f"{row.label:<{margin}} |", end="")
    for block, run in groupby(_columns(row.blocks, window)):
        count = len(list(run))
        look = LOOKS[block.kind] if block else _IDLE
        line.append(_fitted(block, look, count), style=look.style)
    return line.append("|")


def _fitted(block: GanttBlock | None, look: SpanStyle, count: int) -> str:
    """A label and fillers in ``count`` characters; the letter alone where the label does not
    fit."""
    if block is None:
        return look.letter * count
    room = (
        count - 1 if block.kind is SpanKind.TRANSFER else count
    )  # two bare numbers side by side read as one
    label = block.label if len(block.label) <= room else look.letter
    return label + look.filler * (count - len(label))


def _columns(blocks: Iterable[GanttBlock], window: Window) -> list[GanttBlock | None]:
    """Per column, the block that stands for it, or None where the device is idle."""
    overlaps: list[list[tuple[float, GanttBlock]]] = [[] for _ in range(window.columns)]
    for block in blocks:
        start, end = (
            (block.start - window.start) / window.step,
            (block.end - window.start) / window.step,
        )
        for column in range(max(math.floor(start), 0), min(math.ceil(end), window.columns)):
            overlaps[column].append((min(end, column + 1) - max(start, column), block))
    return [_winner(column) for column in overlaps]


def _winner(overlaps: Sequence[tuple[float, GanttBlock]]) -> GanttBlock | None:
    """Of the kind of work that takes longest in a column, the longest; collectives behind
    computation.

    A transfer is often much shorter than a column and is shown from a tenth of it on.
    """
    computing = [pair for pair in overlaps if pair[1].kind is not SpanKind.COLLECTIVE]
    least = 0.1 if any(block.kind is SpanKind.TRANSFER for _, block in overlaps) else 0.5
    for candidates in (computing, overlaps):
        if sum(share for share, _ in candidates) >= least:
            totals: dict[SpanKind, float] = defaultdict(float)
            for share, block in candidates:
                totals[block.kind] += share
            kind = max(totals, key=lambda one: totals[one])
            return max(
                (pair for pair in candidates if pair[1].kind is kind), key=lambda pair: pair[0]
            )[1]
    return None


def axis(window: Window) -> str:
    """Round times under the columns where they fall.

    >>> axis(Window(start=0.0, end=3.0, columns=40))
    '|0 s         |1 s         |2 s'
    """
    least = 12 * window.step
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    text = ""
    for tick in range(
        math.ceil(window.start / step - 1e-9), math.floor(window.end / step + 1e-9) + 1
    ):
        column = int((tick * step - window.start) / window.step + 1e-9)
        mark = f"|{TIME.format(tick * step, digits=6) if tick else '0 s'}"
        if column + len(mark) > window.columns:
            mark = "|"
        if column < window.columns:
            text = text.ljust(column) + mark
    return text


def _legend(rows: Sequence[GanttRow], margin: int, width: int) -> Text:
    """What the letters mean, on as many lines as that takes."""
    drawn = {block.kind for row in rows for block in row.blocks}
    looks = [look for kind, look in LOOKS.items() if kind in drawn]
    legend, used = Text(" " * margin), margin
    for look in (*looks, _IDLE):
        word = Text.assemble((look.letter, look.style), f" {look.meaning}")
        if used > margin and used + 2 + len(word) <= width:
            legend.append("  ")
            used += 2
        elif used > margin:
            legend.append("\n" + " " * margin)
            used = margin
        legend.append_text(word)
        used += len(word)
    return legend
