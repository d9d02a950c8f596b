"""Iterations that repeat others: left out, they give the same figures as played one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.strategies import Pipeline, Problem, full_mesh, pipelines, plans

from argosy.cluster.file import load_cluster, with_changes
from argosy.cluster.topology import Cluster
from argosy.plan.check import check_plan
from argosy.plan.file import load_plan
from argosy.sim.engine.exact import Engine, simulate_exact
from argosy.sim.engine.graph import Task, TaskGraph
from argosy.sim.engine.jump import Repeats
from argosy.sim.tasks.compile import compile_plan
from argosy.timeline import SpanKind, Timeline
from argosy.workload.load import load_model

few = settings(max_examples=25, deadline=None)


def same(graph: TaskGraph, cluster: Cluster, iterations: int, until: float = math.inf) -> Timeline:
    """The timeline with jumps, held against the one without."""
    found = simulate_exact(graph, cluster, iterations=iterations, record=1, until=until)
    whole = simulate_exact(graph, cluster, iterations=iterations, record=1, until=until, jump=False)
    assert whole.repeated == 0
    assert found.iteration_ends == pytest.approx(whole.iteration_ends, rel=1e-9)
    assert found.busy == pytest.approx(whole.busy, rel=1e-9)
    assert [use.link for use in found.links] == [use.link for use in whole.links]
    assert [use.bytes for use in found.links] == pytest.approx(
        [use.bytes for use in whole.links], rel=1e-9
    )
    assert (found.spans, found.memory, found.stalled) == (whole.spans, whole.memory, whole.stalled)
    return found


@few
@given(plans(), st.integers(2, 30))
def test_plans_of_any_kind_while_links_and_devices_change(
    problem: Problem, iterations: int
) -> None:
    check_plan(problem.plan, problem.chain, problem.cluster)
    found = same(
        compile_plan(problem.plan, problem.chain, problem.cluster), problem.cluster, iterations
    )
    event(f"{'some' if found.repeated else 'no'} iterations left out")


@few
@given(pipelines(), st.integers(2, 30), st.floats(0.0, 40.0))
def test_pipelines_under_any_traces_up_to_any_time(
    pipeline: Pipeline, iterations: int, until: float
) -> None:
    same(pipeline.graph, pipeline.cluster, iterations, until)


def mixed(changes: list[dict[str, Any]]) -> tuple[TaskGraph, Cluster]:
    """A plan of 16 devices that share NICs."""
    plan, cluster = (
        load_plan("llama-3-8b-on-mixed-16"),
        with_changes(load_cluster("mixed-16"), changes),
    )
    chain = load_model(
        plan.model.name, sequence_length=plan.model.sequence_length, dtype=plan.model.dtype
    )
    return compile_plan(plan, chain, cluster), cluster


SLOWER = {
    "link": "v0.nic",
    "steps": [["0 s", "25 Gbit/s"], ["95 s", "4 Gbit/s"], ["150 s", "25 Gbit/s"]],
}


@pytest.mark.parametrize(
    ("changes", "least"), [([], 24), ([SLOWER], 10)], ids=["calm", "between knots"]
)
def test_most_iterations_of_a_plan_with_shared_links_are_left_out(
    changes: list[dict[str, Any]], least: int
) -> None:
    assert same(*mixed(changes), iterations=30).repeated >= least


def test_a_hundred_thousand_iterations_take_as_many_events_as_a_few() -> None:
    graph, cluster = mixed([])
    engine = Engine(graph, cluster, 100_000, 1, math.inf)
    engine.run(Repeats(engine))
    assert len(engine.iteration_ends) == 100_000
    assert engine.repeated > 99_980
    assert engine.events < 20 * 2 * len(graph.tasks)
    period = engine.iteration_ends[50] - engine.iteration_ends[49]
    assert engine.iteration_ends[-1] - engine.iteration_ends[49] == pytest.approx(
        99_950 * period, rel=1e-9
    )


def test_a_lost_device_stalls_after_a_jump_as_it_does_without() -> None:
    lost = {"device": "v0.0", "steps": [["150 s", 0.0]]}
    found = same(*mixed([lost]), iterations=40)
    assert found.repeated > 10
    assert found.stalled is not None
    assert "v0.0 is lost" in found.stalled


def test_a_device_that_falls_behind_for_ever_is_played_to_the_end() -> None:
    """Nothing holds the first one back while the second is twice as slow, so no view comes back."""
    tasks = (
        Task(kind=SpanKind.FORWARD, device=0, seconds=1.0),
        Task(kind=SpanKind.FORWARD, device=1, seconds=2.0, after=(0,)),
    )
    graph = TaskGraph(devices=("n0.0", "n1.0"), tasks=tasks, carry=((0, 0), (1, 1)))
    found = same(graph, full_mesh(2), iterations=25)
    assert found.repeated == 0
    assert found.iteration_ends[-1] == 51.0
