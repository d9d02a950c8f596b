"""Apply the changes of a cluster over time: a [[changes]] entry becomes traces on links and
devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from argosy.cluster.generators import BadParameter, generate
from argosy.cluster.schema import ChangeSchema
from argosy.cluster.topology import Cluster, is_meant
from argosy.cluster.trace import Trace
from argosy.cluster.tracefile import TraceColumns, read_columns
from argosy.document import Document, JsonObject, is_there
from argosy.errors import InputError, Mismatch, Problem, closest, raise_any
from argosy.units import RATE, TIME

_MOMENT = replace(TIME, example="30 s")
"""Quantity of a time in a trace; its example shows seconds, which users mean if they omit the
unit."""


def link_steps(edge: str, trace: Trace) -> JsonObject:
    """Return a change that makes an edge follow ``trace`` (bytes/s)."""
    return {"link": edge, "steps": _knots(trace, RATE.exact(trace.values))}


def device_steps(device: str, trace: Trace) -> JsonObject:
    """Return a change that makes a device follow ``trace`` (relative speed)."""
    return {"device": device, "steps": _knots(trace, trace.values)}


def _latency_steps(edge: str, trace: Trace) -> JsonObject:
    return {"link": edge, "latency_steps": _knots(trace, TIME.exact(trace.values))}


def _knots(trace: Trace, values: Iterable[object]) -> list[list[object]]:
    return list(map(list, zip(TIME.exact(trace.times), values, strict=True)))


def apply_change(
    cluster: Cluster, change: ChangeSchema, entry: Document, *, stated: Cluster, folder: Path
) -> tuple[Cluster, list[JsonObject]]:
    """Return the cluster after one [[changes]] entry, and the entry written out as steps.

    ``stated`` is the cluster before any change: its values hold before a first step, and a
    generator scales them.
    """
    problems = list(_contradictions(change, entry))
    raise_any(problems)
    if change.trace is not None and not (
        is_there(trace := folder / change.trace) and trace.is_file()
    ):
        raise entry.error(("trace",), f"a file at {trace}", change.trace)
    apply = _change_devices if change.link is None else _change_links
    try:
        return apply(cluster, change, entry, stated, folder)
    except InputError as error:
        raise InputError(entry.placed(problem, ()) for problem in error.problems) from None


def _contradictions(change: ChangeSchema, entry: Document) -> Iterator[Problem]:
    """Yield a problem for each group of fields that cannot be combined."""
    if (change.link is None) == (change.device is None):
        actual = "neither" if change.link is None else "both"
        yield replace(entry.problem((), 'either "link" or "device"'), found=actual)
    ways = [
        way
        for way in ("steps", "latency_steps", "trace", "generator")
        if getattr(change, way) is not None
    ]
    if len(ways) != 1 and ways != ["steps", "latency_steps"]:
        expected = 'exactly one of "steps" (and "latency_steps"), "trace", "generator"'
        actual = " and ".join(f'"{way}"' for way in ways) or "none"
        yield replace(entry.problem((), expected), found=actual)
    if change.device is not None and change.latency_steps is not None:
        yield entry.problem(("latency_steps",), 'only "steps" for a device, which has no latency')
    for field in ("parameters", "seed", "horizon"):
        if field in change.model_fields_set and change.generator is None:
            yield entry.problem((field,), 'a "generator" beside it')


def _change_links(
    cluster: Cluster, change: ChangeSchema, entry: Document, stated: Cluster, folder: Path
) -> tuple[Cluster, list[JsonObject]]:
    pattern, edges = change.link or "", stated.edges
    matches = (
        [pattern] if pattern in edges else sorted(edge for edge in edges if is_meant(edge, pattern))
    )
    if not matches:
        expected = f"an edge of the cluster, such as {', '.join(sorted(edges)[:4])}"
        raise entry.error(("link",), expected, pattern, suggestion=closest(pattern, edges))
    columns = _columns(change, len(matches), entry, folder)
    if columns is not None and "speed" in columns.values:
        expected = "a trace with a bandwidth or latency column for a link"
        raise entry.error(("trace",), expected, change.trace)
    links = list(cluster.links)
    written = []
    for offset, edge in enumerate(matches):
        first = stated.links[edges[edge][0]]
        parts = 2 if edges[edge][0] in stated.halved else 1
        now = (first.bandwidth.at(0), first.latency.at(0) * parts)
        bandwidth, latency = _link_traces(change, columns, now, entry, offset)
        latency_of_part = latency.scaled(1 / parts) if latency else None
        for index in edges[edge]:
            links[index] = replace(
                links[index],
                bandwidth=bandwidth or links[index].bandwidth,
                latency=latency_of_part or links[index].latency,
            )
        written += [link_steps(edge, bandwidth)] if bandwidth else []
        written += [_latency_steps(edge, latency)] if latency else []
    return replace(cluster, links=tuple(links)), written


def _link_traces(
    change: ChangeSchema,
    columns: TraceColumns | None,
    now: tuple[float, float],
    entry: Document,
    offset: int,
) -> tuple[Trace | None, Trace | None]:
    """Return the traces of a link's bandwidth and latency; ``now`` are those at time 0."""
    bandwidth, latency = now
    if columns is not None:
        traces = columns.traces(bandwidth=bandwidth, latency=latency)
        return traces.bandwidth, traces.latency
    if change.generator is not None:
        return _generated(change, bandwidth, entry, offset), None
    first = _steps(change.steps, RATE.parse, bandwidth, entry, "steps") if change.steps else None
    second = None
    if change.latency_steps:
        second = _steps(change.latency_steps, TIME.parse, latency, entry, "latency_steps")
    return first, second


