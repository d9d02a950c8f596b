"""Draw a timeline as a Gantt chart of characters: a row per stage, time from left to right.

Every column represents an equal part of the window. It shows the kind of work that took longest if
the device was busy for at least half of that time, else a dot. An action that is wide enough shows
its micro-batch:

    0 a0.0..3 |F0-F1-......B0====F2-B1====|

Devices of a stage share a row if their actions are at most half a column apart.
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

# Labels of rows have at most this many characters.
_MOST_LABEL = 20
# A chart is at least this many characters wide.
_LEAST_COLUMNS = 20


class SpanStyle(NamedTuple):
    """The letter, filler, colour and meaning by which one kind of span is drawn."""

    letter: str
    filler: str
    style: str
    meaning: str


# How every kind of span is drawn.
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
# How idle time is drawn.
_IDLE = SpanStyle(".", ".", "dim", "idle")


@dataclass(frozen=True)
class GanttBlock:
    """An action that is drawn from ``start`` to ``end`` (seconds)."""

    start: float
    end: float
    kind: SpanKind
    micro_batch: int | None = None

    @property
    def label(self) -> str:
        """Return the letter and the micro-batch that are drawn if there is room."""
        letter = "" if self.kind is SpanKind.TRANSFER else LOOKS[self.kind].letter
        return letter if self.micro_batch is None else f"{letter}{self.micro_batch}"


@dataclass(frozen=True)
class GanttRow:
    """A line of the chart that has a label."""

    label: str
    blocks: tuple[GanttBlock, ...]


@dataclass(frozen=True, kw_only=True)
class Window:
    """The part of time that is drawn, and its number of columns."""

    start: float
    end: float
    columns: int

    @property
    def step(self) -> float:
        """Return the seconds per column."""
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
    """Draw one iteration, or the time ``between`` two moments (seconds).

    The chart is at most ``width`` characters wide.
    """
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
    """Return the time of an iteration's first computation and that of its last end, in seconds."""
    spans = [span for span in timeline.spans if span.iteration == iteration]
    if not spans:
        recorded = max((span.iteration for span in timeline.spans), default=-1) + 1
        raise bad_input(
            f"one of the {recorded} recorded iterations, from 0", iteration, "iteration"
        )
    computing = [span.start for span in spans if not span.kind.is_communication]
    return min(computing, default=min(span.start for span in spans)), max(
        span.end for span in spans
    )


def _device_rows(timeline: Timeline, window: Window) -> list[GanttRow]:
    """Return a row for each set of devices of a stage that do the same work at the same time."""
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
        for group_stage, members in groups:
            if group_stage == stage and _alike(blocks[members[0]], blocks[device], window.step / 2):
                members.append(device)
                break
        else:
            groups.append((stage, [device]))
    return [
        GanttRow(_label(stage, members), tuple(blocks[members[0]])) for stage, members in groups
    ]


def _alike(
    first_row: Sequence[GanttBlock], second_row: Sequence[GanttBlock], tolerance: float
) -> bool:
    """Return whether two rows compute the same in the same order, at times within ``tolerance``."""
    pairs = [
        [block for block in row if block.kind is not SpanKind.COLLECTIVE]
        for row in (first_row, second_row)
    ]
    return len(pairs[0]) == len(pairs[1]) and all(
        (a.kind, a.micro_batch) == (b.kind, b.micro_batch)
        and abs(a.start - b.start) <= tolerance
        and abs(a.end - b.end) <= tolerance
        for a, b in zip(*pairs, strict=True)
    )


def _label(stage: int, devices: Sequence[str]) -> str:
    """Return the label of a row, shortened if it is too long."""
    text = names_in_short(devices) if stage < 0 else f"{stage} {names_in_short(devices)}"
    return text if len(text) <= _MOST_LABEL else text[: _MOST_LABEL - 1] + "…"


def _transfer_rows(timeline: Timeline, window: Window) -> list[GanttRow]:
    """Return a row for each ordered pair of nodes, with the duration of each micro-batch's
    transfer."""
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
    """Draw one row."""
    line = Text(f"{row.label:<{margin}} |", end="")
    for block, run in groupby(_columns(row.blocks, window)):
        count = len(list(run))
        look = LOOKS[block.kind] if block else _IDLE
        line.append(_fitted(block, look, count), style=look.style)
    return line.append("|")


def _fitted(block: GanttBlock | None, look: SpanStyle, count: int) -> str:
    """Return a label and fillers in ``count`` characters; only the letter if the label does not
    fit."""
    if block is None:
        return look.letter * count
    # Two numbers side by side would read as one.
    room = count - 1 if block.kind is SpanKind.TRANSFER else count
    label = block.label if len(block.label) <= room else look.letter
    return label + look.filler * (count - len(label))


def _columns(blocks: Iterable[GanttBlock], window: Window) -> list[GanttBlock | None]:
    """Return, per column, the block that is drawn in it; None if the device is idle."""
    overlaps: list[list[tuple[float, GanttBlock]]] = [[] for _ in range(window.columns)]
    for block in blocks:
        start = (block.start - window.start) / window.step
        end = (block.end - window.start) / window.step
        for column in range(max(math.floor(start), 0), min(math.ceil(end), window.columns)):
            overlaps[column].append((min(end, column + 1) - max(start, column), block))
    return [_winner(column) for column in overlaps]


def _winner(overlaps: Sequence[tuple[float, GanttBlock]]) -> GanttBlock | None:
    """Return the longest block of the kind of work that takes longest in a column.

    Computation comes before collectives. A transfer is often much shorter than a column and is
    shown if it takes at least a tenth of it.
    """
    computing = [pair for pair in overlaps if pair[1].kind is not SpanKind.COLLECTIVE]
    least = 0.1 if any(block.kind is SpanKind.TRANSFER for _, block in overlaps) else 0.5
    for candidates in (computing, overlaps):
        if sum(share for share, _ in candidates) >= least:
            totals: dict[SpanKind, float] = defaultdict(float)
            for share, block in candidates:
                totals[block.kind] += share
            kind = max(totals, key=lambda candidate: totals[candidate])
            return max(
                (pair for pair in candidates if pair[1].kind is kind), key=lambda pair: pair[0]
            )[1]
    return None


def axis(window: Window) -> str:
    """Return round times under the columns to which they belong.

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
    """Return the meaning of the letters, on as many lines as needed."""
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
