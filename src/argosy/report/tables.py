"""Rich tables for the terminal; each fits into 80 columns."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.table import Table
from rich.text import Text

from argosy.report.marks import bar, names_in_short, percent, sparkline
from argosy.report.summary import DeviceFigures, LinkFigures, Summary
from argosy.units import RATE, SIZE, TIME

_MOST_PARTS = 4


def plain_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table without lines; the columns named in ``right`` are aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    aligned = set(right)
    for column in columns:
        table.add_column(column, justify="right" if column in aligned else "left", no_wrap=True)
    return table


def named_lines(lines: Iterable[tuple[str, str]]) -> Table:
    """A bold name and a text, one a line."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in lines:
        table.add_row(name, text)
    return table


def summary_table(summary: Summary) -> Table:
    """The first figures, one a line."""
    return named_lines(_summary_lines(summary))


def _summary_lines(summary: Summary) -> Iterable[tuple[str, str]]:
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
                f"{len(seconds) - summary.repeated:,}; the other {summary.repeated:,} repeat them exactly",
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
            f"{what} {percent(spent / total)}" for what, spent in summary.critical[:_MOST_PARTS]
        ]
        rest = sum(spent for _, spent in summary.critical[_MOST_PARTS:])
        parts += [f"other {percent(rest / total)}"] if rest else []
        yield "critical path", ", ".join(parts)


def device_table(devices: Iterable[DeviceFigures]) -> Table:
    """A line per device; neighbours with the same figures share one."""
    table = plain_table("device", "kind", "stage", "busy", "peak memory", right=("stage",))
    for _, group in groupby(devices, key=_shown):
        alike = list(group)
        one = alike[0]
        memory = Text(f"{_gib(one.peak_memory):>5} of {SIZE.format(one.memory, digits=3)}")
        if one.is_over:
            memory.append(
                f"  OVER by {SIZE.format(one.peak_memory - one.memory, digits=3)}", style="bold red"
            )
        else:
            memory.append(f"  {percent(one.peak_memory / one.memory)}", style="dim")
        table.add_row(
            names_in_short(device.name for device in alike),
            one.kind,
            ", ".join(map(str, one.stages)),
            f"{bar(one.utilisation)} {percent(one.utilisation):>5}",
            memory,
        )
    return table


def _shown(device: DeviceFigures) -> tuple[object, ...]:
    """What a line says, apart from the name."""
    return (device.kind, device.stages, percent(device.utilisation), _gib(device.peak_memory))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


def link_table(links: Iterable[LinkFigures], end: float, *, most: int = 6) -> Table:
    """The busiest links; those that change with a sparkline from 0 to ``end`` seconds."""
    table = plain_table("link", "busy", "carried", "bandwidth", right=("carried",))
    for link in list(links)[:most]:
        rate = RATE.format(link.bandwidth.at(0))
        changing = not link.bandwidth.is_constant and end > 0
        table.add_row(
            link.name,
            f"{bar(link.utilisation)} {percent(link.utilisation):>5}",
            SIZE.format(link.bytes, digits=3),
            f"{rate} {sparkline(link.bandwidth, 0.0, end, width=20)}" if changing else rate,
        )
    return table
