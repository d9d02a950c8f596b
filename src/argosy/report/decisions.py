"""Read the decisions of a run from its ``decisions.jsonl``, and describe them in sentences.

A line of the file is a decision with the numbers behind it, or a measurement some steps after one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from argosy.document import JsonObject, Schema, parse_json, read_text, validate
from argosy.errors import InputError
from argosy.units import RATE, SIZE, TIME

Amount = Annotated[float, Field(ge=0)]
"""Seconds, bytes, bytes/s or a share; infinite for something that is never expected to end."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """A decision that is described for people as the cells of a table."""

    step: int
    what: str
    predicted: str
    measured: str
    moved: str
    why: str


class _Entry(Schema):
    """A base for the entries of the file that ignores fields which are not described."""

    model_config = ConfigDict(extra="ignore")


class _Stage(_Entry):
    """The layers and the samples that a decision gives to a stage."""

    layers: Annotated[list[int], Field(min_length=2, max_length=2)]
    samples: dict[str, int]


class _Schedule(_Entry):
    """The pipeline schedule that a decision chooses."""

    kind: str
    k: int = 1


class _Decision(_Entry):
    """A change of the plan that a run decided on, with the predictions behind it."""

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
    """The step times that a run measured before and after a decision."""

    step: int
    measured_before: Amount
    measured_after: Amount


# The schema of an entry by its ``event``.
_KINDS: Mapping[str, type[_Entry]] = {"decision": _Decision, "outcome": _Outcome}


def read_decisions(path: Path | str) -> list[JsonObject]:
    """Read every line of the file; raise ``InputError`` that names the line of an invalid entry."""
    return [
        _event(line, str(path), number)
        for number, line in enumerate(read_text(path).splitlines(), 1)
    ]


def _event(line: str, file: str, number: int) -> JsonObject:
    """Parse and check one line of the file."""
    try:
        document = parse_json(line, file=file)
        kind = document.data.get("event")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise document.error(("event",), '"decision" or "outcome"', kind)
        validate(document, _KINDS[kind])
    except InputError as error:
        raise InputError([replace(problem, line=number) for problem in error.problems]) from None
    return document.data


def tell_decisions(events: list[JsonObject]) -> list[Told]:
    """Return a row for each decision, with the measurement that followed it."""
    outcomes = {event["step"]: event for event in events if event["event"] == "outcome"}
    return [
        _told(event, outcomes.get(event["step"]))
        for event in events
        if event["event"] == "decision"
    ]


def _told(event: Mapping[str, Any], outcome: Mapping[str, Any] | None) -> Told:
    """Describe one decision and its outcome."""
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
    """Return seconds as text."""
    return TIME.short(seconds)


def _what(event: Mapping[str, Any]) -> str:
    """Describe the new plan, as ``full: kfkb (k=2); layers 5 | 3 | 4``."""
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
    """Describe the bytes that were moved and the time it took."""
    if event.get("moved_bytes") is None:
        return "-"
    took = _time(event.get("moved_seconds") or 0.0)
    predicted = _time(event.get("predicted_moving", 0.0))
    return f"{SIZE.short(event['moved_bytes'])} in {took} (predicted {predicted})"


def _why(event: Mapping[str, Any]) -> str:
    """Describe the reason for a decision, with the first four measurements behind it."""
    measurements = [
        f"{name} carries {RATE.short(rate)}" for name, rate in event.get("bandwidths", {}).items()
    ]
    measurements += [
        f"{name} runs at {100 * speed:.0f} %" for name, speed in event.get("speeds", {}).items()
    ]
    more = f" and {len(measurements) - 4} more" if len(measurements) > 4 else ""
    return "; ".join([str(event["why"]), *measurements[:4]]) + more


def event_in_a_line(event: Mapping[str, Any]) -> str:
    """Describe an event in one line for a terminal, while the run continues."""
    if event["event"] == "outcome":
        before, after = _time(event["measured_before"]), _time(event["measured_after"])
        return (
            f"  since the change after step {event['step']}: {before} -> {after} a step, measured"
        )
    told = _told(event, None)
    moved = "" if told.moved == "-" else f", moved {told.moved}"
    return (
        f"  after step {told.step}: {told.what}, predicted {told.predicted} a step{moved}; "
        f"{told.why}"
    )