def _change_devices(
    cluster: Cluster, change: ChangeSchema, entry: Document, stated: Cluster, folder: Path
) -> tuple[Cluster, list[JsonObject]]:
    pattern, known = change.device or "", stated.device_index
    matches = (
        [known[pattern]]
        if pattern in known
        else [at for name, at in known.items() if is_meant(name, pattern)]
    )
    if not matches:
        names = [device.name for device in cluster.devices]
        expected = f"a device of the cluster, such as {', '.join(names[:4])}"
        raise entry.error(("device",), expected, pattern, suggestion=closest(pattern, names))
    columns = _columns(change, len(matches), entry, folder)
    devices = list(cluster.devices)
    for offset, index in enumerate(matches):
        full = stated.devices[index].speed.at(0)
        if columns is not None:
            speed = columns.traces(speed=full).speed
            if speed is None:
                raise entry.error(
                    ("trace",), "a trace with a speed column for a device", change.trace
                )
        elif change.generator is not None:
            speed = _generated(change, full, entry, offset)
        else:
            speed = _steps(change.steps or [], _speed, full, entry, "steps")
        if max(speed.values) > _FASTEST:
            raise entry.error((), _SPEED, max(speed.values))
        devices[index] = replace(devices[index], speed=speed)
    written = [device_steps(devices[index].name, devices[index].speed) for index in matches]
    return replace(cluster, devices=tuple(devices)), written


def _columns(
    change: ChangeSchema, followers: int, entry: Document, folder: Path
) -> TraceColumns | None:
    """Return the trace file of a change that ``followers`` edges or devices follow; raise an
    ``InputError`` if it is too long, because each follower gets rows of its own."""
    if change.trace is None:
        return None
    columns = read_columns(folder / change.trace)
    rows = len(columns.times) * len(columns.values) * followers
    if rows > _MOST_ROWS:
        most = f"at most {_MOST_ROWS:,} values of traces"
        expected = f"{most}, counted for every edge or device that follows them"
        raise entry.error(("trace",), expected, rows)
    return columns


def _generated(change: ChangeSchema, nominal: float, entry: Document, offset: int) -> Trace:
    """Return the trace of a generator; edges and devices that one pattern matches get different
    seeds, in name order."""
    try:
        return generate(
            change.generator or "",
            change.parameters,
            nominal=nominal,
            seed=change.seed + offset,
            horizon=change.horizon,
        )
    except BadParameter as error:
        raise InputError([entry.mismatch(("parameters", error.parameter), error)]) from None
    except Mismatch as error:
        raise InputError([entry.mismatch(("generator",), error)]) from None


# Largest number of values of traces of one change, over all that follow it.
_MOST_ROWS = 10_000_000
# Largest speed of a device, relative to full speed.
_FASTEST = 100.0
# Expected speed of a device, for error messages.
_SPEED = f"a speed from 0 to {_FASTEST:g}, where 1 is full speed"


def _speed(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _FASTEST:
        raise Mismatch(value, _SPEED)
    return float(value)


def _steps(
    steps: list[Any], read: Callable[[object], float], initial: float, entry: Document, field: str
) -> Trace:
    problems: list[Problem] = []
    knots: list[tuple[float, float]] = []
    for index, step in enumerate(steps):
        if not isinstance(step, list) or len(step) != 2:
            problems.append(entry.problem((field, index), 'a pair such as ["30 s", value]', step))
            continue
        pair: list[float] = []
        for position, reader in enumerate((_MOMENT.parse, read)):
            try:
                pair.append(reader(step[position]))
            except Mismatch as error:
                problems.append(entry.mismatch((field, index, position), error))
        if len(pair) == 2:
            if knots and pair[0] <= knots[-1][0]:
                problems.append(entry.problem((field, index, 0), "times that increase", step[0]))
            knots.append((pair[0], pair[1]))
    raise_any(problems)
    return Trace.from_steps(knots, initial=initial)
