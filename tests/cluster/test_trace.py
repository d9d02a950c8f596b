"""Traces: the laws of equations (1) and (2)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import traces

from argosy.cluster.trace import Trace, minimum
from argosy.errors import InputError

times = st.floats(0, 1000)
amounts = st.floats(0, 1e6)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-6)


def total(trace: Trace, start: float) -> float:
    """Everything that can still be done from ``start`` on."""
    return trace.integral(start, max(start, trace.times[-1])) if trace.values[-1] == 0 else math.inf


@given(traces(), times, amounts)
def test_advance_does_exactly_the_amount(trace, start, amount):
    end = trace.advance(start, amount)
    if end < math.inf:
        assert trace.integral(start, end) == close(amount)
    else:
        assert total(trace, start) <= amount + 1e-6


@given(traces(may_end_at_zero=False), times, amounts)
def test_advance_is_finite_where_the_last_value_is_not_zero(trace, start, amount):
    assert start <= trace.advance(start, amount) < math.inf


@given(traces(), times, st.floats(0.001, 1e6))
def test_advance_ends_as_early_as_possible(trace, start, amount):
    end = trace.advance(start, amount)
    if end < math.inf:
        just_before = start + (end - start) * (1 - 1e-6)
        assert trace.integral(start, just_before) < amount


@given(traces(), times, times)
def test_what_was_done_takes_until_now_or_the_start_of_an_outage(trace, one, other):
    start, end = sorted((one, other))
    done = trace.integral(start, end) * (1 - 1e-9)
    assert trace.advance(start, done) <= end + 1e-9


@given(traces(), times, times, amounts)
def test_advance_is_monotone_in_the_start(trace, one, other, amount):
    early, late = sorted((one, other))
    finished = trace.advance(early, amount), trace.advance(late, amount)
    slack = 1e-9 * (1 + finished[1]) if finished[1] < math.inf else 0
    assert finished[0] <= finished[1] + slack or total(trace, early) == close(amount)


@given(traces(), times, amounts, amounts)
def test_advance_is_monotone_in_the_amount(trace, start, one, other):
    small, large = sorted((one, other))
    assert trace.advance(start, small) <= trace.advance(start, large)


@given(traces(), times, amounts, amounts)
def test_two_amounts_in_a_row_take_as_long_as_both_at_once(trace, start, one, other):
    between = trace.advance(start, one)
    in_a_row, at_once = trace.advance(between, other), trace.advance(start, one + other)
    if in_a_row < math.inf and at_once < math.inf:
        assert trace.integral(start, in_a_row) == close(trace.integral(start, at_once))


@given(traces(), times, times, times)
def test_integrals_add_up(trace, one, two, three):
    start, middle, end = sorted((one, two, three))
    assert trace.integral(start, middle) + trace.integral(middle, end) == close(
        trace.integral(start, end)
    )
    assert trace.integral(start, end) >= -1e-6


@given(traces(), times, times)
def test_the_mean_lies_between_the_extremes(trace, one, other):
    start, end = sorted((one, other))
    if end - start > 1e-3:
        assert min(trace.values) - 1e-3 <= trace.mean(start, end) <= max(trace.values) + 1e-3
    assert trace.mean(start, start) == trace.at(start)


@given(traces(), times)
def test_the_value_holds_until_the_next_change(trace, time):
    change = trace.next_change(time)
    assert change > time
    assert change == math.inf or change in trace.times
    if change < math.inf:
        assert trace.at(math.nextafter(change, 0)) == trace.at(time)
        assert trace.at(change) == trace.values[trace.times.index(change)]
    else:
        assert trace.at(time) == trace.values[-1]


@given(traces(), times)
def test_knots_interpolate_the_integral(trace, time):
    knot_times, done = trace.knots
    assert np.interp(time, knot_times, done) == close(trace.integral(0, time))
    assert (np.diff(knot_times) > 0).all()
    assert (np.diff(done) >= 0).all()


@given(traces(may_end_at_zero=False), times, st.floats(0.001, 1e6))
def test_knots_invert_to_advance_where_nothing_stands_still(trace, start, amount):
    if min(trace.values) > 0:
        knot_times, done = trace.knots
        goal = np.interp(start, knot_times, done) + amount
        assert np.interp(goal, done, knot_times) == pytest.approx(
            trace.advance(start, amount), rel=1e-9, abs=1e-3
        )


@given(st.lists(traces(), min_size=1, max_size=4), times)
def test_the_minimum_is_the_lowest_everywhere(several, time):
    lowest = minimum(several)
    assert lowest.at(time) == min(trace.at(time) for trace in several)
    for knot in lowest.times:
        assert lowest.at(knot) == min(trace.at(knot) for trace in several)


@given(st.lists(traces(), min_size=1, max_size=3), times, amounts)
def test_a_route_is_never_faster_than_one_of_its_links(several, start, amount):
    slowest = max(trace.advance(start, amount) for trace in several)
    if slowest < math.inf:
        assert minimum(several).advance(start, amount) >= slowest - 1e-9 * (1 + slowest)


@given(traces())
def test_steps_that_change_nothing_are_dropped(trace):
    steps = list(zip(trace.times, trace.values, strict=True))
    doubled = [step for time, value in steps for step in ((time, value), (time + 1 / 16, value))]
    plain = Trace.from_steps(steps, initial=trace.values[0])
    assert Trace.from_steps(doubled, initial=trace.values[0]) == plain
    assert all(one != other for one, other in zip(plain.values, plain.values[1:], strict=False))
    for time in trace.times:
        assert plain.at(time) == trace.at(time)


@given(traces(), st.floats(0, 100), times)
def test_scaling_scales_what_is_done(trace, factor, time):
    assert trace.scaled(factor).integral(0, time) == close(factor * trace.integral(0, time))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], Trace((0.0,), (5.0,))),
        ([(0, 3)], Trace((0.0,), (3.0,))),
        ([(2, 5)], Trace((0.0,), (5.0,))),
        ([(2, 3), (2, 4)], Trace((0.0, 2.0), (5.0, 4.0))),
        ([(2, 3), (2, 5)], Trace((0.0,), (5.0,))),
        ([(2, 3), (4, 3), (6, 5)], Trace((0.0, 2.0, 6.0), (5.0, 3.0, 5.0))),
    ],
)
def test_from_steps_keeps_only_changes(steps, expected):
    assert Trace.from_steps(steps, initial=5) == expected


def test_a_device_that_is_lost_never_finishes():
    lost = Trace.from_steps([(10, 0)], initial=1)
    assert lost.advance(0, 10) == 10
    assert lost.advance(0, 10.5) == math.inf
    assert lost.advance(20, 1) == math.inf
    assert lost.advance(20, 0) == 20
    assert lost.advance(math.inf, 1) == math.inf
    assert lost.integral(0, math.inf) == 10
    assert Trace.constant(1).advance(0, math.inf) == math.inf


@pytest.mark.parametrize(
    ("start", "knot", "value", "amount"),
    [
        (0.64, 1.7, 6.0, 6.36),
        (0.12, 1.3, 7.1, 8.378),
        (0.34, 0.9, 1.2, 0.672),
        (0.03, 0.3, 7.7, 2.079),
    ],
)
def test_work_that_ends_where_an_outage_begins_does_not_wait_for_its_end(
    start, knot, value, amount
):
    # amount = value * (knot - start), but in floats start + amount / value lies a little after the
    # knot.
    assert start + amount / value > knot
    assert Trace((0.0, knot, knot + 1), (value, 0.0, 1.0)).advance(start, amount) == knot


def test_equal_traces_are_one_key():
    assert len({Trace.constant(2), Trace((0.0,), (2.0,)), Trace.constant(3)}) == 2


@pytest.mark.parametrize(
    ("knots", "values"),
    [
        ((), ()),
        ((0.0,), (1.0, 2.0)),
        ((1.0,), (1.0,)),
        ((0.0, 0.0), (1.0, 2.0)),
        ((0.0, 2.0, 1.0), (1.0, 2.0, 3.0)),
        ((0.0, math.nan), (1.0, 2.0)),
        ((0.0, math.inf), (1.0, 2.0)),
        ((0.0,), (-1.0,)),
        ((0.0,), (math.nan,)),
        ((0.0,), (math.inf,)),
    ],
)
def test_what_is_no_step_function_is_refused(knots, values):
    with pytest.raises(InputError):
        Trace(knots, values)


def test_repr_is_short():
    assert repr(Trace.constant(2.5)) == "Trace(2.5)"
    long = Trace.from_steps([(time, time % 7) for time in range(1, 50)], initial=10)
    assert repr(long) == "Trace(10 until 1 s, 1 until 2 s, ... 46 more, 6 until 49 s, then 0)"
