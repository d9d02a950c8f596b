"""What importing costs, in fresh processes."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.registry import Benchmark, Row


def import_seconds(module: str, *, repeats: int = 7) -> float:
    """Least wall time of a fresh interpreter that imports a module, less that of one that imports
    nothing."""
    return _process_seconds(f"import {module}", repeats) - _process_seconds("pass", repeats)


def _process_seconds(code: str, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        best = min(best, time.perf_counter() - begin)
    return best


def measure() -> list[Row]:
    numpy, argosy = import_seconds("numpy"), import_seconds("argosy")
    simulate = import_seconds(
        "argosy.sim.engine.exact, argosy.cluster.file, argosy.plan.file, argosy.workload.load"
    )
    return [
        Row(what="import numpy", value=numpy * 1e3, unit="ms"),
        Row(what="import argosy", value=argosy * 1e3, unit="ms", target="<= numpy again"),
        Row(
            what="all that simulating a plan needs, numpy included", value=simulate * 1e3, unit="ms"
        ),
        Row(what="import argosy over import numpy", value=argosy / numpy, unit="x", target="<= 2"),
    ]


BENCHMARK = Benchmark(name="imports", shows="start-up cost of the package", measure=measure)
