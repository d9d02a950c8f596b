"""Static, re-planned and in hindsight, over a trace."""

from __future__ import annotations

from functools import cache

import pytest

from argosy.choose.replan import Courses, compare_courses
from argosy.choose.scenario import pace
from argosy.cluster.file import load_cluster, with_changes
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.workload.load import load_model

HORIZON = 600.0
CHAIN = load_model("llama-3-8b", sequence_length=1024, dtype="fp16")


def changing(on: str, off: str, low: float) -> Cluster:
    parameters = {"on": on, "off": off, "low": low}
    change = {
        "link": "v*.nic",
        "generator": "on-off",
        "parameters": parameters,
        "seed": 1,
        "horizon": "10 min",
    }
    return with_changes(load_cluster("mixed-16"), [change])


@cache
def courses(on: str, off: str, low: float) -> Courses:
    return compare_courses(CHAIN, changing(on, off, low), global_batch=64, horizon=HORIZON)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("100 s", "100 s", 0.05), marks=pytest.mark.exhaustive),
        ("10 s", "10 s", 0.3),
    ],
    ids=["slow", "fast"],
)
def found(request: pytest.FixtureRequest) -> Courses:
    return courses(*request.param)


def test_hindsight_is_never_beaten(found: Courses) -> None:
    at_first, on_average, replanned, oracle = found.courses
    assert all(course.iterations <= oracle.iterations * (1 + 1e-12) for course in found.courses)
    assert at_first.switches == on_average.switches == ()
    assert replanned.iterations >= 0.98 * at_first.iterations
    for course in (replanned, oracle):
        assert course.migrating <= sum(switch.migration for switch in course.switches) * (1 + 1e-9)


def test_where_links_are_lost_it_pays_to_replan() -> None:
    at_first, _, replanned, _ = courses("100 s", "100 s", 0.0).courses
    assert replanned.iterations > 1.1 * at_first.iterations
    for switch in replanned.switches:
        assert switch.migration <= switch.pays_after


def test_a_move_over_a_link_that_has_become_slow_takes_too_long() -> None:
    *_, replanned, oracle = courses("100 s", "100 s", 0.05).courses
    assert not replanned.switches
    assert all(
        switch.migration < 10 for switch in oracle.switches
    )  # made before, or when the link is back


def test_a_switch_pays_once_staying_would_have_done_as_many_steps() -> None:
    *_, replanned, oracle = courses("100 s", "100 s", 0.0).courses
    cluster = changing("100 s", "100 s", 0.0)
    checked = 0
    for switch in (*replanned.switches, *oracle.switches):
        before, after = (
            pace(plan, CHAIN, cluster, ComputeModel(), HORIZON).at(switch.time)
            for plan in (switch.old, switch.new)
        )
        assert switch.pays_after == pytest.approx(
            switch.migration + switch.pays_after_steps / after
        )
        if before > 0:
            assert switch.pays_after == pytest.approx(switch.pays_after_steps / before)
            checked += 1
    assert checked
