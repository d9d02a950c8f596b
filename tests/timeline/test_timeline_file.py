"""``timeline.json``: what is written reads back, and what is wrong with a file is said at its
line."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.broken_cases import Case, cases
from support.strategies import mutated_json

from argosy.document import Document, parse_path
from argosy.errors import InputError
from argosy.timeline import Contact, ContactKind, LinkUse, Span, SpanKind, Timeline
from argosy.timeline.file import (
    dumps_timeline,
    load_timeline,
    loads_timeline,
    timeline_from_document,
    timeline_to_dict,
)

GOOD = {
    "version": 1,
    "clock": "simulated",
    "devices": ["a0.0", "a0.10", "a0.9"],
    "spans": [
        {"where": "a0.0", "kind": "forward", "start": 0, "end": 1.5, "micro_batch": 0},
        {
            "where": "a0.0>a0.10",
            "kind": "transfer",
            "start": 1.5,
            "end": 2,
            "bytes": 8,
            "waited_for": 0,
        },
    ],
    "iteration_ends": [2, 4],
    "busy": [1.5, 0, 0],
    "memory": {"a0.0": [[0, 8], [1, 16]]},
}

BROKEN = r"""
## later version and no clock
version = 3
del clock
> timeline.json: clock: expected a value: this field is required
> timeline.json:2: version: found 3, expected one of 1

## unknown clock and kind of span
clock = "simulation"
spans[0].kind = "foward"
> timeline.json:3: clock: found "simulation", expected one of "simulated", "measured"; did you mean "simulated"?
> timeline.json:12: spans[0].kind: found "foward", expected one of "forward", "backward", "input-gradient",
| "weight-gradient", "update", "transfer", "collective", "copy"; did you mean "forward"?

## times that are none
spans[0].start = -1
spans[0].end = "1.5 s"
spans[1].end = NaN
> timeline.json:13: spans[0].start: found -1, expected greater than or equal to 0
> timeline.json:14: spans[0].end: found "1.5 s", expected a valid number
> timeline.json:21: spans[1].end: found nan, expected a finite number

## end before the start
spans[0].end = 1
spans[1].start = 3
> timeline.json:21: spans[1].end: found 2.0, expected at least the start 3

## wait for a span that is not there
spans[1].waited_for = 2
> timeline.json:23: spans[1].waited_for: found 2, expected the index of a span, below 2

## spans that wait for each other
spans[0].waited_for = 1
> timeline.json:16: spans[0].waited_for: found 1, expected a span that does not wait for this one

## span that waits for itself
spans[1].waited_for = 1
> timeline.json:23: spans[1].waited_for: found 1, expected a span that does not wait for this one

## negative index
spans[1].waited_for = -1
spans[0].micro_batch = -1
> timeline.json:15: spans[0].micro_batch: found -1, expected greater than or equal to 0
> timeline.json:23: spans[1].waited_for: found -1, expected greater than or equal to 0

## busy times of other devices
busy = [1.5]
> timeline.json:30: busy: found a list of 1, expected one number for each of the 3 devices

## device twice
devices = ["a0.0", "a0.10", "a0.0"]
> timeline.json:7: devices[2]: found "a0.0", expected each device once

## memory of an unknown device
memory["b0.0"] = []
> timeline.json:46: memory.b0.0: found "b0.0", expected one of the devices; did you mean "a0.0"?

## memory of odd steps
memory["a0.0"] = [[0], [1, 2, 3], [1, "8 GiB"]]
> timeline.json:37: memory.a0.0[0]: found 1 items, expected at least 2
> timeline.json:40: memory.a0.0[1]: found 3 items, expected at most 2
> timeline.json:47: memory.a0.0[2][1]: found "8 GiB", expected a valid number

## contact that ends before it starts
contacts = [{"where": "a0.0", "kind": "waiting", "stage": 0, "micro_batch": 0, "start": 2, "end": 1}]
> timeline.json:54: contacts[0].end: found 1.0, expected at least the start 2

## spans of unknown devices
spans[0].where = "a0.1"
spans[1].where = "a0.0->a0.10"
> timeline.json:11: spans[0].where: found "a0.1", expected one of the devices, or two written SOURCE>TARGET;
| did you mean "a0.10"?
> timeline.json:18: spans[1].where: found "a0.0->a0.10", expected one of the devices, or two written SOURCE>TARGET;
| did you mean "a0.10"?

## iterations that go back
iteration_ends = [4, 2]
> timeline.json:28: iteration_ends[1]: found 2.0, expected at least the end before it, 4

