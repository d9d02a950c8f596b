"""Kept plans rank as a recurrence over their tasks does, whatever an edge carries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.oracles import recurrence_end

from argosy.choose.kept import _envelope, keep
from argosy.choose.policy import CLEARLY, schedules_that_fit, with_policy
from argosy.choose.steady import SteadyGraph
from argosy.cluster.changes import link_steps
from argosy.cluster.file import cluster_from_content, with_changes
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.errors import InputError
from argosy.plan.check import check_plan
from argosy.plan.file import load_plan
from argosy.plan.plan import Plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.tasks.compile import compile_plan
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

SCHEDULES = [ScheduleSpec(), ScheduleSpec(kind=ScheduleKind.EAGER)] + [
    ScheduleSpec(kind=ScheduleKind.KFKB, k=k) for k in (2, 4)
]
EDGE = "v0.nic"


@pytest.fixture(scope="module")
def case() -> tuple[Plan, Chain, Cluster]:
    plan = load_plan("llama-3-8b-on-mixed-16")
    ref = plan.model
    chain = load_model(
        ref.name, sequence_length=ref.sequence_length, dtype=ref.dtype, optimizer=ref.optimizer
    )
    return plan, chain, with_changes(cluster_from_content(plan.cluster.content), [])


def slowly(plan: Plan, chain: Chain, cluster: Cluster, bandwidth: float) -> float:
    """By the recurrence, on a cluster whose edge has the bandwidth."""
    changed = with_changes(cluster, [link_steps(EDGE, Trace.constant(bandwidth))])
    return recurrence_end(compile_plan(plan, chain, changed), changed)


def test_lasting_states_are_what_the_recurrence_says(case: tuple[Plan, Chain, Cluster]) -> None:
    plan, chain, cluster = case
    trace = Trace((0.0, 50.0, 100.0), (3e9, 2e8, 9e8))
    changing = with_changes(cluster, [link_steps(EDGE, trace)])
    steady = SteadyGraph(compile_plan(plan, chain, changing), changing)
    for seconds, bandwidth in zip(
        steady.seconds(steady.at([0.0, 60.0, 200.0])), trace.values, strict=True
    ):
        assert seconds == pytest.approx(slowly(plan, chain, cluster, bandwidth), rel=1e-12)


def test_ranking_equals_the_slow_path(case: tuple[Plan, Chain, Cluster]) -> None:
    plan, chain, cluster = case
    plans = [replace(plan, schedule=schedule) for schedule in SCHEDULES]
    kept = keep(plans, chain, cluster, EDGE)
    for bandwidth in np.geomspace(kept.low, kept.high, 6):
        slow = [slowly(one, chain, cluster, bandwidth) for one in plans]
        assert kept.seconds(bandwidth) == pytest.approx(slow, rel=1e-9)
        assert slow[kept.ranking(bandwidth)[0]] == pytest.approx(min(slow), rel=1e-9)


def test_an_unknown_edge_is_named(case: tuple[Plan, Chain, Cluster]) -> None:
    with pytest.raises(
        InputError, match=r'found "v0\.nik", expected an edge of mixed-16; did you mean "v0\.nic"'
    ):
        keep([case[0]], case[1], case[2], "v0.nik")


def test_the_policy_is_never_clearly_worse_than_any_schedule(
    case: tuple[Plan, Chain, Cluster],
) -> None:
    plan, chain, cluster = case
    plan = replace(plan, schedule=ScheduleSpec())
    ruled = with_policy(plan, chain, cluster, [EDGE])
    check_plan(ruled, chain, cluster)
    assert ruled.policy, "a slow link calls for another schedule"
    variants = schedules_that_fit(plan, chain, cluster)
    for bandwidth in np.geomspace(3e7, 1e10, 7):
        chosen = replace(plan, schedule=ruled.schedule_at({EDGE: bandwidth}))
        best = min(slowly(one, chain, cluster, bandwidth) for one in variants)
        assert slowly(chosen, chain, cluster, bandwidth) <= best / (1 - 2 * CLEARLY)


def test_an_edge_that_is_down_needs_its_bandwidths(case: tuple[Plan, Chain, Cluster]) -> None:
    plan, chain, cluster = case
    down = with_changes(cluster, [link_steps(EDGE, Trace.constant(0.0))])
    with pytest.raises(
        InputError, match=r'edge: found "v0.nic", expected an edge that is not down at time 0'
    ):
        keep([plan], chain, down, EDGE)
    kept = keep([plan], chain, down, EDGE, between=(1e8, 1e9))
    assert kept.seconds(5e8) == pytest.approx([slowly(plan, chain, cluster, 5e8)], rel=1e-9)


def test_of_lines_with_the_same_slope_the_upper_one_counts() -> None:
    assert _envelope([(1.0, 2.0), (3.0, 2.0), (0.0, 5.0), (2.5, 2.0)]) == [(3.0, 2.0), (0.0, 5.0)]
