"""Static, re-planned and in hindsight, over a trace; and what a migration moves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from argosy.choose.migrate import migration
from argosy.choose.replan import Courses, compare_courses
from argosy.choose.scenario import pace
from argosy.cluster.file import cluster_from_content, load_cluster, with_changes
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.plan.file import load_plan
from argosy.workload.load import load_model

HORIZON = 600.0
CHAIN = load_model("llama-3-8b", sequence_length=1024, dtype="fp16")


def changing(on: str, off: str, low: float) -> Cluster:
    parameters = {"on": on, "off": off, "low": low}
    change = {"link": "v*.nic", "generator": "on-off", "parameters": parameters, "seed": 1, "horizon": "10 min"}
    return with_changes(load_cluster("mixed-16"), [change])


@cache
def courses(on: str, off: str, low: float) -> Courses:
    return compare_courses(CHAIN, changing(on, off, low), global_batch=64, horizon=HORIZON)


@pytest.fixture(scope="module", params=[("100 s", "100 s", 0.05), ("10 s", "10 s", 0.3)], ids=["slow", "fast"])
def found(request: pytest.FixtureRequest) -> Courses:
    return courses(*request.param)


def test_hindsight_is_never_beaten(found: Courses) -> None:
    at_first, on_average, replanned, oracle = found.courses
    assert all(course.iterations <= oracle.iterations * (1 + 1e-12) for course in found.courses)
    assert at_first.switches == on_average.switches == ()
    assert replanned.iterations >= 0.98 * at_first.iterations
    for course in (replanned, oracle):
        assert course.migrating <= sum(switch.migration for switch in course.switches) * (1 + 1e-9)


def test_where_states_last_it_pays_to_replan() -> None:
    at_first, _, replanned, _ = courses("100 s", "100 s", 0.05).courses
    assert replanned.iterations > 1.1 * at_first.iterations
    for switch in replanned.switches:
        assert switch.migration < switch.pays_after


def test_a_switch_pays_once_staying_would_have_done_as_many_steps() -> None:
    *_, replanned, _ = courses("100 s", "100 s", 0.05).courses
    cluster = changing("100 s", "100 s", 0.05)
    for switch in replanned.switches:
        old, new = (
            1 / pace(plan, CHAIN, cluster, ComputeModel(), HORIZON).at(switch.time) for plan in (switch.old, switch.new)
        )
        assert switch.pays_after == pytest.approx(switch.migration + switch.pays_after_steps * new)
        assert switch.pays_after == pytest.approx(switch.pays_after_steps * old)


def test_a_migration_moves_what_changes_hands_and_no_more() -> None:
    plan = load_plan("llama-3-8b-on-mixed-16")
    cluster = with_changes(cluster_from_content(plan.cluster.content), [])
    chain = load_model("llama-3-8b", sequence_length=plan.model.sequence_length, dtype=plan.model.dtype)
    assert migration(plan, plan, chain, cluster).bytes == 0
    first, second, *rest = plan.stages
    cut = first.end - 1
    moved = replace(plan, stages=(replace(first, end=cut), replace(second, first=cut), *rest))
    size = chain.layers[cut].parameters * (2 + 12)  # fp16 weights, fp32 master copy and two moments
    found = migration(plan, moved, chain, cluster)
    assert found.inside == ()
    assert found.bytes == pytest.approx(size)  # four replicas with ZeRO 1 take a quarter each
    rate = cluster.links[next(i for i, link in enumerate(cluster.links) if link.name == "a1.nic.in")].bandwidth.at(0)
    assert found.seconds(cluster, 0.0) == pytest.approx(size / rate)
