"""Read and write ``timeline.json``, version 1. Its fields are listed in ``docs/formats.md``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from argosy.document import Document, JsonObject, Schema, Word, parse_json, read_json, validate
from argosy.errors import Problem, closest, in_order, raise_any
from argosy.timeline.timeline import Contact, ContactKind, LinkUse, Span, SpanKind, Timeline

Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
"""Seconds or bytes. A larger value is a mistake, and its microseconds would be no exact numbers."""
Natural = Annotated[int, Field(ge=0)]
MemoryStep = Annotated[list[Amount], Field(min_length=2, max_length=2)]
"""Seconds, and the bytes held from then on."""


class SpanSchema(Schema):
    makes = Span

    where: str
    kind: Word[SpanKind]
    start: Amount
    end: Amount
    stage: Natural | None = None
    micro_batch: Natural | None = None
    iteration: Natural = 0
    bytes: Amount = 0.0
    via: list[str] = Field(default_factory=list)
    waited_for: Natural | None = None
    together: Amount = 0.0


class ContactSchema(Schema):
    makes = Contact

    where: str
    kind: Word[ContactKind]
    start: Amount
    end: Amount
    stage: Natural
    micro_batch: Natural
    gradient: bool = False
    iteration: Natural = 0


class LinkUseSchema(Schema):
    makes = LinkUse

    link: str
    bytes: Amount
    utilisation: Amount


class TimelineSchema(Schema):
    makes = Timeline

    version: Literal[1]
    clock: Literal["simulated", "measured"]
    devices: list[str]
    spans: list[SpanSchema]
    iteration_ends: list[Amount]
    busy: list[Amount]
    links: list[LinkUseSchema] = Field(default_factory=list)
    memory: dict[str, list[MemoryStep]] = Field(default_factory=dict)
    contacts: list[ContactSchema] = Field(default_factory=list)
    stalled: str | None = None
    repeated: Natural = 0


def load_timeline(path: Path | str) -> Timeline:
    """Read a timeline from a file that ``dumps_timeline``, a simulation or a run has written."""
    return timeline_from_document(read_json(path))


def loads_timeline(text: str) -> Timeline:
    return timeline_from_document(parse_json(text, file="timeline.json"))


def timeline_from_document(document: Document) -> Timeline:
    schema = validate(document, TimelineSchema)
    problems = [*_span_problems(schema, document), *_device_problems(schema, document)]
    raise_any(in_order(problems))
    order = {device: index for index, device in enumerate(schema.devices)}
    memory = tuple(
        (device, tuple((time, held) for time, held in schema.memory[device]))
        for device in sorted(schema.memory, key=order.__getitem__)
    )
    timeline: Timeline = schema.value(memory=memory)
    return timeline


def _span_problems(schema: TimelineSchema, document: Document) -> Iterator[Problem]:
    finished: set[int] = set()
    for index, span in enumerate(schema.spans):
        if span.end < span.start:
            yield document.problem(
                ("spans", index, "end"), f"at least the start {span.start:g}", span.end
            )
        path: dict[int, None] = {}
        at: int | None = index
        while at is not None and at < len(schema.spans) and at not in finished and at not in path:
            path[at] = None
            at = schema.spans[at].waited_for
        if at is not None and at in path:
            waited_for = schema.spans[at].waited_for
            yield document.problem(
                ("spans", at, "waited_for"), "a span that does not wait for this one", waited_for
            )
        if span.waited_for is not None and span.waited_for >= len(schema.spans):
            expected = f"the index of a span, below {len(schema.spans)}"
            yield document.problem(("spans", index, "waited_for"), expected, span.waited_for)
        finished.update(path)


def _device_problems(schema: TimelineSchema, document: Document) -> Iterator[Problem]:
    known: set[str] = set()
    for index, device in enumerate(schema.devices):
        if device in known:
            yield document.problem(("devices", index), "each device once", device)
        known.add(device)
    if len(schema.busy) != len(schema.devices):
        yield document.problem(
            ("busy",), f"one number for each of the {len(schema.devices)} devices", schema.busy
        )
    for device in schema.memory:
        if device not in known:
            expected = "one of the devices"
            yield document.problem(
                ("memory", device), expected, device, suggestion=closest(device, schema.devices)
            )
    yield from _place_problems(schema, document)
    for index, (before, end) in enumerate(itertools.pairwise(schema.iteration_ends), start=1):
        if end < before:
            yield document.problem(
                ("iteration_ends", index), f"at least the end before it, {before:g}", end
            )


def _place_problems(schema: TimelineSchema, document: Document) -> Iterator[Problem]:
    """Yield the problems of spans and contacts: unknown devices, and ends before their starts.

    Each unknown name is reported once: a misspelt device may have thousands of spans.
    """
    known = set(schema.devices)
    unknown: set[str] = set()
    for index, span in enumerate(schema.spans):
        if span.where not in unknown and not (
            len(ends := span.where.split(">")) <= 2 and known.issuperset(ends)
        ):
            unknown.add(span.where)
            suggestion = closest(span.where, schema.devices)
            expected = "one of the devices, or two written SOURCE>TARGET"
            yield document.problem(
                ("spans", index, "where"), expected, span.where, suggestion=suggestion
            )
    for index, contact in enumerate(schema.contacts):
        if contact.where not in known and contact.where not in unknown:
            unknown.add(contact.where)
            place, suggestion = ("contacts", index, "where"), closest(contact.where, schema.devices)
            yield document.problem(
                place, "one of the devices", contact.where, suggestion=suggestion
            )
        if contact.end < contact.start:
            yield document.problem(
                ("contacts", index, "end"), f"at least the start {contact.start:g}", contact.end
            )


def dumps_timeline(timeline: Timeline) -> str:
    """Return a timeline as JSON text; equal timelines give equal bytes."""
    return json.dumps(timeline_to_dict(timeline), sort_keys=True, allow_nan=False) + "\n"


def timeline_to_dict(timeline: Timeline) -> JsonObject:
    contacts = [_changed(contact) | {"kind": str(contact.kind)} for contact in timeline.contacts]
    return {
        "version": 1,
        "clock": timeline.clock,
        "devices": list(timeline.devices),
        "spans": [_span_to_dict(span) for span in timeline.spans],
        "iteration_ends": list(timeline.iteration_ends),
        "busy": list(timeline.busy),
        "links": [dict(vars(use)) for use in timeline.links],
        "memory": {device: [list(step) for step in steps] for device, steps in timeline.memory},
        "stalled": timeline.stalled,
        **({"contacts": contacts} if contacts else {}),
        **({"repeated": timeline.repeated} if timeline.repeated else {}),
    }


def _span_to_dict(span: Span) -> JsonObject:
    fields = _changed(span) | {"kind": str(span.kind)}
    if "via" in fields:
        fields["via"] = list(span.via)
    return fields


def _changed(row: Span | Contact) -> JsonObject:
    """Return the fields that differ from their defaults."""
    defaults = row._field_defaults
    return {
        name: value
        for name, value in row._asdict().items()
        if name not in defaults or value != defaults[name]
    }
