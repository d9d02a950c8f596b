"""A table of scenarios and candidates is the same whoever plays its pieces."""

from __future__ import annotations

from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest

from argosy.sim import sweep as sweeping
from argosy.sim.batch import simulate_batch
from argosy.sim.sweep import sweep
from benchmarks.pipeline_case import line_cluster, make_case

CASE = make_case(num_stages=3, num_micro_batches=4, num_steps=8, num_candidates=5)
CLUSTERS = [line_cluster(3, 8, np.random.default_rng(seed)) for seed in range(7)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "LEAST", 10)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("pool", [None, ThreadPoolExecutor, ProcessPoolExecutor])
def test_the_same_bytes_for_any_executor(pool: type[ThreadPoolExecutor] | type[ProcessPoolExecutor] | None) -> None:
    graph, amounts = CASE.graph(0), CASE.amounts()
    executor: Executor | None = pool(2) if pool is not None else None
    found = sweep(graph, CLUSTERS, amounts, executor=executor)
    if executor is not None:
        executor.shutdown()
    assert found.tobytes() == simulate_batch(graph, CLUSTERS, amounts).tobytes()


def test_no_scenario_is_an_empty_table() -> None:
    assert sweep(CASE.graph(0), [], CASE.amounts()).shape == (0, 5)
