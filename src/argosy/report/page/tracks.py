"""Encode a timeline for the page's viewer as rows of small whole numbers.

Times are ticks of T / 250,000. A row of spans is a flat list of (gap since the last end, length,
code) with code = kind + 8 (micro-batch + 1), so that a span takes about ten characters. A row of an
amount over time is a flat list of (ticks since the last point, value in thousandths of the row's
top).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from argosy.cluster.host import with_host_links
from argosy.cluster.topology import Cluster
from argosy.document import JsonObject
from argosy.plan.plan import Plan
from argosy.timeline import Span, SpanKind, Timeline
from argosy.units import RATE, SIZE

# Ticks in which the duration of a timeline is divided.
TICKS = 250_000
# Kinds of spans; the viewer refers to them by index.
KINDS = tuple(SpanKind)
# The largest number of points of an amount over time.
_MOST_POINTS = 300
# The largest number of links that are shown.
_MOST_EDGES = 12


def timeline_tracks(label: str, timeline: Timeline, plan: Plan, cluster: Cluster) -> JsonObject:
    """Return everything that the viewer shows of one timeline."""
    tick = max(timeline.end, 1e-12) / TICKS
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if not span.kind.is_communication:
            spans[span.where].append(span)
    stages = {name: index for index, stage in enumerate(plan.stages) for name in stage.devices}
    devices = [
        {
            "label": name,
            "note": _kind(name, cluster),
            "stage": stages.get(name, _folded_stage(name)),
            "spans": _coded(spans[name], tick),
        }
        for name in timeline.devices
        if spans[name] or name in cluster.device_index
    ]
    return {
        "label": label,
        "seconds": timeline.end,
        "iterations": [round(end / tick) for end in timeline.iteration_ends],
        "devices": devices,
        "memory": _alike(
            [row for name, steps in timeline.memory if (row := _memory(name, steps, tick, cluster))]
        ),
        "links": _edges(timeline, tick, cluster),
    }


def _kind(name: str, cluster: Cluster) -> str:
    """Return the kind of a device, or that a name stands for several devices."""
    return (
        cluster.device(name).kind.name if name in cluster.device_index else "several devices as one"
    )


def _folded_stage(name: str) -> int | None:
    """Return the stage of a bundle of replicas with a name like ``stage3.0``, else None."""
    match = re.match(r"stage([0-9]{1,9})\.", name)
    return int(match[1]) if match else None


def _coded(spans: Sequence[Span], tick: float) -> list[int]:
    """Encode spans as the module's docstring describes."""
    numbers: list[int] = []
    last = 0
    for span in sorted(spans, key=lambda item: (item.start, item.end)):
        start, end = round(span.start / tick), round(span.end / tick)
        micro_batch = -1 if span.micro_batch is None else span.micro_batch
        numbers += [start - last, end - start, KINDS.index(span.kind) + 8 * (micro_batch + 1)]
        last = end
    return numbers


def _memory(
    name: str, steps: Sequence[tuple[float, float]], tick: float, cluster: Cluster
) -> JsonObject | None:
    """Return the row of a device's memory over time; None if it is not known."""
    if not steps or name not in cluster.device_index:
        return None
    limit = cluster.device(name).kind.memory
    peak = max(held for _, held in steps)
    note = f"at most {SIZE.short(peak)} of {SIZE.short(limit)}"
    top = max(peak, limit)
    return {
        "label": name,
        "note": note,
        **_area(steps, tick, top=top),
        "limit": round(1000 * limit / top),
    }


def _alike(rows: Sequence[JsonObject]) -> list[JsonObject]:
    """Merge the rows of devices of one kind that hold the same memory at every moment."""
    groups: dict[tuple[Any, ...], list[JsonObject]] = {}
    for row in rows:
        groups.setdefault((row["note"], row["limit"], *row["area"]), []).append(row)
    suffixes = [
        f" and {len(group) - 1} alike" if len(group) > 1 else "" for group in groups.values()
    ]
    return [
        group[0] | {"label": group[0]["label"] + text}
        for group, text in zip(groups.values(), suffixes, strict=True)
    ]


def _area(steps: Sequence[tuple[float, float]], tick: float, *, top: float) -> JsonObject:
    """Encode an amount over time as the module's docstring describes."""
    numbers: list[int] = []
    last = 0
    for time, value in _thinned(steps):
        at = round(time / tick)
        numbers += [at - last, round(1000 * value / top) if top else 0]
        last = at
    return {"area": numbers}


def _thinned(steps: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Yield at most ``_MOST_POINTS`` points; the largest of the merged points remains."""
    size = -(-len(steps) // _MOST_POINTS)
    for first in range(0, len(steps), size):
        group = steps[first : first + size]
        yield group[0][0], max(value for _, value in group)


def _edges(timeline: Timeline, tick: float, cluster: Cluster) -> list[JsonObject]:
    """Return the rates and the capacities of the busiest links over time.

    Both are in thousandths of the largest capacity. A transfer counts with its mean rate; if such
    rates add up to more than the capacity, the link is drawn as full.
    """
    capacity = {link.name: link.bandwidth for link in with_host_links(cluster).links}
    events: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        if span.bytes and span.end > span.start:
            rate = span.bytes / (span.end - span.start)
            for link in span.via:
                events[link] += [(span.start, rate), (span.end, -rate)]
    busiest = [
        use
        for use in sorted(timeline.links, key=lambda use: -use.utilisation)
        if use.link in capacity
    ]
    rows = []
    for use in busiest[:_MOST_EDGES]:
        trace = capacity[use.link]
        times = [0.0, *trace.knots_between(0.0, timeline.end), timeline.end]
        allowed = [(time, trace.at(time)) for time in times]
        top = max(value for _, value in allowed)
        note = f"{100 * use.utilisation:.0f} % of {RATE.short(top)}"
        carried = [(time, min(rate, trace.at(time))) for time, rate in _running(events[use.link])]
        area, bound = _area(carried, tick, top=top), _area(allowed, tick, top=top)
        rows.append({"label": use.link, "note": note, **area, "capacity": bound["area"]})
    return rows


def _running(events: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the sum of rates that begin and end, at every moment of change."""
    steps: list[tuple[float, float]] = []
    total = 0.0
    for time, change in sorted(events):
        total += change
        if steps and steps[-1][0] == time:
            steps[-1] = (time, total)
        else:
            steps.append((time, total))
    return [(time, max(value, 0.0)) for time, value in steps]
