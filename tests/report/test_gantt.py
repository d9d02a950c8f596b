"""The text Gantt chart: one golden picture, and what holds for every one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from argosy.cluster.file import load_cluster, with_changes
from argosy.errors import InputError
from argosy.report.gantt import gantt, iteration_bounds
from argosy.schedule import ScheduleSpec, build_schedule
from argosy.sim.engine.exact import simulate_exact
from argosy.timeline import Span, SpanKind, Timeline
from benchmarks.bare_pipeline import StageCost, pipeline_graph

PICTURE = """\
0 a0.0 |F0F1-F2.............B0===F3B1===....B2==....B3===|
1 v0.0 |...F0-F1......B0===F2B1===..F3B2===....B3==......|
2 v1.0 |......F0-B0==F1-B1===.F2-B2==..F3B3===...........|
a0>v0  |..>.1>.>...................>.....................|
v0>v1  |.....0>.>............>........>..................|
v1>v0  |.............>......1>.......>........>..........|
v0>a0  |...................>......>........>.......3>....|
        |0 s        |5 s        |10 s       |15 s       |
        F forward  B backward  > transfer  . idle"""


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    """Three stages, four micro-batches: forward 1 s, backward 2 s, a quarter of a second on the
    network."""
    cluster = with_changes(load_cluster("mixed-16"), [])
    costs = [StageCost(forward=1, backward=2, output_bytes=3.125e9 / 4)] * 3
    graph = pipeline_graph(build_schedule(ScheduleSpec(), 3, 4), costs, ["a0.0", "v0.0", "v1.0"])
    return simulate_exact(graph, cluster, iterations=2)


def test_golden(timeline: Timeline) -> None:
    assert gantt(timeline, width=58, transfers=True).plain == PICTURE


def test_long_legend_is_wrapped() -> None:
    kinds = [kind for kind in SpanKind if kind is not SpanKind.TRANSFER]
    spans = [Span("a0.0", kind, index, index + 1, 0, 0) for index, kind in enumerate(kinds)]
    lines = gantt(made([("a0.0", 0, 6)], spans=spans), width=60).plain.splitlines()
    assert lines[2:] == [
        "        F forward  B backward  I input gradient",
        "        W weight gradient  U update  : collective  . idle",
    ]


@pytest.mark.parametrize("width", [40, 58, 80, 133])
@pytest.mark.parametrize("iteration", [0, 1])
def test_fills_the_width_and_no_more(timeline: Timeline, width: int, iteration: int) -> None:
    lines = gantt(timeline, width=width, iteration=iteration).plain.splitlines()
    assert [len(line) for line in lines[:3]] == [width] * 3
    assert max(map(len, lines[:4])) <= width


def test_legend_can_be_left_out(timeline: Timeline) -> None:
    assert (
        gantt(timeline, width=58, transfers=True, legend=False).plain == PICTURE.rpartition("\n")[0]
    )


def test_shows_any_window(timeline: Timeline) -> None:
    row = gantt(timeline, between=(0.0, 3.0), width=69).plain.splitlines()[0]
    assert row == "0 a0.0 |F0------------------F1------------------F2------------------|"


def test_bounds_are_those_of_the_iteration(timeline: Timeline) -> None:
    start, end = iteration_bounds(timeline, 1)
    assert start == timeline.iteration_ends[0]
    assert end == timeline.iteration_ends[1]


def test_unknown_iteration(timeline: Timeline) -> None:
    with pytest.raises(
        InputError, match="iteration: found 2, expected one of the 2 recorded iterations, from 0"
    ):
        gantt(timeline, iteration=2)


def test_devices_that_do_the_same_share_a_row() -> None:
    timeline = made([("a0.0", 0, 4), ("a0.1", 0, 4), ("a0.2", 0, 2)])
    labels = [
        line.partition("|")[0].strip() for line in gantt(timeline, width=60).plain.splitlines()[:2]
    ]
    assert labels == ["0 a0.0..1", "0 a0.2"]


def test_rows_are_limited_and_the_rest_is_counted() -> None:
    timeline = made([(f"a0.{index}", index, index + 10) for index in range(30)])
    lines = gantt(timeline, width=60, most_rows=4).plain.splitlines()
    assert lines[4].split() == ["...", "26", "more", "rows"]


def test_a_device_is_idle_where_it_works_less_than_half_of_a_column() -> None:
    timeline = made([("a0.0", 0.0, 1.0), ("a0.0", 6.0, 6.04), ("a0.0", 9.0, 10.0)])
    row = gantt(timeline, width=109).plain.splitlines()[0]
    assert row == "0 a0.0 |F0" + "-" * 8 + "." * 80 + "F0" + "-" * 8 + "|"


def made(forwards: list[tuple[str, float, float]], *, spans: Sequence[Span] = ()) -> Timeline:
    devices = tuple(dict.fromkeys(where for where, _, _ in forwards))
    drawn = spans or [
        Span(where, SpanKind.FORWARD, start, end, 0, 0) for where, start, end in forwards
    ]
    return Timeline(
        clock="simulated",
        devices=devices,
        spans=tuple(drawn),
        iteration_ends=(max(end for _, _, end in forwards),),
        busy=(1.0,) * len(devices),
    )
