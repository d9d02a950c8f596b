"""``python -m benchmarks [NAME ...]``: run all or some benchmarks and print their rows."""

from __future__ import annotations

import platform
import sys

from benchmarks import (
    compare,
    dapple,
    fit_compute,
    gravity,
    imports,
    kept,
    planning,
    reality,
    replanning,
    runtime_overhead,
    scenarios,
    simulator,
    spmd,
)

MODULES = (
    simulator,
    planning,
    compare,
    dapple,
    fit_compute,
    imports,
    spmd,
    gravity,
    reality,
    kept,
    scenarios,
    replanning,
    runtime_overhead,
)
BENCHMARKS = {module.BENCHMARK.name: module.BENCHMARK for module in MODULES}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"error: found {unknown[0]!r}, expected one of {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    print(f"Python {platform.python_version()} on {platform.machine()}")
    for name in names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        print(f"\n{name}: {benchmark.shows}")
        for row in benchmark.measure():
            target = f"  (target {row.target})" if row.target else ""
            print(f"  {row.what:<52} {row.value:>10.4g} {row.unit}{target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
