"""Write a timeline as Chrome trace events in the format of PyTorch's profiler.

There are two forms. ``chrome_trace`` is one document for a person in Perfetto: it has a process per
device, with its computation and memory, and a process per link, with the bytes that cross it.
``rank_traces`` are the documents of the ranks for HolisticTraceAnalysis, which reads a folder of
them and expects in each

    (1)  ``distributedInfo`` with the rank, counted in the order of ``Timeline.devices``;
    (2)  a ``ProfilerStep#N`` annotation around each iteration;
    (3)  category ``kernel`` with a stream above 0, and a ``cuda_runtime`` launch with the same
         correlation;
    (4)  names that begin with ``ncclKernel`` for communication.

Times are microseconds, rounded to nanoseconds.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from argosy.document import JsonObject
from argosy.timeline import Span, SpanKind, Timeline
from argosy.units import GIB

# One Chrome trace event.
Event = JsonObject

# The stream number of computation, above 0 as (3) demands.
_COMPUTE_STREAM = 7
# The stream number of the first lane of communication.
_FIRST_NETWORK_STREAM = 20
# The process id of the host in a rank's document; 0 is the device.
_HOST = 1000


def encode(document: JsonObject, *, compress: bool = True) -> bytes:
    """Encode the document as JSON, gzipped or not; equal documents give equal bytes."""
    # HolisticTraceAnalysis finds the rank by a text search that needs a space after the colon.
    text = json.dumps(document, sort_keys=True, separators=(",", ": "), allow_nan=False).encode()
    return gzip.compress(text, mtime=0) if compress else text


def chrome_trace(timeline: Timeline) -> JsonObject:
    """Return one document with a process per device and per link."""
    events: list[Event] = []
    memory, computed = dict(timeline.memory), _computed(timeline)
    for pid, device in enumerate(timeline.devices, start=1):
        own = computed[device]
        events += _process(pid, f"device {device}", {0: "steps", _COMPUTE_STREAM: "compute"})
        events += _steps(own, pid, 0)
        events += [_kernel(span, pid, _COMPUTE_STREAM, index) for index, span in enumerate(own)]
        events += _memory(memory.get(device, ()), pid)
    crossings: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        for link in span.via:
            crossings[link].append(span)
    for pid, (link, spans) in enumerate(sorted(crossings.items()), start=len(timeline.devices) + 1):
        lanes = _lanes(spans)
        names = {lane: f"lane {lane - _FIRST_NETWORK_STREAM}" for lane in sorted(set(lanes))}
        events += _process(pid, f"link {link}", names)
        pairs = zip(spans, lanes, strict=True)
        events += [_kernel(span, pid, lane, index) for index, (span, lane) in enumerate(pairs)]
    return _document(timeline, events, rank=0, name="argosy")


def rank_traces(timeline: Timeline) -> Iterator[JsonObject]:
    """Yield the document of each rank in order (1) to (4)."""
    computed = _computed(timeline)
    sent_or_received: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind.is_communication:
            for device in span.where.split(">"):
                sent_or_received[device].append(span)
    for rank, device in enumerate(timeline.devices):
        events = _rank_events(device, computed[device], sent_or_received[device])
        yield _document(timeline, events, rank=rank, name=f"argosy rank {rank}")


def _rank_events(device: str, own: Sequence[Span], network: Sequence[Span]) -> list[Event]:
    """Return the events of one rank: its computation, communication and launches."""
    lanes = _lanes(network)
    streams = {_COMPUTE_STREAM: "compute"} | dict.fromkeys(sorted(set(lanes)), "network")
    events = [
        *_process(0, f"device {device}", streams),
        *_process(_HOST, "host", {_HOST: "launches"}),
    ]
    events += _steps(own, _HOST, _HOST)
    placed = zip([*own, *network], [_COMPUTE_STREAM] * len(own) + lanes, strict=True)
    for correlation, (span, stream) in enumerate(placed, start=1):
        events += [_launch(span, correlation), _kernel(span, 0, stream, correlation)]
    return events


def _computed(timeline: Timeline) -> dict[str, list[Span]]:
    """Return, per device, the spans of its computation."""
    spans: dict[str, list[Span]] = {device: [] for device in timeline.devices}
    for span in timeline.spans:
        if span.where in spans:
            spans[span.where].append(span)
    return spans


def _document(timeline: Timeline, events: list[Event], *, rank: int, name: str) -> JsonObject:
    """Return a trace document with its header (1)."""
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": len(timeline.devices)},
        "deviceProperties": [
            {"id": index, "name": device} for index, device in enumerate(timeline.devices)
        ],
        "traceName": name,
        "clock": timeline.clock,
        "traceEvents": events,
    }


def _process(pid: int, name: str, threads: dict[int, str]) -> Iterator[Event]:
    """Yield the metadata of a process and its threads."""
    yield _event("M", "process_name", pid, 0, ts=0, args={"name": name})
    yield _event("M", "process_sort_index", pid, 0, ts=0, args={"sort_index": pid})
    for tid, thread in threads.items():
        yield _event("M", "thread_name", pid, tid, ts=0, args={"name": thread})


def _event(phase: str, name: str, pid: int, tid: int, **facts: Any) -> Event:
    """Return an event of a thread; ``facts`` are its other fields."""
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, **facts}


def _steps(spans: Sequence[Span], pid: int, tid: int) -> Iterator[Event]:
    """Yield the annotations of iterations (2).

    Each lasts from its device's first computation of the iteration to that of the next.
    """
    begins: dict[int, float] = {}
    for span in spans:
        begins[span.iteration] = min(span.start, begins.get(span.iteration, span.start))
    ordered = sorted(begins.items())
    ends = [start for _, start in ordered[1:]] + [max(span.end for span in spans)] if spans else []
    for (iteration, start), end in zip(ordered, ends, strict=True):
        name, facts = f"ProfilerStep#{iteration}", {"iteration": iteration}
        extent = _extent(start, end)
        yield _event("X", name, pid, tid, cat="user_annotation", **extent, args=facts)


def _kernel(span: Span, pid: int, stream: int, correlation: int) -> Event:
    """Return the event of a span on a stream (3)."""
    details: dict[str, int | str | None] = {
        "stage": span.stage,
        "micro_batch": span.micro_batch,
        "iteration": span.iteration,
    }
    if span.bytes:
        details |= {"bytes": round(span.bytes), "between": span.where}
    known = {key: value for key, value in details.items() if value is not None}
    place = {"device": 0, "stream": stream, "correlation": correlation}
    facts = {**place, "External id": correlation, **known}
    extent = _extent(span.start, span.end)
    return _event("X", _name(span), pid, stream, cat="kernel", **extent, args=facts)


def _launch(span: Span, correlation: int) -> Event:
    """Return the launch of a span, at the time at which the span begins (3).

    A simulated host takes no time.
    """
    facts = {"correlation": correlation, "External id": correlation}
    moment = _extent(span.start, span.start)
    return _event("X", "cudaLaunchKernel", _HOST, _HOST, cat="cuda_runtime", **moment, args=facts)


def _name(span: Span) -> str:
    """Return the name of a span's event (4)."""
    if span.kind is SpanKind.TRANSFER:
        return f"ncclKernel_SendRecv {span.label.removeprefix('transfer ')}"
    if span.kind is SpanKind.COPY:
        return f"Memcpy {span.where}"
    if span.kind is SpanKind.COLLECTIVE:
        return "ncclKernel_Collective"
    return span.label


def _memory(steps: Iterable[tuple[float, float]], pid: int) -> Iterator[Event]:
    """Yield the events of a memory counter, in GiB."""
    for time, held in steps:
        yield _event("C", "memory", pid, 0, ts=_microseconds(time), args={"GiB": held / GIB})


def _lanes(spans: Sequence[Span]) -> list[int]:
    """Return a stream per span so that spans of one stream do not overlap; the lowest free one is
    used."""
    lanes = [0] * len(spans)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for index in sorted(range(len(spans)), key=lambda at: (spans[at].start, at)):
        while busy and busy[0][0] <= spans[index].start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (spans[index].end, lane))
        lanes[index] = _FIRST_NETWORK_STREAM + lane
    return lanes


def _extent(start: float, end: float) -> dict[str, float]:
    """Return start and duration, rounded so that spans without a gap have none in the file
    either."""
    first = _microseconds(start)
    return {"ts": first, "dur": round(_microseconds(end) - first, 3)}


def _microseconds(seconds: float) -> float:
    """Return seconds as microseconds, rounded to nanoseconds."""
    return round(seconds * 1e6, 3)
