"""Build tables for the terminal; each of them fits into 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from itertools import groupby
from typing import ParamSpec

from rich.table import Table
from rich.text import Text

from argosy.report.marks import bar, names_in_short, percent, sparkline
from argosy.report.summary import DeviceFigures, LinkFigures, Summary
from argosy.units import GIB, RATE, SIZE, TIME

Arguments = ParamSpec("Arguments")

# The largest number of parts of the critical path that are listed.
MOST_PARTS = 4


def plain_table(*columns: str) -> Table:
    """Return a table without lines; a column whose heading follows ``>`` is aligned to the
    right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        heading = column.removeprefix(">")
        table.add_column(heading, justify="left" if heading == column else "right", no_wrap=True)
    return table


def named_lines(
    lines: Callable[Arguments, Iterable[tuple[str, str]]],
) -> Callable[Arguments, Table]:
    """Have a function that yields names and texts return a table with a line for each."""

    @wraps(lines)
    def shown(*given: Arguments.args, **named: Arguments.kwargs) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, text in lines(*given, **named):
            table.add_row(name, text)
        return table

    return shown


@named_lines
def summary_table(summary: Summary) -> Iterable[tuple[str, str]]:
    """Return the main figures, one per line."""
    seconds = summary.iteration_seconds
    if summary.mean_seconds is not None:
        text = TIME.format(summary.mean_seconds)
        if len(seconds) > 1:
            best, worst = TIME.format(min(seconds)), TIME.format(max(seconds))
            text += f" on average over {len(seconds)}, {best} at best, {worst} at worst"
        yield "iteration", text
        if summary.repeated:
            yield (
                "played",
                (
                    f"{len(seconds) - summary.repeated:,}; the other {summary.repeated:,} repeat "
                    "them exactly"
                ),
            )
        tokens = (
            f", {summary.tokens_per_second:,.0f} tokens/s"
            if summary.plan.model.sequence_length > 1
            else ""
        )
        yield "throughput", f"{summary.samples_per_second:.4g} samples/s{tokens}"
    yield "bubble", f"{percent(summary.bubble_fraction)} of the devices' time"
    total = sum(spent for _, spent in summary.critical)
    if total:
        parts = [
            f"{part_name} {percent(spent / total)}"
            for part_name, spent in summary.critical[:MOST_PARTS]
        ]
        rest = sum(spent for _, spent in summary.critical[MOST_PARTS:])
        parts += [f"other {percent(rest / total)}"] if rest else []
        yield "critical path", ", ".join(parts)


def device_table(devices: Iterable[DeviceFigures]) -> Table:
    """Return a table with a line per device; neighbours with equal figures share a line."""
    table = plain_table("device", "kind", ">stage", "busy", "peak memory")
    for _, group in groupby(devices, key=_shown):
        equal = list(group)
        first = equal[0]
        memory = Text(f"{gib(first.peak_memory):>5} of {SIZE.short(first.memory)}")
        if first.is_over:
            memory.append(
                f"  OVER by {SIZE.short(first.peak_memory - first.memory)}", style="bold red"
            )
        else:
            memory.append(f"  {percent(first.peak_memory / first.memory)}", style="dim")
        table.add_row(
            names_in_short(device.name for device in equal),
            first.kind,
            ", ".join(map(str, first.stages)),
            f"{bar(first.utilisation)} {percent(first.utilisation):>5}",
            memory,
        )
    return table


def _shown(device: DeviceFigures) -> tuple[object, ...]:
    """Return the cells of a device's line, apart from the name."""
    return (device.kind, device.stages, percent(device.utilisation), gib(device.peak_memory))


def gib(num_bytes: float) -> str:
    """Return bytes as a number of GiB."""
    return f"{num_bytes / GIB:.1f}"


def held_in_words(num_bytes: float) -> str:
    """Return held memory as a number of GiB, or with its unit if it is less than 1 GiB."""
    return gib(num_bytes) if num_bytes >= GIB else SIZE.short(num_bytes)


def link_table(links: Iterable[LinkFigures], end: float, *, most: int = 6) -> Table:
    """Return a table of the busiest links, with sparklines of those that change before ``end``
    seconds."""
    table = plain_table("link", "busy", ">carried", "bandwidth")
    for link in list(links)[:most]:
        rate = RATE.format(link.bandwidth.at(0))
        changing = not link.bandwidth.is_constant and end > 0
        table.add_row(
            link.name,
            f"{bar(link.utilisation)} {percent(link.utilisation):>5}",
            SIZE.short(link.bytes),
            f"{rate} {sparkline(link.bandwidth, end, width=20)}" if changing else rate,
        )
    return table
