"""What a run decided while it ran, from its ``decisions.jsonl``: read, and told in sentences.

A line is a decision with the numbers behind it, or what was measured some steps after one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from argosy.document import Schema, parse_json, read_text, validate
from argosy.errors import InputError
from argosy.units import RATE, SIZE, TIME

Amount = Annotated[float, Field(ge=0)]
"""Seconds, bytes, bytes/s or a share; what is never expected to end takes infinitely long."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """A decision for people: cells of a table."""

    step: int
    what: str
    predicted: str
    measured: str
    moved: str
    why: str


class _Entry(Schema):
    """What is told of an entry; runs may write more."""

    model_config = ConfigDict(extra="ignore")


class _Stage(_Entry):
    layers: Annotated[list[int], Field(min_length=2, max_length=2)]
    samples: dict[str, int]


class _Schedule(_Entry):
    kind: str
    k: int = 1


class _Decision(_Entry):
    step: int
    what: str
    schedule: _Schedule
    stages: list[_Stage]
    predicted_before: Amount
    predicted_after: Amount
    predicted_moving: Amount = 0.0
    why: str
    moved_bytes: Amount | None = None
    moved_seconds: Amount | None = None
    bandwidths: dict[str, Amount] = Field(default_factory=dict)
    speeds: dict[str, Amount] = Field(default_factory=dict)


class _Outcome(_Entry):
    step: int
    measured_before: Amount
    measured_after: Amount


_KINDS: Mapping[str, type[_Entry]] = {"decision": _Decision, "outcome": _Outcome}


def read_decisions(path: Path | str) -> list[dict[str, Any]]:
    """Every line of the file; an ``InputError`` that names the line where one is not what a run
    writes."""
    return [
        _event(line, str(path), number)
        for number, line in enumerate(read_text(path).splitlines(), 1)
    ]


def _event(line: str, file: str, number: int) -> dict[str, Any]:
    try:
        document = parse_json(line, file=file)
        kind = document.data.get("event")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise document.error(("event",), '"decision" or "outcome"', kind)
        validate(document, _KINDS[kind])
    except InputError as error:
        raise InputError([replace(problem, line=number) for problem in error.problems]) from None
    return document.data


def tell_decisions(events: list[dict[str, Any]]) -> list[Told]:
    """A row for each decision, with what was measured after it."""
    outcomes = {event["step"]: event for event in events if event["event"] == "outcome"}
    return [
        _told(event, outcomes.get(event["step"]))
        for event in events
        if event["event"] == "decision"
    ]


def _told(event: Mapping[str, Any], outcome: Mapping[str, Any] | None) -> Told:
    measured = "-"
    if outcome is not None:
        measured = f"{_time(outcome['measured_before'])} -> {_time(outcome['measured_after'])}"
    return Told(
        step=event["step"],
        what=_what(event),
        predicted=f"{_time(event['predicted_before'])} -> {_time(event['predicted_after'])}",
        measured=measured,
        moved=_moved(event),
        why=_why(event),
    )


def _time(seconds: float) -> str:
    return TIME.format(seconds, digits=3)


def _what(event: Mapping[str, Any]) -> str:
    """``full: kfkb (k=2); layers 5 | 3 | 4``."""
    schedule = event["schedule"]
    k = f" (k={schedule.get('k', 1)})" if schedule["kind"] == "kfkb" else ""
    parts = [f"{event['what']}: {schedule['kind']}{k}"]
    if event["what"] == "full":
        parts.append(
            "layers " + " | ".join(str(s["layers"][1] - s["layers"][0]) for s in event["stages"])
        )
    if event["what"] in ("full", "shares"):
        parts.append(
            "samples "
            + " | ".join(":".join(map(str, s["samples"].values())) for s in event["stages"])
        )
    return "; ".join(parts)


def _moved(event: Mapping[str, Any]) -> str:
    if event.get("moved_bytes") is None:
        return "-"
    took, predicted = (
        _time(event.get("moved_seconds") or 0.0),
        _time(event.get("predicted_moving", 0.0)),
    )
    return f"{SIZE.format(event['moved_bytes'], digits=3)} in {took} (predicted {predicted})"


def _why(event: Mapping[str, Any]) -> str:
    seen = [
        f"{name} carries {RATE.format(rate, digits=3)}"
        for name, rate in event.get("bandwidths", {}).items()
    ]
    seen += [
        f"{name} runs at {100 * speed:.0f} %" for name, speed in event.get("speeds", {}).items()
    ]
    more = f" and {len(seen) - 4} more" if len(seen) > 4 else ""
    return "; ".join([str(event["why"]), *seen[:4]]) + more


def event_in_a_line(event: Mapping[str, Any]) -> str:
    """For a terminal, while the run goes on."""
    if event["event"] == "outcome":
        before, after = _time(event["measured_before"]), _time(event["measured_after"])
        return (
            f"  since the change after step {event['step']}: {before} -> {after} a step, measured"
        )
    told = _told(event, None)
    moved = "" if told.moved == "-" else f", moved {told.moved}"
    return f"  after step {told.step}: {told.what}, predicted {told.predicted} a step{moved}; {told.why}"
