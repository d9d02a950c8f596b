"""Trace files: what they say is what is read, and every bad row is reported where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import traces

from argosy.cluster.trace import Trace
from argosy.cluster.tracefile import FileTrace, read_bamboo, read_columns, read_oboe, rescaled
from argosy.errors import InputError, Problem
from argosy.units import RATE, TIME

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture
def written(tmp_path):
    def write(*lines: str, ending: str = "\n") -> Path:
        path = tmp_path / "trace.csv"
        path.write_text(ending.join(lines) + ending, encoding="utf-8", newline="")
        return path

    return write


def read_trace(path: Path, **initial: float) -> FileTrace:
    return read_columns(path).traces(**initial)


def problems(read, path: Path) -> tuple[Problem, ...]:
    with pytest.raises(InputError) as caught:
        read(path)
    assert {problem.file for problem in caught.value.problems} == {str(path)}
    return caught.value.problems


def test_a_link_trace_with_latency(written):
    path = written(
        "# measured", "seconds,bandwidth,latency", "", "30, 4 Gbit/s, 2 ms", "90, 25 Gbit/s, 20 us"
    )
    found = read_trace(path, bandwidth=3.125e9, latency=20e-6)
    assert found.bandwidth == Trace((0, 30, 90), (3.125e9, 0.5e9, 3.125e9))
    assert found.latency == Trace((0, 30, 90), (20e-6, 2e-3, 20e-6))
    assert found.speed is None


def test_a_device_trace(written):
    found = read_trace(written("seconds,speed", "0,1", "60,0.5", "120,0"), speed=1.0)
    assert found.speed == Trace((0, 60, 120), (1, 0.5, 0))
    assert found.bandwidth is None and found.latency is None


def test_columns_that_are_absent_are_none(written):
    found = read_trace(written("seconds,latency", "5,1 ms"), bandwidth=1.0, latency=2.0)
    assert found.bandwidth is None
    assert found.latency == Trace((0, 5), (2.0, 1e-3))


def test_without_an_initial_value_the_first_row_holds_from_the_start(written):
    assert read_trace(written("seconds,speed", "5,0.5", "9,1")).speed == Trace((0, 9), (0.5, 1))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_what_spreadsheets_write_is_read(written, ending):
    path = written('\ufeffseconds,"bandwidth"', '0,"4 Gbit/s"', '1.5e1,"8 Gbit/s"', ending=ending)
    assert read_trace(path).bandwidth == Trace((0, 15), (0.5e9, 1e9))


@given(traces())
def test_a_trace_that_is_written_out_is_read_back(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    rows = [
        f"{time!r},{RATE.format(value, digits=None)},{TIME.format(value, digits=None)}"
        for time, value in zip(trace.times, trace.values, strict=True)
    ]
    path.write_text("\n".join(["seconds,bandwidth,latency", *rows]), encoding="utf-8")
    expected = Trace.from_steps(
        zip(trace.times, trace.values, strict=True), initial=trace.values[0]
    )
    found = read_trace(path)
    assert (found.bandwidth, found.latency) == (expected, expected)


def test_every_bad_row_is_reported_with_line_and_column(written):
    path = written(
        "# comment",
        "seconds,bandwidth,latency",
        "0,25 Gbit/s,20 us",
        "10,25 Gb/s,20 us",
        "20,4,2 sec",
        "thirty,4 Gbit/s,2 ms",
        "40,4 Gbit/s",
        "",
        "-1,4 Gbit/s,2 ms",
        "50,4 Gbit/s,2 ms",
        "50,4 Gbit/s,2 ms",
        "45,4 Gbit/s,2 ms",
    )
    found = problems(read_trace, path)
    assert [(problem.line, problem.path) for problem in found] == [
        (4, "bandwidth"),
        (5, "bandwidth"),
        (5, "latency"),
        (6, "seconds"),
        (7, None),
        (9, "seconds"),
        (11, "seconds"),
        (12, "seconds"),
    ]
    assert found[0].suggestion == '"Gb/s" could be bits or bytes: write "25 Gbit/s" or "25 GB/s"'
    assert found[1].suggestion == 'a number needs its unit: did you mean "4 Gbit/s"?'
    assert found[2].suggestion == 'did you mean "2 s"?'
    assert (found[3].found, found[3].expected) == (
        '"thirty"',
        "a number of at least 0, without a unit",
    )
    assert (found[4].found, found[4].expected) == ("2", "3 columns (seconds, bandwidth, latency)")
    assert found[6].expected == found[7].expected == "seconds that increase, after 50"


@pytest.mark.parametrize(
    ("header", "shown", "suggestion"),
    [
        ("seconds,bandwith", '"seconds,bandwith"', 'did you mean "seconds,bandwidth"?'),
        ("Seconds,Speed", '"Seconds,Speed"', 'did you mean "seconds,speed"?'),
        ("0,4 Gbit/s", '"0,4 Gbit/s"', None),
        ("# only a comment", "nothing", None),
    ],
)
def test_an_unknown_header_is_refused(written, header, shown, suggestion):
    (problem,) = problems(read_trace, written(header))
    assert (problem.line, problem.path, problem.found, problem.suggestion) == (
        1,
        "header",
        shown,
        suggestion,
    )
    assert "seconds,bandwidth,latency" in problem.expected


def test_a_header_without_rows_is_refused(written):
    (problem,) = problems(read_trace, written("seconds,speed", "# nothing follows"))
    assert str(problem).endswith("found none, expected at least one row of values")


@pytest.mark.parametrize("speed", ["-0.5", "nan", "inf", "1 GB/s", "", "50%"])
def test_a_speed_is_a_plain_number(written, speed):
    (problem,) = problems(read_trace, written("seconds,speed", f"0,{speed}"))
    assert (problem.line, problem.path) == (2, "speed")


def test_a_long_list_of_problems_is_cut_and_says_so(written):
    found = problems(read_trace, written("seconds,speed", *(f"{row},fast" for row in range(57))))
    assert len(found) == 21
    assert found[-1].message == "37 more problems like these"


def test_a_file_that_is_not_there(tmp_path):
    (problem,) = problems(read_trace, tmp_path / "none.csv")
    assert problem.message == "there is no such file"


def test_oboe(written):
    trace = read_oboe(written("0.5\t8", "2.5\t4", "", "4 0"))
    assert trace == Trace((0, 2.5, 4), (1e6, 0.5e6, 0))
    (problem,) = problems(read_oboe, written("0.5 fast"))
    assert (problem.line, problem.path) == (1, "Mbit/s")


@given(traces(), st.floats(1, 1e12))
def test_rescaled_reaches_exactly_the_capacity_and_keeps_the_shape(trace, capacity):
    if max(trace.values) == 0:
        with pytest.raises(InputError):
            rescaled(trace, capacity=capacity)
        return
    stretched = rescaled(trace, capacity=capacity)
    assert max(stretched.values) == capacity
    ratio = capacity / max(trace.values)
    assert stretched.values == pytest.approx([value * ratio for value in trace.values])


def test_bamboo(written):
    path = written(
        "0,add,a", "0,add,b", "60000,remove,a", "60000,add,c", "90500,add,a", "90500,remove,a"
    )
    assert read_bamboo(path) == {
        "a": Trace((0, 60), (1, 0)),
        "b": Trace.constant(1),
        "c": Trace((0, 60), (0, 1)),
    }
    found = problems(read_bamboo, written("5000,ad,a", "4000,remove,a", "3000,add,b"))
    assert [(problem.line, problem.path) for problem in found] == [
        (1, "action"),
        (3, "milliseconds"),
    ]
    assert found[0].suggestion == 'did you mean "add"?'


def shared(pattern: str) -> list[Path]:
    files = sorted(SHARED.glob(pattern))
    if not files:
        pytest.skip("the shared folder of measured traces is not here")
    return files


def test_measured_throughput_is_read_and_positive():
    for path in shared("bandwidth/oboe_*.txt"):
        trace = read_oboe(path)
        assert 1e4 < min(trace.values) <= max(trace.values) < 1e8
        assert trace.times[-1] > 60
        assert max(rescaled(trace, capacity=3.125e9).values) == 3.125e9


@pytest.mark.parametrize(("name", "nodes", "final"), [("p3", 177, 10), ("g4dn", 79, 5)])
def test_measured_preemptions_are_read(name, nodes, final):
    (path,) = shared(f"preemption/bamboo-{name}.csv")
    traces_by_node = read_bamboo(path)
    assert len(traces_by_node) == nodes
    assert sum(trace.values[-1] for trace in traces_by_node.values()) == final
    assert all(set(trace.values) <= {0.0, 1.0} for trace in traces_by_node.values())
