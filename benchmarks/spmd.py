"""Programs that share one training step between unequal devices; torch is imported only when this
one is measured."""

from __future__ import annotations

from benchmarks.registry import Benchmark, Row


def measure() -> list[Row]:
    from benchmarks.spmd_rows import all_rows

    return all_rows()


BENCHMARK = Benchmark(
    name="spmd", shows="programs that share one training step between devices", measure=measure
)
