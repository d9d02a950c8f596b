"""What a run decided while it ran, from its ``decisions.jsonl``: read, and told in sentences.

A line is a decision with the numbers behind it, or what was measured some steps after one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.errors import InputError, Problem
from argosy.units import RATE, SIZE, TIME

_NEEDED = ("step", "what", "schedule", "stages", "predicted_before", "predicted_after", "why")


@dataclass(frozen=True, kw_only=True)
class Told:
    """A decision for people: cells of a table."""

    step: int
    what: str
    predicted: str
    measured: str
    moved: str
    why: str


def read_decisions(path: Path | str) -> list[dict[str, Any]]:
    """Every line of the file; an ``InputError`` that names the line where one is not what a run writes."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError([Problem(file=str(path), found=error.strerror, expected="a run's decisions.jsonl")]) from None
    return [_event(line, str(path), number) for number, line in enumerate(text.splitlines(), 1)]


def _event(line: str, file: str, number: int) -> dict[str, Any]:
    def refuse(found: str, expected: str) -> InputError:
        return InputError([Problem(file=file, line=number, found=found, expected=expected)])

    try:
        event = json.loads(line)
    except ValueError:
        raise refuse(f'"{line[:40]}"', "a line of JSON") from None
    kind = event.get("event") if isinstance(event, dict) else None
    if kind not in ("decision", "outcome"):
        raise refuse(f"event {kind!r}", '"event": "decision" or "outcome"')
    missing = [name for name in (_NEEDED if kind == "decision" else ("step",)) if name not in event]
    if missing:
        raise refuse(f"a {kind} without {missing[0]}", f"{', '.join(_NEEDED)}")
    return dict(event)


def tell_decisions(events: list[dict[str, Any]]) -> list[Told]:
    """A row for each decision, with what was measured after it."""
    outcomes = {event["step"]: event for event in events if event["event"] == "outcome"}
    return [_told(event, outcomes.get(event["step"])) for event in events if event["event"] == "decision"]


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
    k = f" (k={schedule['k']})" if schedule["kind"] == "kfkb" else ""
    parts = [f"{event['what']}: {schedule['kind']}{k}"]
    if event["what"] == "full":
        parts.append("layers " + " | ".join(str(s["layers"][1] - s["layers"][0]) for s in event["stages"]))
    if event["what"] in ("full", "shares"):
        parts.append("samples " + " | ".join(":".join(map(str, s["samples"].values())) for s in event["stages"]))
    return "; ".join(parts)


def _moved(event: Mapping[str, Any]) -> str:
    if "moved_bytes" not in event:
        return "-"
    took, predicted = _time(event["moved_seconds"]), _time(event.get("predicted_moving", 0.0))
    return f"{SIZE.format(event['moved_bytes'], digits=3)} in {took} (predicted {predicted})"


def _why(event: Mapping[str, Any]) -> str:
    seen = [f"{name} carries {RATE.format(rate, digits=3)}" for name, rate in event.get("bandwidths", {}).items()]
    seen += [f"{name} runs at {100 * speed:.0f} %" for name, speed in event.get("speeds", {}).items()]
    more = f" and {len(seen) - 4} more" if len(seen) > 4 else ""
    return "; ".join([str(event["why"]), *seen[:4]]) + more


def event_in_a_line(event: Mapping[str, Any]) -> str:
    """For a terminal, while the run goes on."""
    if event["event"] == "outcome":
        before, after = _time(event["measured_before"]), _time(event["measured_after"])
        return f"  since the change after step {event['step']}: {before} -> {after} a step, measured"
    told = _told(event, None)
    moved = "" if told.moved == "-" else f", moved {told.moved}"
    return f"  after step {told.step}: {told.what}, predicted {told.predicted} a step{moved}; {told.why}"
