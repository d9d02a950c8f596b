"""Plans in which every replica takes as many samples, and what limits them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from argosy.cluster.file import load_cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan, Recompute
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleKind
from argosy.solve.pool_search import PoolSearch
from argosy.workload.load import load_model

CHAIN = load_model("gpt2-xl", dtype="fp16")
EVEN = Settings(even_shares=True)


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.iteration_seconds


@pytest.mark.parametrize(
    "name", ["two-cards", "mixed-8", pytest.param("mixed-16", marks=pytest.mark.exhaustive)]
)
def test_every_replica_takes_as_many_samples(name: str) -> None:
    cluster = load_cluster(name)
    even = find_plan(CHAIN, cluster, global_batch=64, settings=EVEN)
    assert len({replica.samples for stage in even.stages for replica in stage.replicas}) == 1
    assert len({len(stage.replicas) for stage in even.stages}) == 1
    assert even.certificate is not None
    assert "equal shares" in even.certificate.scope
    assert even.certificate.lower_bound_seconds <= seconds(even)


def test_uneven_shares_are_no_slower_when_searched_to_the_end() -> None:
    cluster = load_cluster("two-cards")
    settings = Settings(level=2, gap=0.005, time_budget=20)
    free = find_plan(CHAIN, cluster, global_batch=16, settings=settings)
    even = find_plan(CHAIN, cluster, global_batch=16, settings=replace(settings, even_shares=True))
    assert seconds(free) <= seconds(even) * 1.01


@pytest.mark.parametrize("late", [1.0, 3.0])
def test_all_numbers_of_replicas_share_the_time(
    monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    """Each takes its part, or some times as much: then those for which no time is left count with
    their bound."""
    clock, parts, run = [0.0], list[float](), PoolSearch.run

    def slow(search: PoolSearch) -> Plan:
        parts.append(search.settings.time_budget)
        clock[0] += late * search.settings.time_budget
        return run(search)

    monkeypatch.setattr("argosy.solve.budget.time", SimpleNamespace(process_time=lambda: clock[0]))
    monkeypatch.setattr(PoolSearch, "run", slow)
    found = find_plan(
        CHAIN, load_cluster("two-cards"), global_batch=16, settings=replace(EVEN, time_budget=6.0)
    )
    assert found.certificate is not None
    if late == 1:
        assert parts == [2.0, 2.0, 2.0]  # 1, 2 and 4 replicas
    else:
        assert parts == [2.0]
        assert found.certificate.lower_bound_seconds == found.certificate.free_bound_seconds


def test_a_prime_batch_leaves_one_replica() -> None:
    plan = find_plan(CHAIN, load_cluster("two-cards"), global_batch=7, settings=EVEN)
    assert {len(stage.replicas) for stage in plan.stages} == {1}


def test_nothing_fits_is_told_as_ever() -> None:
    chain = load_model("llama-3-70b")
    with pytest.raises(InfeasibleError):
        find_plan(chain, load_cluster("two-cards"), global_batch=8, settings=EVEN)


def test_zero_and_recomputation_can_be_ruled_out() -> None:
    settings = Settings(zero=(0,), recompute=(Recompute.NONE,))
    plan = find_plan(CHAIN, load_cluster("mixed-8"), global_batch=64, settings=settings)
    assert {(stage.zero, stage.recompute) for stage in plan.stages} == {(0, Recompute.NONE)}


def test_a_runtime_that_blocks_gets_1f1b_and_slower_predictions() -> None:
    cluster = load_cluster("mixed-8")
    usual = find_plan(CHAIN, cluster, global_batch=64)
    blocking = find_plan(CHAIN, cluster, global_batch=64, model=ComputeModel(blocking=True))
    assert blocking.schedule.kind is ScheduleKind.ONE_F_ONE_B
    assert seconds(blocking) >= seconds(usual)
    slow_sums = find_plan(CHAIN, cluster, global_batch=64, model=ComputeModel(reduction=0.1))
    assert seconds(slow_sums) >= seconds(usual) * (1 - 1e-9)


@pytest.mark.parametrize("has_found", [False, True])
def test_an_interrupt_ends_all_numbers_of_replicas(
    has_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second search, before or after it has a plan; three more would follow."""
    search, calls = PoolSearch._search, []

    def watched(self: PoolSearch, units: tuple[int, ...]) -> float:
        calls.append(self.settings.replicas)
        if self.settings.replicas == 2 and not has_found:
            raise KeyboardInterrupt
        bound = search(self, units)
        if self.settings.replicas == 2:
            raise KeyboardInterrupt
        return bound

    monkeypatch.setattr(PoolSearch, "_search", watched)
    plan = find_plan(CHAIN, load_cluster("two-cards"), global_batch=8, settings=EVEN)
    assert set(calls) == {1, 2}
    assert {len(stage.replicas) for stage in plan.stages} <= {1, 2}
    assert plan.certificate is not None
    assert plan.certificate.lower_bound_seconds == plan.certificate.free_bound_seconds
