"""The change test keeps its stated error rates: it raises few false alarms, and finds real changes
in time."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.adapt.watch import (
    CHANGE,
    MEMORY,
    NOISE,
    RUN_LENGTH,
    ClusterWatch,
    Tracker,
    in_grains,
    in_world,
)
from argosy.cluster.file import load_cluster

TRIALS = 60


def trained(draw: random.Random, noise: float, threshold: float) -> Tracker:
    """A tracker that has seen as many noisy samples of level 1 as it remembers."""
    tracker = Tracker(1.0, threshold)
    for _ in range(MEMORY):
        tracker.observe(math.exp(draw.gauss(0.0, noise)))
    return tracker


@pytest.mark.parametrize(("noise", "factor"), [(0.02, 1), (NOISE, 1), (0.1, 3), (0.2, 3)])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=3, deadline=None)
def test_false_alarms_are_as_rare_as_stated(noise: float, factor: float, seed: int) -> None:
    """Within n steps at most n / run length of all trackers alarm (5), and not three times as many
    where the noise has to be estimated; four standard deviations are left for chance."""
    draw, steps, run_length = random.Random(seed), MEMORY, 500.0
    expected = factor * TRIALS * steps / run_length
    alarms = 0
    for _ in range(TRIALS):
        tracker = trained(draw, noise, math.log(2 * run_length))
        alarms += any(tracker.observe(math.exp(draw.gauss(0.0, noise))) for _ in range(steps))
    assert alarms <= expected + 4 * math.sqrt(expected)


@given(
    distance=st.floats(0.15, 2.0),
    noise=st.floats(0.0, NOISE),
    sign=st.sampled_from((-1, 1)),
    seed=st.integers(0, 999),
)
@settings(max_examples=20, deadline=None)
def test_a_change_is_found_within_the_stated_delay(
    distance: float, noise: float, sign: int, seed: int
) -> None:
    """The mean delay over some changes is at most (6)."""
    draw, threshold = random.Random(seed), math.log(2 * RUN_LENGTH)
    delays, deviations = [], []
    for _ in range(20):
        tracker = trained(draw, noise, threshold)
        deviations.append(tracker.noise)
        level = tracker.level * math.exp(sign * distance)
        delays.append(
            next(
                n
                for n in range(1, 1000)
                if tracker.observe(level * math.exp(draw.gauss(0.0, noise)))
            )
        )
    gain = min(threshold / 2, CHANGE * (distance - CHANGE / 2) / max(deviations) ** 2)
    assert sum(delay < 2 for delay in delays) <= 1, (
        "what noise had gathered before may leave one step"
    )
    assert sum(delays) / len(delays) <= 1 + threshold / gain


@given(st.floats(1.0, 1e9), st.floats(0.1, 0.8) | st.floats(1.25, 10.0), st.integers(0, 1000))
def test_a_change_by_a_fifth_is_found_within_four_samples(
    level: float, factor: float, seed: int
) -> None:
    noise = random.Random(seed)
    tracker = Tracker(level)
    for _ in range(20):
        tracker.observe(level * noise.uniform(0.96, 1.04))
    assert tracker.level == pytest.approx(level, rel=0.05)
    found = [tracker.observe(factor * level * noise.uniform(0.96, 1.04)) for _ in range(4)]
    assert sum(map(bool, found)) == 1
    assert max(found) == found.index(max(found)) + 1  # the samples since the change
    assert tracker.level == pytest.approx(factor * level, rel=0.05)


@given(st.floats(1.0, 1e9), st.floats(0.01, 100.0), st.integers(1, 30))
def test_one_odd_sample_changes_nothing(level: float, odd: float, when: int) -> None:
    tracker = Tracker(level)
    changes = [tracker.observe(odd * level if index == when else level) for index in range(31)]
    assert not any(changes)
    assert tracker.level == pytest.approx(level, rel=NOISE)


def test_noise_is_estimated_and_makes_the_test_slower() -> None:
    draw = random.Random(1)
    calm, noisy = Tracker(1.0), Tracker(1.0)
    for _ in range(MEMORY):
        calm.observe(math.exp(draw.gauss(0.0, 0.01)))
        noisy.observe(math.exp(draw.gauss(0.0, 0.3)))
    assert calm.noise == NOISE and noisy.noise == pytest.approx(0.3, rel=0.5)
    assert calm.is_at_odds_with(0.7) and not noisy.is_at_odds_with(0.7)


def test_later_halves_that_are_noisier_than_steps_contradict_less() -> None:
    draw = random.Random(1)
    calm, noisy = Tracker(1.0), Tracker(1.0)
    for _ in range(MEMORY):
        calm.compare_halves(1.0, 1.0)
        noisy.compare_halves(math.exp(draw.gauss(0.0, 0.3)), 1.0)
    assert calm.is_at_odds_with(0.7) and not noisy.is_at_odds_with(0.7)
    assert noisy.is_at_odds_with(0.0)


def test_what_is_gone_is_believed_at_once_and_so_is_what_returns_after_two() -> None:
    tracker = Tracker(5.0)
    assert tracker.observe(0.0) == 1
    assert tracker.level == 0.0
    assert [tracker.observe(5.0) for _ in range(2)] == [0, 2]
    assert tracker.level == pytest.approx(5.0)


def test_a_believed_world_is_a_cluster_without_a_future() -> None:
    cluster = load_cluster("mixed-16")
    watch = ClusterWatch(cluster)
    rate = next(link.bandwidth.at(0) for link in cluster.links if link.name == "v0.nic.out")
    for _ in range(2):
        changed = watch.observe({"v0.nic.out": rate / 5}, {"v1.0": 0.5})
    assert changed == {"v0.nic.out": 2, "v1.0": 2}
    believed = in_world(cluster, watch.world)
    link = next(link for link in believed.links if link.name == "v0.nic.out")
    assert link.bandwidth.is_constant
    assert link.bandwidth.at(0) == pytest.approx(rate / 5, rel=0.02)
    assert believed.device("v1.0").speed.at(0) == pytest.approx(0.5, rel=0.02)
    assert believed.device("v1.1").speed.at(0) == 1.0


def test_the_latest_world_has_what_contradicts_a_belief() -> None:
    watch = ClusterWatch(load_cluster("mixed-16"))
    watch.observe({}, {"v1.0": 0.5})
    assert dict(watch.world.speeds)["v1.0"] == 1.0
    assert dict(watch.latest.speeds)["v1.0"] == pytest.approx(0.5, rel=0.02)
    watch.observe({}, {"v1.0": 0.5})
    assert watch.latest == watch.world
    watch.observe({}, {"v1.0": 0.5}, {"v1.0": 1.0})  # it recovered within the step
    assert dict(watch.latest.speeds)["v1.0"] == 1.0 and dict(watch.world.speeds)["v1.0"] != 1.0


def test_what_nobody_sees_is_forgotten_and_each_time_later() -> None:
    cluster = load_cluster("mixed-16")
    watch = ClusterWatch(cluster)
    name = "v0.nic.out"
    rate = next(link.bandwidth.at(0) for link in cluster.links if link.name == name)
    waits = []
    for _ in range(2):
        for _ in range(2):
            watch.observe({name: rate / 5}, {})
        assert dict(watch.world.bandwidths)[name] == pytest.approx(rate / 5, rel=0.02)
        waits.append(next(step for step in range(100) if name in watch.observe({}, {})))
        assert dict(watch.world.bandwidths)[name] == pytest.approx(rate, rel=0.02)
    assert waits == [9, 19]


@given(st.floats(1e-6, 1e15))
def test_grains_are_small_and_stay(level: float) -> None:
    assert in_grains(level) == pytest.approx(level, rel=0.0101)
    assert in_grains(in_grains(level)) == pytest.approx(in_grains(level), rel=1e-9)
