"""How a cluster changes over time: a [[changes]] entry becomes traces on its links and devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from argosy.cluster.generators import BadParameter, generate
from argosy.cluster.schema import ChangeSchema
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.cluster.tracefile import read_trace
from argosy.document import Document, Location
from argosy.errors import InputError, Mismatch, Problem, closest
from argosy.units import RATE, TIME


def link_steps(edge: str, trace: Trace) -> dict[str, Any]:
    """A change that makes an edge follow ``trace`` (bytes/s)."""
    return {"link": edge, "steps": [[_seconds(t), RATE.format(v, digits=None)] for t, v in _knots(trace)]}


def device_steps(device: str, trace: Trace) -> dict[str, Any]:
    """A change that makes a device follow ``trace`` (relative speed)."""
    return {"device": device, "steps": [[_seconds(t), v] for t, v in _knots(trace)]}


def _latency_steps(edge: str, trace: Trace) -> dict[str, Any]:
    return {
        "link": edge,
        "latency_steps": [[_seconds(t), TIME.format(v, digits=None)] for t, v in _knots(trace)],
    }


def _knots(trace: Trace) -> list[tuple[float, float]]:
    return list(zip(trace.times, trace.values, strict=True))


def _seconds(time: float) -> str:
    return TIME.format(time, digits=None)


def apply_change(
    cluster: Cluster, change: ChangeSchema, document: Document, place: Location, folder: Path
) -> tuple[Cluster, list[dict[str, Any]]]:
    """The cluster after one [[changes]] entry, and the entry written out as steps."""
    if (change.link is None) == (change.device is None):
        raise document.error(place, 'either "link" or "device"')
    given = [change.steps or change.latency_steps, change.trace, change.generator]
    if sum(value is not None for value in given) != 1:
        raise document.error(place, 'exactly one of "steps" (and "latency_steps"), "trace", "generator"')
    if change.link is not None:
        return _change_links(cluster, change, document, place, folder)
    return _change_devices(cluster, change, document, place, folder)


def _change_links(
    cluster: Cluster, change: ChangeSchema, document: Document, place: Location, folder: Path
) -> tuple[Cluster, list[dict[str, Any]]]:
    pattern = change.link or ""
    edges = sorted({link.edge for link in cluster.links if fnmatchcase(link.edge, pattern)})
    if not edges:
        known = sorted({link.edge for link in cluster.links})
        expected = f"an edge of the cluster, such as {', '.join(known[:4])}"
        raise document.error((*place, "link"), expected, pattern, suggestion=closest(pattern, known) or "")
    links = list(cluster.links)
    written = []
    for offset, edge in enumerate(edges):
        members = [index for index, link in enumerate(links) if link.edge == edge]
        first = links[members[0]]
        bandwidth, latency = _link_traces(
            change, first.bandwidth.at(0), first.latency.at(0), document, place, folder, offset
        )
        for index in members:
            links[index] = replace(
                links[index],
                bandwidth=bandwidth or links[index].bandwidth,
                latency=latency or links[index].latency,
            )
        written += [link_steps(edge, bandwidth)] if bandwidth else []
        written += [_latency_steps(edge, latency)] if latency else []
    return replace(cluster, links=tuple(links)), written


def _link_traces(
    change: ChangeSchema,
    bandwidth: float,
    latency: float,
    document: Document,
    place: Location,
    folder: Path,
    offset: int,
) -> tuple[Trace | None, Trace | None]:
    if change.trace is not None:
        found = read_trace(folder / change.trace, bandwidth=bandwidth, latency=latency)
        if found.bandwidth is None and found.latency is None:
            expected = "a trace with a bandwidth or latency column for a link"
            raise document.error((*place, "trace"), expected, change.trace)
        return found.bandwidth, found.latency
    if change.generator is not None:
        return _generated(change, bandwidth, document, place, offset), None
    first = _steps(change.steps, RATE.parse, bandwidth, document, (*place, "steps")) if change.steps else None
    second = None
    if change.latency_steps:
        second = _steps(change.latency_steps, TIME.parse, latency, document, (*place, "latency_steps"))
    return first, second


def _change_devices(
    cluster: Cluster, change: ChangeSchema, document: Document, place: Location, folder: Path
) -> tuple[Cluster, list[dict[str, Any]]]:
    pattern = change.device or ""
    matches = [index for index, device in enumerate(cluster.devices) if fnmatchcase(device.name, pattern)]
    if not matches:
        names = [device.name for device in cluster.devices]
        expected = f"a device of the cluster, such as {', '.join(names[:4])}"
        raise document.error((*place, "device"), expected, pattern, suggestion=closest(pattern, names) or "")
    devices = list(cluster.devices)
    for offset, index in enumerate(matches):
        if change.trace is not None:
            speed = read_trace(folder / change.trace, speed=1.0).speed
            if speed is None:
                raise document.error(
                    (*place, "trace"), "a trace with a speed column for a device", change.trace
                )
        elif change.generator is not None:
            speed = _generated(change, 1.0, document, place, offset)
        else:
            speed = _steps(change.steps or [], _speed, 1.0, document, (*place, "steps"))
        devices[index] = replace(devices[index], speed=speed)
    written = [device_steps(devices[index].name, devices[index].speed) for index in matches]
    return replace(cluster, devices=tuple(devices)), written


def _generated(
    change: ChangeSchema, nominal: float, document: Document, place: Location, offset: int
) -> Trace:
    """Edges and devices that one pattern matches get seeds of their own, in name order."""
    try:
        return generate(
            change.generator or "",
            change.parameters,
            nominal=nominal,
            seed=change.seed + offset,
            horizon=change.horizon,
        )
    except BadParameter as error:
        where: Location = (*place, "parameters", error.parameter)
        problem = document.problem(where, error.expected, suggestion=error.suggestion)
        raise InputError([replace(problem, found=error.found)]) from None
    except Mismatch as error:
        problem = document.problem((*place, "generator"), error.expected, suggestion=error.suggestion)
        raise InputError([replace(problem, found=error.found)]) from None


def _speed(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
        raise Mismatch(value, "a speed relative to 1, at least 0")
    return float(value)


def _steps(steps: list[list[Any]], read: Callable[[object], float], initial: float, document: Document, place: Location) -> Trace:
    problems: list[Problem] = []
    knots: list[tuple[float, float]] = []
    for index, step in enumerate(steps):
        where = (*place, index)
        if len(step) != 2:
            problems.append(document.problem(where, "a pair of time and value", step))
            continue
        try:
            knots.append((TIME.parse(step[0]), read(step[1])))
        except Mismatch as error:
            problem = document.problem(where, error.expected, suggestion=error.suggestion)
            problems.append(replace(problem, found=error.found))
            continue
        if len(knots) > 1 and knots[-1][0] <= knots[-2][0]:
            problems.append(document.problem(where, "times that increase", step[0]))
    if problems:
        raise InputError(problems)
    return Trace.from_steps(knots, initial=initial)
