"""Processes and threads find the same plan as one process alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.cluster.file import load_cluster
from argosy.plan.file import dumps_plan
from argosy.planner import Settings, find_plan
from argosy.solve.executors import ExecutorKind, workers
from argosy.workload.load import load_model


def planned(kind: ExecutorKind, count: int) -> str:
    """The bytes of a plan, apart from what the search took."""
    chain = load_model("gpt2-medium", sequence_length=512, dtype="fp16")
    with workers(kind, count) as executor:
        settings = Settings(units=(2, 2), executor=executor)
        plan = find_plan(chain, load_cluster("mixed-16"), global_batch=32, settings=settings)
    return dumps_plan(replace(plan, search=None))


@pytest.fixture(scope="module")
def alone() -> str:
    return planned(ExecutorKind.PROCESS, 1)


@pytest.mark.parametrize(("kind", "count"), [(ExecutorKind.PROCESS, 3), (ExecutorKind.THREAD, 2)])
def test_the_same_bytes_for_any_executor(alone: str, kind: ExecutorKind, count: int) -> None:
    assert planned(kind, count) == alone


def test_one_worker_is_this_process() -> None:
    with workers(ExecutorKind.PROCESS, 1) as executor:
        assert executor is None
