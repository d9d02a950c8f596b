"""Build one measured ``Timeline`` on one clock from the marks of all ranks.

Clocks of different hosts differ. Rank 0 and rank r exchange pings: rank 0 reads t0, rank r answers
with its own reading c, rank 0 reads t1. With the exchange of the least round trip t1 - t0 of
several,

    (1)  offset of r = c - (t0 + t1) / 2     with an error of at most (t1 - t0) / 2

The sender records when a message leaves, and the receiver when it has stopped waiting for it:

    (2)  a transfer lasts from the call that sends to the end of the wait; that is exact if the
         receiver had to wait, and an upper bound if the message had arrived before
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from argosy.plan.plan import Plan
from argosy.runtime.communication.marks import STEP, Mark
from argosy.runtime.processes.ranks import devices_by_rank, links_between, seats_of
from argosy.runtime.processes.world import gather_texts
from argosy.timeline import Contact, ContactKind, Span, SpanKind, Timeline

# Pings per rank, of which the one with the least round trip counts.
_PINGS = 12
_COMPUTATION = frozenset(kind for kind in SpanKind if not kind.is_communication)
"""Kinds of spans in which a rank computes."""
_Known = tuple[Span, int | None]
"""A span and, for a transfer, the stage that receives it."""
_SPANS, _CONTACTS = frozenset(SpanKind), frozenset(ContactKind)


@dataclass(frozen=True)
class ClockOffset:
    """The seconds by which a rank's clock is ahead of rank 0's."""

    seconds: float
    uncertainty: float


def clock_offsets(
    device: torch.device, *, clock: Callable[[], float] = time.perf_counter
) -> list[ClockOffset]:
    """Return the offset of every rank by (1), on every rank; all call this at the same point."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # gloo sends from host memory.
    where = device if dist.get_backend() == "nccl" else torch.device("cpu")
    offsets = torch.zeros(world, 2, dtype=torch.float64, device=where)
    reading = torch.zeros(1, dtype=torch.float64, device=where)
    for peer in range(1, world):
        dist.barrier()
        best = float("inf")
        for _ in range(_PINGS):
            if rank == peer:
                dist.recv(reading, 0)
                reading[0] = clock()
                dist.send(reading, 0)
            elif rank == 0:
                begin = clock()
                dist.send(reading, peer)
                dist.recv(reading, peer)
                end = clock()
                if end - begin < best:
                    best = end - begin
                    offsets[peer] = torch.tensor([reading.item() - (begin + end) / 2, best / 2])
    dist.broadcast(offsets, 0)
    return [ClockOffset(seconds, uncertainty) for seconds, uncertainty in offsets.tolist()]


def gather_timeline(
    marks: Sequence[Mark],
    plan: Plan,
    bytes_per_sample: dict[int, float],
    device: torch.device,
    roster: Sequence[str] | None = None,
) -> Timeline | None:
    """Return the timeline of a run on rank 0, None on other ranks; every rank calls this.

    ``bytes_per_sample`` holds the bytes that the rank's stages send on per sample; ``roster`` lists
    devices by rank and is the plan's own unless given.
    """
    offset = clock_offsets(device)[dist.get_rank()].seconds
    aligned = [mark._replace(start=mark.start - offset, end=mark.end - offset) for mark in marks]
    texts = gather_texts(json.dumps([aligned, list(bytes_per_sample.items())]), device)
    if dist.get_rank() != 0:
        return None
    gathered = [json.loads(text) for text in texts]
    sizes = {stage: size for _, stage_sizes in gathered for stage, size in stage_sizes}
    return assemble([[Mark(*mark) for mark in marks] for marks, _ in gathered], plan, sizes, roster)


def assemble(
    marks: Sequence[Sequence[Mark]],
    plan: Plan,
    bytes_per_sample: dict[int, float],
    roster: Sequence[str] | None = None,
) -> Timeline:
    """Build a timeline from the aligned marks of all ranks; its clock starts with the first
    step."""
    devices = tuple(roster or devices_by_rank(plan))
    steps = [mark for rank_marks in marks for mark in rank_marks if mark.what == STEP]
    zero = min((mark.start for mark in steps), default=0.0)
    known: list[_Known] = [(span, None) for span in _computation(marks, devices, zero)]
    known += _transfers(marks, plan, bytes_per_sample, zero, devices)
    known.sort(key=lambda entry: (entry[0].start, entry[0].end, entry[0].where))
    ends: dict[int, float] = defaultdict(float)
    for mark in steps:
        ends[mark.step] = max(ends[mark.step], mark.end - zero)
    busy: dict[str, float] = defaultdict(float)
    for span, _ in known:
        if span.kind in _COMPUTATION:
            busy[span.where] += span.seconds
    return Timeline(
        clock="measured",
        devices=devices,
        spans=_with_causes(known),
        iteration_ends=tuple(ends[step] for step in sorted(ends)),
        busy=tuple(busy[device] for device in devices),
        contacts=_contacts(marks, devices, zero),
    )


