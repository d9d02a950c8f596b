"""Simulated iterations per second: the exact engine and the search's recurrence against an event
heap and SimPy."""

from __future__ import annotations

import numpy as np

from argosy.sim.engine.exact import simulate_exact
from benchmarks.pipeline_case import make_case
from benchmarks.plain_engines import heap_seconds, link_knots, order_of, simpy_seconds
from benchmarks.registry import Benchmark, Row, cpu_seconds


def measure() -> list[Row]:
    case, calm = make_case(num_candidates=3), make_case(num_steps=1)
    graph, knots, order = case.graph(0), link_knots(case), order_of(case)
    calm_knots, predicted = link_knots(calm), calm.recurrence_seconds()
    for candidate in (0, 1, 2):
        ends = simulate_exact(case.graph(candidate), case.cluster).iteration_ends
        others = (
            heap_seconds(case, candidate, knots, order),
            simpy_seconds(case, candidate, knots, order),
        )
        np.testing.assert_allclose(others, ends[0], rtol=1e-9)
        np.testing.assert_allclose(
            heap_seconds(calm, candidate, calm_knots, order), predicted[candidate], rtol=1e-9
        )
    heap = cpu_seconds(lambda: heap_seconds(case, 0, knots, order), repeats=20)
    simpy = cpu_seconds(lambda: simpy_seconds(case, 0, knots, order), repeats=10)
    exact = (
        cpu_seconds(lambda: simulate_exact(graph, case.cluster, iterations=4, record=0), repeats=5)
        / 4
    )
    calm_heap = cpu_seconds(lambda: heap_seconds(calm, 0, calm_knots, order), repeats=20)
    calm_simpy = cpu_seconds(lambda: simpy_seconds(calm, 0, calm_knots, order), repeats=10)
    recurrence = cpu_seconds(calm.recurrence_seconds, repeats=8) / calm.forward.shape[1]
    return [
        Row(what="SimPy", value=simpy * 1e6, unit="us per iteration"),
        Row(what="event heap in Python", value=heap * 1e6, unit="us per iteration"),
        Row(what="exact engine", value=exact * 1e6, unit="us per iteration"),
        Row(
            what="the search's recurrence, 4,096 candidates, calm",
            value=recurrence * 1e6,
            unit="us per iteration",
        ),
        Row(
            what="recurrence over event heap, calm",
            value=calm_heap / recurrence,
            unit="x",
            target=">= 60",
        ),
        Row(
            what="recurrence over SimPy, calm",
            value=calm_simpy / recurrence,
            unit="x",
            target=">= 300",
        ),
    ]


BENCHMARK = Benchmark(
    name="simulator",
    shows="8 stages x 64 micro-batches, 1F1B; 64-step bandwidth traces on every link, or calm; all agree to 1e-9",
    measure=measure,
)
