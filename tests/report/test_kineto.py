"""Traces have the shape that Perfetto and HolisticTraceAnalysis need."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import re
from collections import defaultdict
from typing import Any

import pytest

from argosy.cli.inputs import load_scenario
from argosy.plan.file import read_plan
from argosy.report.kineto import chrome_trace, encode, rank_traces
from argosy.sim.simulate import simulate
from argosy.timeline import SpanKind, Timeline


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    scenario = load_scenario(read_plan("gpt2-xl-on-two-cards"))
    return simulate(scenario.plan, scenario.chain, scenario.cluster, iterations=2)


@pytest.fixture(scope="module", params=[0, 3])
def rank(request: pytest.FixtureRequest) -> int:
    assert isinstance(request.param, int)
    return request.param


def test_names_its_rank(timeline: Timeline, rank: int) -> None:
    info = rank_trace(timeline, rank)["distributedInfo"]
    assert info == {"backend": "nccl", "rank": rank, "world_size": 4}


def test_every_kernel_has_a_stream_and_one_launch(timeline: Timeline, rank: int) -> None:
    events = rank_trace(timeline, rank)["traceEvents"]
    kernels = {event["args"]["correlation"]: event for event in of(events, "kernel")}
    launches = {event["args"]["correlation"]: event for event in of(events, "cuda_runtime")}
    assert kernels.keys() == launches.keys()
    assert len(kernels) == len(of(events, "kernel")) == len(of(events, "cuda_runtime"))
    for correlation, kernel in kernels.items():
        assert kernel["args"]["stream"] == kernel["tid"] > 0
        assert "stream" not in launches[correlation]["args"]
        assert launches[correlation]["ts"] <= kernel["ts"]


def test_every_launch_is_in_a_step(timeline: Timeline, rank: int) -> None:
    events = rank_trace(timeline, rank)["traceEvents"]
    steps = of(events, "user_annotation")
    assert [step["name"] for step in steps] == ["ProfilerStep#0", "ProfilerStep#1"]
    end = steps[-1]["ts"] + steps[-1]["dur"]
    assert steps[0]["ts"] + steps[0]["dur"] == pytest.approx(steps[1]["ts"])
    for launch in of(events, "cuda_runtime"):
        assert launch["ts"] < end


def test_communication_is_named_as_nccl_s(timeline: Timeline, rank: int) -> None:
    device = timeline.devices[rank]
    kernels = of(rank_trace(timeline, rank)["traceEvents"], "kernel")
    named = [kernel for kernel in kernels if kernel["name"].startswith("ncclKernel")]
    moved = [
        span
        for span in timeline.spans
        if span.kind.is_communication and device in span.where.split(">")
    ]
    assert len(named) == len(moved) > 0
    assert all(kernel["args"]["bytes"] > 0 for kernel in named)


def test_one_file_has_a_process_per_device_and_per_link(timeline: Timeline) -> None:
    events = chrome_trace(timeline)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    links = sorted({link for span in timeline.spans for link in span.via})
    assert names == [f"device {name}" for name in timeline.devices] + [
        f"link {name}" for name in links
    ]
    compute = [span for span in timeline.spans if not span.kind.is_communication]
    crossings = sum(len(span.via) for span in timeline.spans)
    assert len(of(events, "kernel")) == len(compute) + crossings
    peaks: dict[int, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "C":
            peaks[event["pid"]] = max(peaks[event["pid"]], event["args"]["GiB"] * 2**30)
    assert list(peaks.values()) == pytest.approx(list(timeline.peak_memory().values()))


def test_a_device_that_computed_nothing_has_a_process_and_no_step(timeline: Timeline) -> None:
    idle = timeline.devices[0]
    spans = tuple(span for span in timeline.spans if idle not in span.where.split(">"))
    without = dataclasses.replace(timeline, spans=spans)
    events = chrome_trace(without)["traceEvents"]
    assert [event["name"] for event in events if event["pid"] == 1 and event["ph"] == "X"] == []
    assert {
        event["args"]["name"]
        for event in events
        if event["pid"] == 1 and event["name"] == "process_name"
    } == {f"device {idle}"}
    assert [
        event["name"] for event in next(rank_traces(without))["traceEvents"] if event["ph"] == "X"
    ] == []


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_overlaps_on_a_thread(timeline: Timeline, whole: bool) -> None:
    document = chrome_trace(timeline) if whole else rank_trace(timeline, 2)
    threads = defaultdict(list)
    for event in of(document["traceEvents"], "kernel"):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(spans))


def test_times_are_microseconds(timeline: Timeline) -> None:
    updates = [
        event
        for event in of(chrome_trace(timeline)["traceEvents"], "kernel")
        if event["name"] == "update"
    ]
    spans = [span for span in timeline.spans if span.kind is SpanKind.UPDATE]
    assert sum(event["dur"] for event in updates) == pytest.approx(
        1e6 * sum(span.seconds for span in spans)
    )


def test_encoding_is_reproducible(timeline: Timeline) -> None:
    document = rank_trace(timeline, 1)
    assert encode(document) == encode(rank_trace(timeline, 1))
    assert json.loads(gzip.decompress(encode(document))) == document
    assert json.loads(encode(document, compress=False)) == document


def rank_trace(timeline: Timeline, rank: int) -> dict[str, Any]:
    return list(rank_traces(timeline))[rank]


def of(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == category]


def test_the_rank_is_found_where_holistic_trace_analysis_looks_for_it(timeline: Timeline) -> None:
    for rank, document in enumerate(rank_traces(timeline)):
        found = re.search(r'"rank":\s+(\d+)', gzip.decompress(encode(document)).decode())
        assert found is not None
        assert int(found[1]) == rank
