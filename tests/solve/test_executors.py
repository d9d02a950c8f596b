"""Processes, threads and Ray find the same plan as one process alone."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest

from argosy.cluster.file import load_cluster
from argosy.errors import InputError
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


@pytest.fixture
def quiet_ray() -> Iterator[None]:
    """Ray warns of its own future settings, and leaves sockets to the garbage collector."""
    pytest.importorskip("ray", reason="ray is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.filterwarnings("ignore")
def test_ray_finds_the_same_bytes(alone: str, quiet_ray: None) -> None:
    try:
        found = planned(ExecutorKind.RAY, 2)
    except Exception as error:
        if "timed out during startup" in str(error):
            pytest.skip("Ray gave up starting after its 30 s")
        raise
    assert found == alone


def test_without_ray_the_message_has_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError) as error, workers(ExecutorKind.RAY, 2):
        pass
    assert (
        str(error.value)
        == 'Cannot use --executor ray because ray is not installed. Try pip install "argosy[ray]".'
    )


def test_one_worker_is_this_process() -> None:
    with workers(ExecutorKind.PROCESS, 1) as executor:
        assert executor is None
