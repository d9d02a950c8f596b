"""Compute the main figures of a simulated plan, which ``--json`` prints too.

With n finished iterations that end at e_1 < ... < e_n and G samples in each:

    (1)  seconds of an iteration = e_i - e_(i-1)
    (2)  samples per second      = n G / e_n
    (3)  where the time goes     = the critical path, its spans summed by stage and by pair of nodes
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from argosy.cluster.host import Tier
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.plan.plan import Plan
from argosy.timeline import Span, SpanKind, Timeline


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """The utilisation and the peak memory that one device reached."""

    name: str
    kind: str
    stages: tuple[int, ...]
    utilisation: float
    peak_memory: float
    """Peak bytes over the recorded iterations."""
    memory: float
    """The memory of the device in bytes."""

    @property
    def is_over(self) -> bool:
        """Return whether the device would run out of memory."""
        return self.peak_memory > self.memory


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """The bytes that one link carried."""

    name: str
    bytes: float
    utilisation: float
    bandwidth: Trace
    """The bandwidth over time in bytes/s."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures that a simulation of a plan gave."""

    plan: Plan
    iteration_seconds: tuple[float, ...]
    """The seconds of every finished iteration (1)."""
    end: float
    """Seconds of simulated time."""
    bubble_fraction: float
    critical: tuple[tuple[str, float], ...]
    """The parts of the critical path with their seconds, largest first (3)."""
    devices: tuple[DeviceFigures, ...]
    links: tuple[LinkFigures, ...]
    """The links that carried bytes, the busiest first."""
    stalled: str | None
    repeated: int = 0
    """The number of iterations that were skipped because they repeat others."""

    @property
    def mean_seconds(self) -> float | None:
        """Return the mean seconds of an iteration; None if none has finished."""
        count = len(self.iteration_seconds)
        return sum(self.iteration_seconds) / count if count else None

    @property
    def samples_per_second(self) -> float:
        """Return the samples per second (2)."""
        return self.plan.global_batch / self.mean_seconds if self.mean_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second."""
        return self.samples_per_second * self.plan.model.sequence_length

    @property
    def fits(self) -> bool:
        """Return whether every device has enough memory."""
        return not any(device.is_over for device in self.devices)


def summarise(plan: Plan, cluster: Cluster, timeline: Timeline) -> Summary:
    """Compute the figures of ``timeline``, in which ``plan`` ran on ``cluster``."""
    bandwidth = {link.name: link.bandwidth for link in cluster.links}
    links = [
        LinkFigures(
            name=use.link,
            bytes=use.bytes,
            utilisation=use.utilisation,
            bandwidth=bandwidth[use.link],
        )
        for use in timeline.links
    ]
    return Summary(
        plan=plan,
        iteration_seconds=timeline.iteration_seconds,
        end=timeline.end,
        bubble_fraction=timeline.bubble_fraction,
        critical=critical_parts(timeline.critical_path()),
        devices=tuple(_devices(plan, cluster, timeline)),
        links=tuple(sorted(links, key=lambda link: -link.utilisation)),
        stalled=timeline.stalled,
        repeated=timeline.repeated,
    )


def _devices(plan: Plan, cluster: Cluster, timeline: Timeline) -> list[DeviceFigures]:
    """Return the figures of every device."""
    peaks, utilisation = timeline.peak_memory(), timeline.utilisation()
    stages: dict[str, list[int]] = defaultdict(list)
    for index, stage in enumerate(plan.stages):
        for name in stage.devices:
            stages[name].append(index)
    return [
        DeviceFigures(
            name=name,
            kind=cluster.device(name).kind.name,
            stages=tuple(stages[name]),
            utilisation=utilisation[name],
            peak_memory=peaks[name],
            memory=cluster.device(name).kind.memory,
        )
        for name in timeline.devices
    ]


def critical_parts(path: tuple[Span, ...]) -> tuple[tuple[str, float], ...]:
    """Return the seconds of the critical path by what they were spent on, largest first (3)."""
    parts: dict[str, float] = defaultdict(float)
    clock = path[0].start if path else 0.0
    for span in path:
        parts["waiting"] += max(span.start - clock, 0.0)
        parts[_part(span)] += span.end - max(span.start, min(clock, span.end))
        clock = span.end
    return tuple(
        sorted(((k, v) for k, v in parts.items() if v > 0), key=lambda part: (-part[1], part[0]))
    )


def _place(where: str) -> str:
    """Return the end of a copy that is no device.

    >>> _place("box0.1>box0.host"), _place("box0.nvme>box0.1")
    ('box0.host', 'box0.nvme')
    """
    return next(end for end in where.split(">") if end.endswith(tuple(f".{tier}" for tier in Tier)))


def _part(span: Span) -> str:
    """Return the part of the critical path that a span belongs to."""
    if span.kind is SpanKind.TRANSFER:
        return f"transfers {node_pair(span.where)}"
    if span.kind is SpanKind.COPY:
        return f"copies to and from {_place(span.where)}"
    if span.kind is SpanKind.COLLECTIVE:
        return f"collectives of stage {span.stage}"
    if span.kind is SpanKind.UPDATE:
        return "weight updates"
    return f"compute of stage {span.stage}"


def node_pair(where: str) -> str:
    """Return the nodes of the two devices of a transfer.

    >>> node_pair("a1.0>v0.3")
    'a1>v0'
    """
    return ">".join(name.rpartition(".")[0] for name in where.split(">"))


def summary_to_dict(summary: Summary) -> dict[str, Any]:
    """Return a summary as a dict for JSON, in seconds and bytes."""
    seconds = summary.iteration_seconds
    return {
        "iterations": {
            "finished": len(seconds),
            "repeated": summary.repeated,
            "seconds": list(seconds),
            "mean_seconds": summary.mean_seconds,
            "min_seconds": min(seconds, default=None),
            "max_seconds": max(seconds, default=None),
        },
        "simulated_seconds": summary.end,
        "samples_per_second": summary.samples_per_second,
        "tokens_per_second": summary.tokens_per_second,
        "bubble_fraction": summary.bubble_fraction,
        "critical_path": [{"what": name, "seconds": spent} for name, spent in summary.critical],
        "devices": [
            {
                "name": device.name,
                "kind": device.kind,
                "stages": device.stages,
                "utilisation": device.utilisation,
                "peak_memory_bytes": device.peak_memory,
                "memory_bytes": device.memory,
            }
            for device in summary.devices
        ],
        "links": [
            {"name": link.name, "bytes": link.bytes, "utilisation": link.utilisation}
            for link in summary.links
        ],
        "fits_memory": summary.fits,
        "stalled": summary.stalled,
    }