## field of a plan
schedule = "1f1b"
> timeline.json:47: schedule: found an unknown field, expected one of the fields busy, clock, contacts, devices,
| iteration_ends, links, memory, repeated, spans, stalled, version
"""

few = settings(max_examples=80, deadline=None)
seconds = st.floats(0, 1e9)
names = st.text(min_size=1, max_size=5)
device_names = names.filter(lambda name: ">" not in name)


def edited(edits: str) -> str:
    """The text of ``GOOD`` after lines of ``path = value`` and ``del path``."""
    timeline: Any = copy.deepcopy(GOOD)
    for line in edits.splitlines():
        path, _, value = line.removeprefix("del ").partition(" = ")
        location = ("memory", path.split('"')[1]) if '"' in path else parse_path(path)
        *outer, last = location
        table = timeline
        for part in outer:
            table = table[part]
        if line.startswith("del "):
            del table[last]
        else:
            table[last] = json.loads(value)
    return json.dumps(timeline, indent=1)


@pytest.mark.parametrize("case", cases(BROKEN))
def test_a_file_that_is_no_timeline_says_why(case: Case) -> None:
    with pytest.raises(InputError) as caught:
        loads_timeline(edited(case.text))
    assert str(caught.value) == case.message


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"version": 1', '{"version": 1, "version": 1}', "\ufeff{}"]
)
def test_text_that_is_no_timeline_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^timeline\.json"):
        loads_timeline(text)


def test_whole_numbers_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").write_text(edited(""), encoding="utf-8")
    timeline = load_timeline(tmp_path / "timeline.json")
    assert timeline.spans[0].start == 0.0
    assert timeline.iteration_seconds == (2.0, 2.0)


@st.composite
def contacts(draw: st.DrawFn, devices: st.SearchStrategy[str]) -> Contact:
    start, number = draw(seconds), st.integers(0, 9)
    return Contact(
        where=draw(devices),
        kind=draw(st.sampled_from(ContactKind)),
        start=start,
        end=start + draw(seconds),
        stage=draw(number),
        micro_batch=draw(number),
        gradient=draw(st.booleans()),
        iteration=draw(number),
    )


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Timelines in which a span waits for an earlier one and the memory is that of the devices, in
    their order."""
    devices = draw(st.lists(device_names, min_size=1, max_size=4, unique=True))
    spans: list[Span] = []
    for index in range(draw(st.integers(0, 5))):
        start = draw(seconds)
        kind, one, other = (
            draw(st.sampled_from(SpanKind)),
            *draw(st.tuples(*[st.sampled_from(devices)] * 2)),
        )
        spans.append(
            Span(
                where=f"{one}>{other}" if kind.is_communication else one,
                kind=kind,
                start=start,
                end=start + draw(seconds),
                stage=draw(st.none() | st.integers(0, 9)),
                micro_batch=draw(st.none() | st.integers(0, 9)),
                iteration=draw(st.integers(0, 9)),
                bytes=draw(st.floats(0, 1e12)),
                via=tuple(draw(st.lists(names, max_size=2))),
                waited_for=draw(st.none() | st.integers(0, index - 1)) if index else None,
            )
        )
    steps = st.lists(st.tuples(seconds, st.floats(0, 1e12)), max_size=3).map(tuple)
    return Timeline(
        clock=draw(st.sampled_from(("simulated", "measured"))),
        devices=tuple(devices),
        spans=tuple(spans),
        iteration_ends=tuple(sorted(draw(st.lists(seconds, max_size=3)))),
        busy=tuple(draw(seconds) for _ in devices),
        links=tuple(
            draw(
                st.lists(
                    st.builds(LinkUse, link=names, bytes=seconds, utilisation=seconds), max_size=2
                )
            )
        ),
        memory=tuple((device, draw(steps)) for device in devices if draw(st.booleans())),
        contacts=tuple(
            draw(contacts(st.sampled_from(devices))) for _ in range(draw(st.integers(0, 3)))
        ),
        stalled=draw(st.none() | names),
    )


@few
@given(timelines())
def test_a_timeline_reads_back_as_it_was_written(timeline: Timeline) -> None:
    assert loads_timeline(dumps_timeline(timeline)) == timeline


@few
@given(timelines())
def test_what_was_read_back_is_written_in_the_same_bytes(timeline: Timeline) -> None:
    text = dumps_timeline(timeline)
    assert dumps_timeline(loads_timeline(text)) == text


@few
@given(timelines())
def test_the_critical_path_goes_from_wait_to_wait(timeline: Timeline) -> None:
    path = timeline.critical_path()
    assert bool(path) == bool(timeline.spans)
    for one, other in itertools.pairwise(path):
        assert timeline.spans[other.waited_for] == one
    if path:
        assert path[0].waited_for is None
        assert path[-1].end == max(span.end for span in timeline.spans)


@few
@given(timelines())
def test_shares_of_the_bubble_and_of_work_make_a_whole(timeline: Timeline) -> None:
    mean = sum(timeline.utilisation().values()) / len(timeline.devices)
    assert timeline.bubble_fraction == pytest.approx(1 - mean)
    assert set(timeline.peak_memory()) == {device for device, _ in timeline.memory}


@few
@given(timelines())
def test_iterations_take_all_the_time_up_to_the_last_end(timeline: Timeline) -> None:
    last = timeline.iteration_ends[-1] if timeline.iteration_ends else 0.0
    assert sum(timeline.iteration_seconds) == pytest.approx(last)
    assert timeline.end >= last


@settings(few, max_examples=300)
@given(timelines(), st.data())
def test_a_timeline_with_a_random_mistake_is_refused_or_a_timeline(
    timeline: Timeline, data: st.DataObject
) -> None:
    document = Document("timeline.json", data.draw(mutated_json(timeline_to_dict(timeline))), {})
    assume(isinstance(document.data, dict))
    try:
        read = timeline_from_document(document)
    except InputError as error:
        assert all(problem.file == "timeline.json" for problem in error.problems)
    else:
        read.critical_path()
        assert loads_timeline(dumps_timeline(read)) == read


def test_a_device_that_is_not_listed_is_told_of_once() -> None:
    contact = {
        "where": "b0.0",
        "kind": "waiting",
        "start": 0,
        "end": 1,
        "stage": 0,
        "micro_batch": 0,
    }
    with pytest.raises(InputError) as caught:
        loads_timeline(json.dumps(GOOD | {"contacts": [contact] * 9}))
    assert [problem.path for problem in caught.value.problems] == ["contacts[0].where"]
