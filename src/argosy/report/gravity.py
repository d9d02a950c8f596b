"""Show a gravity plan: tables of its domains and reasons, and a page with a step drawn to scale."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment
from rich.table import Table

from argosy.cluster.topology import Cluster
from argosy.nbody.planning.plan import PricedDomains, StepPhase
from argosy.nbody.planning.pricing import BoxWork
from argosy.nbody.planning.reasons import StepReasons
from argosy.report.tables import plain_table
from argosy.timeline import Span, Timeline
from argosy.units import SIZE, TIME

# The colour of every phase of a step.
_COLOURS = {StepPhase.TREE: "#7a9e9f", StepPhase.MESH: "#4f6d7a", StepPhase.PAIRS: "#eeb868"}
# Columns of the table of devices; all but the first two are figures.
_COLUMNS = ("device", "kind", "particles", "planes", "tree", "pairs", "mesh", "memory")
# Pixels: the width of the drawing, the height of a row, the width of the names beside it.
_WIDTH, _ROW, _LEFT = 900, 22, 130
# The largest number of devices that are drawn.
_MOST_ROWS = 128


def domain_table(cluster: Cluster, box: BoxWork, choice: PricedDomains) -> Table:
    """Return a table with a row per device: particles, planes, seconds and memory."""
    table = plain_table(*_COLUMNS[:2], *(f">{column}" for column in _COLUMNS[2:]))
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
        shown = [TIME.short(value) if value else "-" for value in times]
        memory = SIZE.short(choice.memory[i]) + ("" if choice.fits[i] else " (too much)")
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
    step = TIME.format(reasons.priced.step_seconds)
    drawn = [("A step", reasons.timeline), *measured]
    cuts = [(name, TIME.format(seconds)) for name, seconds in compared]
    template = (resources.files("argosy.report") / "gravity.html").read_text(encoding="utf-8")
    return (
        Environment(autoescape=True, keep_trailing_newline=True)
        .from_string(template)
        .render(
            title=f"{box.particles:.3g} particles on {cluster.name}: {step} a step",
            lines=reason_lines(reasons),
            drawings=[(heading, _drawing(timeline)) for heading, timeline in drawn],
            tables=(
                ("Domains", _COLUMNS, domain_rows(cluster, box, reasons.priced)),
                ("Other cuts", ("cut", "step"), cuts),
                ("What would help", ("change", "step", "saves"), improvement_rows(reasons)),
            ),
            colours=_COLOURS,
            width=_WIDTH,
            row=_ROW,
            left=_LEFT,
        )
    )


def _drawing(timeline: Timeline) -> list[tuple[str, list[tuple[str, str, str, str]]]]:
    """Return the devices of a step, each with its bars: phase, place, length and time."""
    phases = list(StepPhase)
    bars: dict[str, list[Span]] = {name: [] for name in timeline.devices}
    for span in timeline.spans:
        if span.iteration == 0 and not span.kind.is_communication and span.where in bars:
            bars[span.where].append(span)
    end = max((span.end for spans in bars.values() for span in spans), default=1.0)
    return [
        (
            name,
            [
                (
                    phases[span.stage],
                    f"{_LEFT + span.start / end * _WIDTH:.1f}",
                    f"{max(span.seconds / end * _WIDTH, 0.5):.1f}",
                    TIME.format(span.seconds),
                )
                for span in spans
                if span.stage is not None and span.stage < len(phases)
            ],
        )
        for name, spans in list(bars.items())[:_MOST_ROWS]
        if spans
    ]
