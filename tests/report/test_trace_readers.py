"""Traces in the programs that they are for: HolisticTraceAnalysis run on them, and Perfetto's rules
of reading."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from argosy.cli.inputs import load_scenario
from argosy.plan.file import read_plan
from argosy.report.kineto import chrome_trace, encode, rank_traces
from argosy.sim.simulate import simulate
from argosy.timeline import Timeline

Interval = tuple[float, float]


@pytest.fixture(scope="module", params=["gpt2-xl-on-two-cards", "llama-3-8b-on-mixed-16"])
def timeline(request: pytest.FixtureRequest) -> Timeline:
    scenario = load_scenario(read_plan(request.param))
    return simulate(scenario.plan, scenario.chain, scenario.cluster, iterations=2)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def common(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Seconds that are in both, each merged."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def test_holistic_trace_analysis_finds_the_timeline_s_own_figures(
    timeline: Timeline, tmp_path: Path
) -> None:
    """Idle, computing, communicating and overlapped time of every rank; it rounds times down to
    microseconds."""
    files = {}
    for rank, document in enumerate(rank_traces(timeline)):
        path = tmp_path / f"rank-{rank}.json.gz"
        path.write_bytes(encode(document))
        files[rank] = str(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pandas, about how it is used there
        from hta.trace_analysis import TraceAnalysis

        analysis = TraceAnalysis(trace_files=files, include_last_profiler_step=True)
        breakdown = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
        overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
    assert list(breakdown.index) == list(range(len(timeline.devices)))
    for rank, device in enumerate(timeline.devices):
        computed = merged((span.start, span.end) for span in timeline.spans if span.where == device)
        moved = merged(
            (span.start, span.end)
            for span in timeline.spans
            if span.kind.is_communication and device in span.where.split(">")
        )
        busy = merged([*computed, *moved])
        extent = busy[-1][1] - busy[0][0]
        row = breakdown.loc[rank]
        assert row["kernel_time(us)"] / 1e6 == pytest.approx(extent, rel=1e-3)
        assert row["compute_time(us)"] / 1e6 == pytest.approx(length(computed), rel=1e-3)
        assert row["idle_time(us)"] / 1e6 == pytest.approx(extent - length(busy), abs=1e-3 * extent)
        assert row["non_compute_time(us)"] / 1e6 == pytest.approx(
            length(busy) - length(computed), abs=1e-3 * extent
        )
        expected = 100 * common(computed, moved) / length(moved)
        assert overlap.loc[rank, "comp_comm_overlap_pctg"] == pytest.approx(expected, abs=0.5)


def read_by_perfetto_s_rules(document: dict[str, Any]) -> dict[tuple[int, int], list[Interval]]:
    """The slices of every track, after the checks without which Perfetto drops events or draws them
    wrongly.

    Complete events have a time and a duration that are finite and not negative; processes and
    threads are integers and named by metadata; counters are numbers; on one thread, slices are
    apart or nested, never crossing.
    """
    assert document["displayTimeUnit"] in ("ms", "ns")
    tracks: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    named: set[tuple[str, int, int]] = set()
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        match event["ph"]:
            case "X":
                assert math.isfinite(event["dur"])
                assert event["dur"] >= 0
                assert isinstance(event["cat"], str)
                tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "M":
                if event["name"] in ("process_name", "thread_name"):
                    assert isinstance(event["args"]["name"], str)
                    named.add((event["name"], event["pid"], event["tid"]))
            case "C":
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case other:
                raise AssertionError(f"an event of phase {other}")
    for pid, tid in tracks:
        assert ("process_name", pid, 0) in named
        assert ("thread_name", pid, tid) in named
    for slices in tracks.values():
        slices.sort(key=lambda slice_: (slice_[0], -slice_[1]))
        open_ends: list[float] = []
        for start, end in slices:
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3, "two slices of a thread cross"
            open_ends.append(end)
    return tracks


def test_perfetto_reads_the_whole_trace(timeline: Timeline) -> None:
    document = json.loads(encode(chrome_trace(timeline), compress=False))
    tracks = read_by_perfetto_s_rules(document)
    assert len(tracks) >= 2 * len(timeline.devices)


def test_perfetto_reads_every_rank(timeline: Timeline) -> None:
    for document in itertools.islice(rank_traces(timeline), 4):
        read_by_perfetto_s_rules(json.loads(encode(document, compress=False)))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda event: event.update(dur=-1.0),
        lambda event: event.update(pid="device 0"),
        lambda event: event.update(ph="Z"),
        lambda event: event.update(tid=999),
        lambda event: event.update(dur=1.5 * event["dur"]),
    ],
)
def test_the_rules_find_what_is_wrong(timeline: Timeline, spoil: Any) -> None:
    document = chrome_trace(timeline)
    spoil(next(event for event in document["traceEvents"] if event.get("cat") == "kernel"))
    with pytest.raises(AssertionError):
        read_by_perfetto_s_rules(document)
