"""Unequal devices that share one sequence or the experts of a layer, by speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planning_cases import cluster_of, kind_fields, node_fields

from argosy.cluster.topology import Cluster
from argosy.plan.check import check_plan
from argosy.plan.file import dumps_plan, loads_plan
from argosy.plan.runnable import unsupported
from argosy.planner import Settings, find_plan
from argosy.workload.load import load_model


def unequal(nic: float = 100.0) -> Cluster:
    """Two devices, one of twice the other's speed."""
    kinds = [
        kind_fields(name, flops=flops, memory=8e10, memory_bandwidth=1e4)
        for name, flops in (("fast", 20), ("slow", 10))
    ]
    nodes = [node_fields(kind, count=1, per_node=1, nic=nic) for kind in ("fast", "slow")]
    return cluster_of({"name": "unequal", "kinds": kinds, "nodes": nodes})


@pytest.mark.parametrize("runnable", [False, True])
def test_one_sequence_is_cut_by_speed(runnable: bool) -> None:
    cluster = unequal()
    chain = load_model("llama-3.2-1b", sequence_length=16384, dtype="bf16")
    found = Settings(level=1, runnable=runnable, max_context=2)
    plan = find_plan(chain, cluster, global_batch=1, settings=found)
    without = find_plan(chain, cluster, global_batch=1, settings=replace(found, max_context=1))
    (stage,) = plan.stages
    assert stage.context == 2
    assert stage.replicas[0].ratios == pytest.approx((2 / 3, 1 / 3), abs=0.05)
    assert plan.predicted is not None and without.predicted is not None
    assert plan.predicted.iteration_seconds < 0.75 * without.predicted.iteration_seconds
    check_plan(plan, chain, cluster)
    assert loads_plan(dumps_plan(plan)) == plan
    assert not unsupported(plan)


def test_slow_links_leave_sequences_whole() -> None:
    chain = load_model("llama-3.2-1b", sequence_length=16384, dtype="bf16")
    plan = find_plan(
        chain, unequal(nic=0.01), global_batch=1, settings=Settings(level=1, max_context=2)
    )
    assert {stage.context for stage in plan.stages} == {1}
