"""``timeline.json``, version 1, both ways. Its fields: ``docs/formats.md``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from argosy.document import Document, Schema, parse_json, read_json, validate
from argosy.timeline.timeline import LinkUse, Span, SpanKind, Timeline

Real = Annotated[float, Field(strict=False)]


class SpanSchema(Schema):
    where: str
    kind: Literal["forward", "backward", "input-gradient", "weight-gradient", "update", "transfer", "collective"]
    start: Real
    end: Real
    stage: int | None = None
    micro_batch: int | None = None
    iteration: int = 0
    bytes: Real = 0.0
    via: list[str] = []
    waited_for: int | None = None


class LinkUseSchema(Schema):
    link: str
    bytes: Real
    utilisation: Real


class TimelineSchema(Schema):
    version: Literal[1]
    clock: Literal["simulated", "measured"]
    devices: list[str]
    spans: list[SpanSchema]
    iteration_ends: list[Real]
    busy: list[Real]
    links: list[LinkUseSchema] = []
    memory: dict[str, list[Annotated[list[Real], Field(min_length=2, max_length=2)]]] = {}
    stalled: str | None = None


def load_timeline(path: Path | str) -> Timeline:
    return timeline_from_document(read_json(path))


def loads_timeline(text: str, *, file: str = "timeline.json") -> Timeline:
    return timeline_from_document(parse_json(text, file=file))


def timeline_from_document(document: Document) -> Timeline:
    schema = validate(document, TimelineSchema)
    if len(schema.busy) != len(schema.devices):
        raise document.error(("busy",), f"one number for each of the {len(schema.devices)} devices", schema.busy)
    for index, span in enumerate(schema.spans):
        if span.end < span.start:
            raise document.error(("spans", index, "end"), f"at least the start {span.start}", span.end)
        if span.waited_for is not None and not 0 <= span.waited_for < len(schema.spans):
            raise document.error(("spans", index, "waited_for"), "the index of a span", span.waited_for)
    return Timeline(
        clock=schema.clock,
        devices=tuple(schema.devices),
        spans=tuple(
            Span(**{**span.model_dump(), "kind": SpanKind(span.kind), "via": tuple(span.via)}) for span in schema.spans
        ),
        iteration_ends=tuple(schema.iteration_ends),
        busy=tuple(schema.busy),
        links=tuple(LinkUse(**use.model_dump()) for use in schema.links),
        memory=tuple(
            (device, tuple((time, held) for time, held in steps)) for device, steps in schema.memory.items()
        ),
        stalled=schema.stalled,
    )


def dumps_timeline(timeline: Timeline) -> str:
    """JSON text; equal timelines give equal bytes."""
    return json.dumps(timeline_to_dict(timeline), sort_keys=True, allow_nan=False) + "\n"


def timeline_to_dict(timeline: Timeline) -> dict[str, Any]:
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
    }


def _span_to_dict(span: Span) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    fields = {n: v for n, v in span._asdict().items() if n not in Span._field_defaults or v != Span._field_defaults[n]}
    fields["kind"] = str(span.kind)
    if "via" in fields:
        fields["via"] = list(span.via)
    return fields