def _first_step(marks: Sequence[Sequence[Mark]]) -> int:
    return min((mark.step for rank_marks in marks for mark in rank_marks), default=0)


def _computation(
    marks: Sequence[Sequence[Mark]], devices: Sequence[str], zero: float
) -> list[Span]:
    first = _first_step(marks)
    return [
        Span(
            where=device,
            kind=SpanKind(mark.what),
            start=max(0.0, mark.start - zero),
            end=max(0.0, mark.end - zero),
            stage=mark.stage,
            micro_batch=mark.micro_batch,
            iteration=mark.step - first,
            together=mark.together,
        )
        for device, rank_marks in zip(devices, marks, strict=True)
        for mark in rank_marks
        if mark.what in _SPANS
    ]


def _contacts(
    marks: Sequence[Sequence[Mark]], devices: Sequence[str], zero: float
) -> tuple[Contact, ...]:
    first = _first_step(marks)
    contacts = []
    for device, rank_marks in zip(devices, marks, strict=True):
        for mark in rank_marks:
            if mark.what in _CONTACTS:
                assert mark.stage is not None
                assert mark.micro_batch is not None
                contacts.append(
                    Contact(
                        where=device,
                        kind=ContactKind(mark.what),
                        start=max(0.0, mark.start - zero),
                        end=max(0.0, mark.end - zero),
                        stage=mark.stage,
                        micro_batch=mark.micro_batch,
                        gradient=mark.gradient,
                        iteration=mark.step - first,
                    )
                )
    return tuple(sorted(contacts, key=lambda contact: (contact.start, contact.end, contact.where)))


def _transfers(
    marks: Sequence[Sequence[Mark]],
    plan: Plan,
    bytes_per_sample: dict[int, float],
    zero: float,
    devices: Sequence[str],
) -> list[_Known]:
    """Return the transfers between ranks by (2)."""
    seats = seats_of(plan, devices)
    first = _first_step(marks)
    sent = {
        (rank, mark.stage, mark.micro_batch, mark.gradient, mark.step): mark.start
        for rank, rank_marks in enumerate(marks)
        for mark in rank_marks
        if mark.what == ContactKind.SENDING
    }
    spans: list[_Known] = []
    for rank, rank_marks in enumerate(marks):
        for mark in rank_marks:
            if mark.what != ContactKind.WAITING or mark.stage is None:
                continue
            source = mark.stage + (1 if mark.gradient else -1)
            size = bytes_per_sample.get(min(source, mark.stage), 0.0)
            seat = next(seat for seat in seats[mark.stage] if seat.rank == rank)
            for link in links_between(seat, seats[source], sending=False):
                start = sent.get((link.peer, source, mark.micro_batch, mark.gradient, mark.step))
                if start is not None and link.peer != rank:
                    span = Span(
                        where=f"{devices[link.peer]}>{devices[rank]}",
                        kind=SpanKind.TRANSFER,
                        start=max(0.0, start - zero),
                        end=max(0.0, start - zero, mark.end - zero),
                        stage=source,
                        micro_batch=mark.micro_batch,
                        iteration=mark.step - first,
                        bytes=size * (link.end - link.begin),
                    )
                    spans.append((span, mark.stage))
    return spans


def _with_causes(known: Sequence[_Known]) -> tuple[Span, ...]:
    """Add to each span the index of its cause: for a computation, whichever ended last of the
    message it needs and the previous computation on its device."""
    spans = [span for span, _ in known]
    arrived: dict[tuple[str, int, int | None, int, bool], int] = {}
    for index, (span, target) in enumerate(known):
        if span.stage is not None and target is not None:
            key = (
                span.where.partition(">")[2],
                target,
                span.micro_batch,
                span.iteration,
                target < span.stage,
            )
            arrived[key] = index
    last: dict[str, int] = {}
    result = []
    for index, span in enumerate(spans):
        cause = last.get(span.where)
        if span.kind in _COMPUTATION and span.stage is not None:
            gradient = span.kind is not SpanKind.FORWARD
            message = arrived.get(
                (span.where, span.stage, span.micro_batch, span.iteration, gradient)
            )
            if message is not None and (cause is None or spans[message].end > spans[cause].end):
                cause = message
        if span.kind in _COMPUTATION:
            last[span.where] = index
        elif span.kind is SpanKind.TRANSFER:
            cause = last.get(span.where.partition(">")[0])
        result.append(span._replace(waited_for=cause))
    return tuple(result)
