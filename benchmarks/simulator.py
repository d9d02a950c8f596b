"""Simulated iterations per second: the batch engine against an event heap, SimPy and the exact engine."""

from __future__ import annotations

import numpy as np

from argosy.sim.batch import simulate_batch
from argosy.sim.exact import simulate_exact
from benchmarks.pipeline_case import make_case
from benchmarks.plain_engines import heap_seconds, link_knots, order_of, simpy_seconds
from benchmarks.registry import Benchmark, Row, cpu_seconds


def measure() -> list[Row]:
    case = make_case()
    graph, amounts, knots, order = case.graph(0), case.amounts(), link_knots(case), order_of(case)
    clusters = [case.cluster]
    predicted = simulate_batch(graph, clusters, amounts)[0]
    for candidate in (0, 1, 2):
        others = (
            heap_seconds(case, candidate, knots, order),
            simpy_seconds(case, candidate, knots, order),
            simulate_exact(case.graph(candidate), case.cluster).iteration_ends[0],
        )
        np.testing.assert_allclose(others, predicted[candidate], rtol=1e-9)
    heap = cpu_seconds(lambda: heap_seconds(case, 0, knots, order), repeats=20)
    simpy = cpu_seconds(lambda: simpy_seconds(case, 0, knots, order), repeats=10)
    exact = cpu_seconds(lambda: simulate_exact(graph, case.cluster, iterations=4, record=0), repeats=5) / 4
    batch = cpu_seconds(lambda: simulate_batch(graph, clusters, amounts), repeats=8) / case.forward.shape[1]
    return [
        Row(what="SimPy", value=simpy * 1e6, unit="us per iteration"),
        Row(what="event heap in Python", value=heap * 1e6, unit="us per iteration"),
        Row(what="exact engine", value=exact * 1e6, unit="us per iteration"),
        Row(what="batch engine, 4,096 candidates", value=batch * 1e6, unit="us per iteration"),
        Row(what="batch engine over event heap", value=heap / batch, unit="x", target=">= 60"),
        Row(what="batch engine over SimPy", value=simpy / batch, unit="x", target=">= 300"),
    ]


BENCHMARK = Benchmark(
    name="simulator",
    shows="8 stages x 64 micro-batches, 1F1B, 64-step bandwidth traces on every link; all engines agree to 1e-9",
    measure=measure,
)
