"""Estimates follow real changes within a few samples and shrug off odd ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.adapt.watch import CONFIRM, Tracker, Watch, in_grains, in_world
from argosy.cluster.file import load_cluster


@given(st.floats(1.0, 1e9), st.floats(0.1, 0.8) | st.floats(1.25, 10.0), st.integers(0, 1000))
def test_a_change_is_found_within_five_noisy_samples(level: float, factor: float, seed: int) -> None:
    noise = random.Random(seed)
    tracker = Tracker(level)
    for _ in range(20):
        tracker.observe(level * noise.uniform(0.96, 1.04))
    assert tracker.level == pytest.approx(level, rel=0.05)
    for _ in range(5):
        tracker.observe(factor * level * noise.uniform(0.96, 1.04))
    assert tracker.level == pytest.approx(factor * level, rel=0.15)


@given(st.floats(1.0, 1e9), st.floats(0.01, 100.0), st.integers(1, 30))
def test_one_odd_sample_changes_nothing(level: float, odd: float, when: int) -> None:
    tracker = Tracker(level)
    changes = [tracker.observe(odd * level if index == when else level) for index in range(31)]
    assert not any(changes)
    assert tracker.level == pytest.approx(level, rel=0.16)


def test_what_is_gone_is_believed_at_once_and_so_is_what_returns_after_two() -> None:
    tracker = Tracker(5.0)
    assert tracker.observe(0.0)
    assert tracker.level == 0.0
    assert [tracker.observe(5.0) for _ in range(CONFIRM)][-1]
    assert tracker.level == 5.0


def test_a_believed_world_is_a_cluster_without_a_future() -> None:
    cluster = load_cluster("mixed-16")
    watch = Watch(cluster)
    rate = next(link.bandwidth.at(0) for link in cluster.links if link.name == "v0.nic.out")
    for _ in range(CONFIRM):
        changed = watch.observe({"v0.nic.out": rate / 5}, {"v1.0": 0.5})
    assert changed == ("v0.nic.out", "v1.0")
    believed = in_world(cluster, watch.world)
    link = next(link for link in believed.links if link.name == "v0.nic.out")
    assert link.bandwidth.is_constant
    assert link.bandwidth.at(0) == pytest.approx(rate / 5, rel=0.02)
    assert believed.device("v1.0").speed.at(0) == pytest.approx(0.5, rel=0.02)
    assert believed.device("v1.1").speed.at(0) == 1.0


def test_what_nobody_sees_is_forgotten_and_each_time_later() -> None:
    cluster = load_cluster("mixed-16")
    watch = Watch(cluster)
    name = "v0.nic.out"
    rate = next(link.bandwidth.at(0) for link in cluster.links if link.name == name)
    waits = []
    for _ in range(2):
        for _ in range(CONFIRM):
            watch.observe({name: rate / 5}, {})
        assert dict(watch.world.bandwidths)[name] == pytest.approx(rate / 5, rel=0.02)
        waits.append(next(step for step in range(100) if name in watch.observe({}, {})))
        assert dict(watch.world.bandwidths)[name] == pytest.approx(rate, rel=0.02)
    assert waits == [9, 19]


@given(st.floats(1e-6, 1e15))
def test_grains_are_small_and_stay(level: float) -> None:
    assert in_grains(level) == pytest.approx(level, rel=0.0101)
    assert in_grains(in_grains(level)) == pytest.approx(in_grains(level), rel=1e-9)
