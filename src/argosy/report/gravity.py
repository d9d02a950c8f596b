"""Show a gravity plan: tables of its domains and reasons, and a page with a step drawn to scale."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from argosy.cluster.topology import Cluster
from argosy.nbody.planning.plan import PricedDomains, StepPhase
from argosy.nbody.planning.pricing import BoxWork
from argosy.nbody.planning.reasons import StepReasons
from argosy.report.tables import plain_table
from argosy.timeline import Timeline
from argosy.units import SIZE, TIME

# The colour of every phase of a step.
_COLOURS = {StepPhase.TREE: "#7a9e9f", StepPhase.MESH: "#4f6d7a", StepPhase.PAIRS: "#eeb868"}
# Pixels: the width of the drawing, the height of a row, the width of the names beside it.
_WIDTH, _ROW, _LEFT = 900, 22, 130
# The largest number of devices that are drawn.
_MOST_ROWS = 128


def domain_table(cluster: Cluster, box: BoxWork, choice: PricedDomains) -> Table:
    """Return a table with a row per device: particles, planes, seconds and memory."""
    columns = ("device", "kind", "particles", "planes", "tree", "pairs", "mesh", "memory")
    table = plain_table(*columns, right=columns[2:])
    for row in domain_rows(cluster, box, choice):
        table.add_row(*row)
    return table


def domain_rows(cluster: Cluster, box: BoxWork, choice: PricedDomains) -> list[tuple[str, ...]]:
    """Return the cells of ``domain_table``."""
    rows = []
    starts = (0, *choice.domains.ends[:-1])
    for i, device in enumerate(cluster.devices):
        share = (choice.domains.ends[i] - starts[i]) / len(box.interactions)
        times = (choice.tree_seconds[i], choice.pair_seconds[i], choice.mesh_seconds[i])
        shown = [TIME.format(value, digits=3) if value else "-" for value in times]
        memory = SIZE.format(choice.memory[i], digits=3) + ("" if choice.fits[i] else " (too much)")
        rows.append(
            (
                device.name,
                device.kind.name,
                f"{100 * share:.2f} %",
                str(choice.domains.planes[i]),
                *shown,
                memory,
            )
        )
    return rows


def reason_lines(reasons: StepReasons) -> list[str]:
    """State in sentences what limits the speed of a step."""
    step = reasons.priced.step_seconds
    lines = [
        f"{reasons.slowest} computes longest: {TIME.format(reasons.computing)} of "
        f"{TIME.format(step)}; {100 * reasons.waiting / step:.0f} % of the step it waits for other "
        "devices or the network",
        (
            f"the slowest device computes {reasons.priced.balance:.3f} times as long as if all "
            "shared by speed"
        ),
    ]
    if reasons.busiest_link is not None:
        lines.append(
            f"busiest link: {reasons.busiest_link}, {100 * reasons.link_share:.0f} % of what "
            "it could carry"
        )
    return lines


def improvement_rows(reasons: StepReasons) -> list[tuple[str, str, str]]:
    """Return (change, step time, saving) for every improvement."""
    step = reasons.priced.step_seconds
    return [
        (
            improvement.change,
            TIME.format(improvement.step_seconds),
            f"{100 * (1 - improvement.step_seconds / step):.1f} %",
        )
        for improvement in reasons.improvements
    ]


def reasons_to_dict(reasons: StepReasons) -> dict[str, Any]:
    """Return the reasons as a dict for JSON, in seconds and shares of 1."""
    return {
        "step_seconds": reasons.priced.step_seconds,
        "slowest_over_ideal": reasons.priced.balance,
        "slowest_device": reasons.slowest,
        "computing_seconds": reasons.computing,
        "waiting_seconds": reasons.waiting,
        "busiest_link": reasons.busiest_link,
        "link_share": reasons.link_share,
        "improvements": [
            {"change": improvement.change, "step_seconds": improvement.step_seconds}
            for improvement in reasons.improvements
        ],
    }


def gravity_page(
    cluster: Cluster,
    box: BoxWork,
    reasons: StepReasons,
    compared: Sequence[tuple[str, float]],
    measured: Sequence[tuple[str, Timeline]] = (),
) -> str:
    """Return one self-contained HTML page that needs no network."""
    title = (
        f"{box.particles:.3g} particles on {cluster.name}: "
        f"{TIME.format(reasons.priced.step_seconds)} a step"
    )
    cut_rows = [(name, TIME.format(seconds)) for name, seconds in compared]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(line)}.</p>" for line in reason_lines(reasons)),
        "<h2>A step</h2>",
        _drawing(reasons.timeline),
        *(f"<h2>{html.escape(name)}</h2>{_drawing(timeline)}" for name, timeline in measured),
        "<h2>Domains</h2>",
        _table(
            ("device", "kind", "particles", "planes", "tree", "pairs", "mesh", "memory"),
            domain_rows(cluster, box, reasons.priced),
        ),
        "<h2>Other cuts</h2>",
        _table(("cut", "step"), cut_rows),
        "<h2>What would help</h2>",
        _table(("change", "step", "saves"), improvement_rows(reasons)),
    ]
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem "
        "0;text-align:left}svg{max-width:100%}"
    )
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{style}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _drawing(timeline: Timeline) -> str:
    """Draw the computations of the first step as an SVG, with a row per device."""
    spans = [
        span for span in timeline.spans if span.iteration == 0 and not span.kind.is_communication
    ]
    end = max((span.end for span in spans), default=1.0)
    devices = [name for name in timeline.devices if any(span.where == name for span in spans)][
        :_MOST_ROWS
    ]
    phases = list(StepPhase)
    marks = []
    for row, name in enumerate(devices):
        top = row * _ROW
        marks.append(f'<text x="0" y="{top + 15}" font-size="12">{html.escape(name)}</text>')
        for span in spans:
            if span.where == name and span.stage is not None and span.stage < len(phases):
                phase = phases[span.stage]
                left = _LEFT + span.start / end * _WIDTH
                width = max(span.seconds / end * _WIDTH, 0.5)
                about = f"<title>{phase}: {TIME.format(span.seconds)}</title>"
                box = f'x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}"'
                marks.append(f'<rect {box} fill="{_COLOURS[phase]}">{about}</rect>')
    legend = "".join(
        f'<rect x="{_LEFT + 110 * i}" y="{len(devices) * _ROW + 8}" width="12" height="12" '
        f'fill="{_COLOURS[phase]}"/>'
        f'<text x="{_LEFT + 110 * i + 18}" y="{len(devices) * _ROW + 18}" '
        f'font-size="12">{phase}</text>'
        for i, phase in enumerate(phases)
    )
    size = f'viewBox="0 0 {_LEFT + _WIDTH} {len(devices) * _ROW + 28}"'
    return (
        f'<svg {size} role="img" aria-label="a step, a row per '
        f'device">{"".join(marks)}{legend}</svg>'
    )
