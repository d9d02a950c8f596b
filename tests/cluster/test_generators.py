"""Generators: same seed, same trace; what each of them promises; and the table in the docs is
true."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.cluster.generators import GENERATORS, BadParameter, generate
from argosy.cluster.trace import Trace
from argosy.errors import Mismatch

DOCS = Path(__file__).resolve().parents[2] / "docs" / "traces.md"
RANDOM = ["on-off", "random-walk", "markov", "flap", "straggler"]
DETERMINISTIC = ["periodic", "token-bucket"]

names = st.sampled_from(sorted(GENERATORS))
seeds = st.integers(0, 2**32)
horizons = st.floats(0, 1000)


def trace_of(
    name: str, *, nominal: float = 1.0, seed: int = 0, horizon: float = 600.0, **given: object
) -> Trace:
    return generate(name, given, nominal=nominal, seed=seed, horizon=horizon)


def spells(trace: Trace, value: float) -> list[float]:
    """Lengths of the segments at ``value``, in seconds, but for the last that has no end."""
    segments = zip(itertools.pairwise(trace.times), trace.values, strict=False)
    return [end - start for (start, end), held in segments if held == value]


@given(names, seeds, horizons)
def test_same_seed_same_trace(name, seed, horizon):
    one, two = (trace_of(name, seed=seed, horizon=horizon) for _ in range(2))
    assert repr((one.times, one.values)) == repr((two.times, two.values))


@pytest.mark.parametrize("name", RANDOM)
def test_another_seed_gives_another_trace(name):
    assert len({trace_of(name, seed=seed) for seed in range(5)}) == 5


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_without_chance_the_seed_does_not_matter(name):
    assert trace_of(name, seed=1) == trace_of(name, seed=2)


def test_random_and_deterministic_generators_are_all_of_them():
    assert sorted(RANDOM + DETERMINISTIC) == sorted(GENERATORS)


@given(names, seeds, horizons)
def test_by_default_the_nominal_value_is_the_highest_and_returns_at_the_horizon(
    name, seed, horizon
):
    trace = trace_of(name, seed=seed, horizon=horizon, nominal=3e9)
    assert all(0 <= value <= 3e9 for value in trace.values)
    assert trace.times[-1] <= horizon
    assert trace.at(horizon) == trace.values[-1] == 3e9


@given(names, seeds, st.floats(1e-3, 1e12))
def test_a_trace_scales_with_its_nominal_value(name, seed, nominal):
    unit, scaled = (
        trace_of(name, seed=seed, horizon=200),
        trace_of(name, seed=seed, horizon=200, nominal=nominal),
    )
    assert scaled.times == unit.times
    assert scaled.values == pytest.approx([nominal * value for value in unit.values], rel=1e-12)


@given(names, seeds, st.floats(1, 300), st.floats(1, 300))
def test_a_longer_horizon_begins_with_the_same_trace(name, seed, one, other):
    short, long = sorted((one, other))
    first, second = (trace_of(name, seed=seed, horizon=horizon) for horizon in (short, long))
    for time in (*first.times[:-1], *(time for time in second.times if time < short)):
        assert first.at(time) == second.at(time)


def test_on_off_with_fixed_durations():
    trace = trace_of("on-off", on="4 s", off="1 s", low=0.25, durations="fixed", horizon=12)
    assert trace == Trace((0, 4, 5, 9, 10), (1, 0.25, 1, 0.25, 1))


@pytest.mark.parametrize(
    ("name", "low", "full_mean", "low_mean"),
    [("on-off", 0.1, 20, 10), ("flap", 0.0, 120, 2), ("straggler", 0.5, 120, 30)],
)
def test_spells_last_as_long_as_stated_on_average(name, low, full_mean, low_mean):
    trace = trace_of(name, seed=3, horizon=1e6)
    assert set(trace.values) == {1.0, low}
    for value, mean in ((1.0, full_mean), (low, low_mean)):
        found = spells(trace, value)
        assert sum(found) / len(found) == pytest.approx(mean, rel=4 / math.sqrt(len(found)))


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(["square", "sine"]), st.integers(2, 32))
def test_a_wave_averages_to_half_its_depth_and_repeats(depth, phase, shape, samples):
    wave = trace_of(
        "periodic", period="8 s", depth=depth, phase=phase, shape=shape, samples=samples, horizon=64
    )
    assert wave.mean(0, 8) == pytest.approx(1 - depth / 2, abs=1e-9)
    assert wave.mean(3, 35) == pytest.approx(1 - depth / 2, abs=1e-9)
    assert min(wave.values) >= 1 - depth - 1e-12


def test_a_square_wave_and_its_phase():
    assert trace_of("periodic", period="8 s", horizon=16) == Trace(
        (0, 4, 8, 12, 16), (1, 0.5, 1, 0.5, 1)
    )
    late = trace_of("periodic", period="8 s", phase=0.75, horizon=16)
    assert late == Trace((0, 2, 6, 10, 14, 16), (0.5, 1, 0.5, 1, 0.5, 1))


@given(seeds, st.floats(0, 1), st.floats(1, 3), st.floats(0, 2))
def test_a_random_walk_stays_within_its_bounds(seed, low, high, volatility):
    walk = trace_of("random-walk", seed=seed, low=low, high=high, volatility=volatility, horizon=50)
    assert all(min(low, 1) <= value <= max(high, 1) for value in walk.values)
    assert all(time == int(time) for time in walk.times)


def test_a_random_walk_without_volatility_stands_still():
    assert trace_of("random-walk", volatility=0) == Trace.constant(1)


def test_markov_visits_its_levels_and_follows_its_transitions():
    assert set(trace_of("markov", horizon=1e4).values) == {1.0, 0.5, 0.1}
    round_trip = [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    cycle = trace_of("markov", levels=[1, 0.6, 0.3], transitions=round_trip, horizon=1e3, seed=5)
    assert cycle.values[:6] == (1, 0.6, 0.3, 1, 0.6, 0.3)
    stays = [
        end - start for start, end in itertools.pairwise(trace_of("markov", horizon=1e5).times)
    ]
    assert sum(stays) / len(stays) == pytest.approx(10, rel=0.05)
    assert trace_of("markov", levels=[0.4], horizon=10).values == (0.4, 1.0)


def test_a_token_bucket_is_full_until_its_credits_are_spent():
    # 60 s of full-rate traffic, refilled at 0.2: lasts 60 / 0.8 = 75 s; 60 s idle bring 12 s back,
    # for 15 s.
    bucket = trace_of("token-bucket", horizon=540)
    assert bucket.times == pytest.approx((0, 75, 180, 195, 360, 375, 540))
    assert bucket.values == (1, 0.2, 1, 0.2, 1, 0.2, 1)


def test_a_token_bucket_that_is_used_below_its_baseline_never_empties():
    assert trace_of("token-bucket", demand=0.2, baseline=0.2) == Trace.constant(1)
    assert trace_of("token-bucket", burst="1 h", busy="10 min", horizon=600) == Trace.constant(1)


@given(st.floats(0.05, 0.9), st.floats(0.05, 1), st.integers(1, 300), st.integers(1, 300))
def test_a_token_bucket_never_gives_more_than_burst_and_refill(baseline, demand, busy, idle):
    trace = trace_of(
        "token-bucket",
        burst="30 s",
        baseline=baseline,
        demand=demand,
        busy=f"{busy} s",
        idle=f"{idle} s",
        horizon=900,
    )
    used = time = 0.0
    while time + busy <= 900:
        shares = trace.integral(time, time + busy)
        full = (shares - baseline * busy) / (1 - baseline)
        used += full * demand + (busy - full) * min(demand, baseline)
        time += busy + idle
        assert used <= 30 + baseline * time + 1e-6


@pytest.mark.parametrize(
    ("name", "parameter", "value", "expected", "suggestion"),
    [
        (
            "on-off",
            "onn",
            "1 s",
            "one of the parameters on, off, low, durations",
            'did you mean "on"?',
        ),
        (
            "on-off",
            "on",
            20,
            'a time such as "30 us"',
            'a number needs its unit: did you mean "20 us"?',
        ),
        ("on-off", "on", "20 sec", 'a time such as "30 us"', 'did you mean "20 s"?'),
        ("on-off", "off", "0 s", 'a time such as "30 us", more than 0', None),
        ("on-off", "low", 1.5, "a share from 0 to 1", None),
        ("on-off", "low", "0.5", "a share from 0 to 1", None),
        ("on-off", "low", True, "a share from 0 to 1", None),
        ("on-off", "low", math.nan, "a share from 0 to 1", None),
        ("on-off", "durations", "fix", '"exponential" or "fixed"', 'did you mean "fixed"?'),
        ("periodic", "samples", 1, "a whole number from 2 to 1000", None),
        ("periodic", "shape", 3, '"square" or "sine"', None),
        ("random-walk", "low", 2, "at most high = 1.0", None),
        ("markov", "levels", [], "a list of shares such as [1.0, 0.5]", None),
        ("markov", "levels", [1, -1], "a share of at least 0", None),
        ("markov", "transitions", [[1]], "3 rows of 3, one for each level", None),
        ("markov", "transitions", [[0.5, 0.4]], "rows of chances that sum to 1", None),
        ("markov", "transitions", "all", "a list of rows of chances", None),
        ("straggler", "slowdown", 0.5, "a factor of at least 1", None),
    ],
)
def test_a_bad_parameter_is_named_with_what_was_expected(
    name, parameter, value, expected, suggestion
):
    with pytest.raises(BadParameter) as caught:
        trace_of(name, **{parameter: value})
    assert (caught.value.parameter, caught.value.expected) == (parameter, expected)
    assert caught.value.suggestion == suggestion
    assert str(caught.value).startswith(f"{parameter}: found ")


def test_an_unknown_generator_is_refused_with_a_suggestion():
    with pytest.raises(Mismatch) as caught:
        trace_of("onoff")
    assert not isinstance(caught.value, BadParameter)
    assert caught.value.suggestion == 'did you mean "on-off"?'


def test_durations_that_never_reach_the_horizon_are_refused():
    with pytest.raises(Mismatch, match="1,000,000 changes"):
        trace_of("periodic", period="1 ns", horizon=1e6)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_parameter_is_a_keyword_of_its_function_and_its_default_is_readable(name):
    generator = GENERATORS[name]
    _, *keywords = inspect.signature(generator.steps).parameters
    assert keywords == list(generator.parameters)
    for parameter in generator.parameters.values():
        parameter.read(parameter.default)


def test_the_table_in_the_docs_is_this_table():
    written = [
        (name, key, "" if one.default is None else f"`{json.dumps(one.default)}`", one.meaning)
        for name, generator in GENERATORS.items()
        for key, one in generator.parameters.items()
    ]
    rows = ["| `{}` | `{}` | {} | {} |".format(*row).replace("|  |", "| |") for row in written]
    text = DOCS.read_text(encoding="utf-8")
    table = (
        text.split("| generator | parameter | default | meaning |\n", 1)[1]
        .split("\n\n", 1)[0]
        .splitlines()[1:]
    )
    assert table == rows
    for name in GENERATORS:
        assert f"\n| `{name}` | " in text.split("| generator | what it is |", 1)[1]
