"""Plans with tensor-parallel groups across hosts, as the search finds them, train as one process
does."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime.group_cases import (
    MICRO_BATCHES,
    SIZE,
    chain,
    compute_model,
    train_alone,
    train_by,
)
from runtime.rank_pool import RankPool

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import parse_toml
from argosy.errors import NothingFitsError
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan

STEPS = 3


def hosts(memory: str) -> Cluster:
    """Four hosts of one device each."""
    text = f"""
name = "hosts"
[[kinds]]
name = "core"
memory = "{memory}"
memory_bandwidth = "20 GB/s"
flops = {{ fp32 = "1 GFLOP/s" }}
[[nodes]]
name = "h"
count = 4
devices = {{ kind = "core", count = 1 }}
nic = {{ bandwidth = "10 Gbit/s", latency = "20 us" }}
"""
    return build_cluster(parse_toml(text, file="hosts.toml"), folder=Path())


def found(memory: str, *, spanning: bool | None = None, width: int | None = None) -> Plan:
    settings = Settings(runnable=True, spanning=spanning, width=width)
    model = compute_model((1, 2) if width is None else (width,))
    batch = SIZE * MICRO_BATCHES
    return find_plan(chain(), hosts(memory), global_batch=batch, settings=settings, model=model)


def train(ranks: RankPool, plan: Plan, hosts_of_a_group: int = 2) -> None:
    """Check that each group has several hosts, and that losses are those of one process."""
    groups = [replica.devices for stage in plan.stages for replica in stage.replicas]
    numbers = {len({name.partition(".")[0] for name in group}) for group in groups}
    assert numbers == {hosts_of_a_group}
    [losses, *_] = ranks(len(plan.devices), train_by, plan, STEPS)
    assert losses == pytest.approx(train_alone(STEPS), abs=1e-7)


def test_a_plan_that_fits_only_across_hosts_runs(ranks: RankPool) -> None:
    with pytest.raises(NothingFitsError):
        found("2 KiB", spanning=False)
    plan = found("2 KiB")
    assert len(plan.stages) == 2
    train(ranks, plan)


def test_a_plan_that_is_faster_across_hosts_runs(ranks: RankPool) -> None:
    """With room for two layers and few samples, replicas of groups beat pipelines of devices."""
    plan, inside = found("2500 B", spanning=True), found("2500 B", spanning=False)
    assert plan.predicted is not None and inside.predicted is not None
    assert plan.predicted.iteration_seconds < 0.9 * inside.predicted.iteration_seconds
    train(ranks, plan)


def test_a_group_on_three_of_four_hosts_runs(ranks: RankPool) -> None:
    """The requested width divides neither the hosts nor the columns of the weights."""
    plan = found("8 KiB", width=3)
    assert len(plan.devices) == 3
    train(ranks, plan, 3)
