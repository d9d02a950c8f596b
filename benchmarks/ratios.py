"""Ratios of CPU times that a change should not lose: cheap enough for every test run, bounds beyond
the reach of noise.

Each is against a baseline of the same run. What is measured of the product is the least of several
runs, and so is its baseline; the bound leaves a factor of three to ten to what was measured when it
was set (the note). A change that fails one of them has made something several times slower.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from argosy.cluster.file import load_cluster
from argosy.planner import find_plan
from argosy.sim.engine.exact import simulate_exact
from argosy.workload.load import load_model
from benchmarks.growth import SWEEP
from benchmarks.pipeline_case import Case, make_case
from benchmarks.plain_engines import heap_seconds, link_knots, order_of
from benchmarks.registry import Benchmark, Row, cpu_seconds, growth


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Something over its baseline."""

    name: str
    measure: Callable[[], float]
    bound: float
    at_least: bool = False
    """Whether more is better."""

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def _heap(case: Case) -> float:
    """Seconds of one iteration in a plain event heap."""
    knots, order = link_knots(case), order_of(case)
    return cpu_seconds(lambda: heap_seconds(case, 0, knots, order), repeats=10)


def recurrence_over_heap() -> float:
    case = make_case(num_steps=1, num_candidates=1024)
    return _heap(case) * 1024 / cpu_seconds(case.recurrence_seconds, repeats=4)


def exact_over_heap() -> float:
    case = make_case(num_candidates=1)
    graph = case.graph(0)
    return cpu_seconds(lambda: simulate_exact(graph, case.cluster, record=0), repeats=5) / _heap(
        case
    )


def planning_over_heap() -> float:
    chain, cluster = (
        load_model("gpt2-xl", sequence_length=1024, dtype="fp16"),
        load_cluster("three-kinds-64"),
    )
    find_plan(chain, cluster, global_batch=512)
    planning = cpu_seconds(lambda: find_plan(chain, cluster, global_batch=512), repeats=2)
    return planning / _heap(make_case(num_candidates=1))


def import_over_numpy() -> float:
    """CPU time of fresh processes, less that of one that imports nothing."""
    nothing = _process("pass")
    return (_process("import argosy") - nothing) / (_process("import numpy") - nothing)


def _process(code: str) -> float:
    best = float("inf")
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def growth_in_micro_batches() -> float:
    """Of the exact engine; 1 is linear."""
    work = SWEEP.phases["tasks and exact engine"]
    sizes = SWEEP.sizes[:2]
    built = [SWEEP.build(size) for size in sizes]
    return growth(sizes, [cpu_seconds(lambda b=one: work(b), repeats=3) for one in built])


RATIOS = (
    Ratio(
        name="recurrence of the search, times a plain event heap",
        measure=recurrence_over_heap,
        bound=20.0,
        at_least=True,
    ),
    Ratio(name="exact engine, in iterations of the heap", measure=exact_over_heap, bound=40.0),
    Ratio(
        name="level 1 for 64 devices, in iterations of the heap",
        measure=planning_over_heap,
        bound=1000.0,
    ),
    Ratio(name="import argosy, in imports of numpy", measure=import_over_numpy, bound=4.0),
    Ratio(name="exact engine: growth in micro-batches", measure=growth_in_micro_batches, bound=1.6),
)


def measure() -> list[Row]:
    return [
        Row(
            what=ratio.name,
            value=ratio.measure(),
            unit="",
            target=f"{'>=' if ratio.at_least else '<='} {ratio.bound:g}",
        )
        for ratio in RATIOS
    ]


BENCHMARK = Benchmark(
    name="ratios", shows="what every test run holds: CPU times over a baseline", measure=measure
)
