"""Ours against every baseline on a grid of models, clusters and scenarios, in one exact
simulator."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache

from argosy.baselines import BASELINES
from argosy.cli.inputs import PlanningTask
from argosy.cli.planning.compare import compared
from argosy.cost.compute import ComputeModel
from argosy.planner import Settings
from argosy.report.contest import OURS
from benchmarks.compare_cases import GRID, Case
from benchmarks.registry import Benchmark, Row

Times = dict[str, float]
"""Seconds of an iteration by planner; infinite where it has no plan."""


@cache
def times_of(case: Case) -> Times:
    task = PlanningTask(
        chain=case.chain(),
        cluster=case.load(),
        global_batch=case.batch,
        settings=Settings(),
        model=ComputeModel(),
    )
    rows = compared(task, names=tuple(BASELINES), quiet=True)
    return {row.name: row.entry.seconds if row.entry is not None else math.inf for row in rows}


def against_best(times: Times) -> float:
    """The fastest other plan's time over ours."""
    return min(seconds for name, seconds in times.items() if name != OURS) / times[OURS]


def measure(cases: Sequence[Case] = GRID) -> list[Row]:
    found = {case: times_of(case) for case in cases}
    rows = [
        Row(
            what=case.name,
            value=against_best(times),
            unit="x the best of the others",
            target=">= 1",
        )
        for case, times in found.items()
    ]
    worst = min(row.value for row in rows)
    rows.append(Row(what=f"least of {len(rows)} cases", value=worst, unit="x", target=">= 1"))
    for name in BASELINES:
        ratios = [
            times[name] / times[OURS] for times in found.values() if math.isfinite(times[name])
        ]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
        rows.append(
            Row(
                what=f"over {name}, geometric mean of {len(ratios)} with a plan",
                value=mean,
                unit="x",
            )
        )
    return rows


def as_markdown(cases: Iterable[Case]) -> str:
    """A table per sort of cluster: how many times as long as ours the plan of each takes; ``-``: it
    has none."""
    by_sort: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_sort[case.sort].append(case)
    lines = []
    for sort, members in by_sort.items():
        lines += ["", f"## {sort.capitalize()}", "", f"| case | ours | {' | '.join(BASELINES)} |"]
        lines.append("| --- " * (len(BASELINES) + 2) + "|")
        for case in members:
            times = times_of(case)
            cells = [
                f"{times[name] / times[OURS]:.2f}" if math.isfinite(times[name]) else "-"
                for name in BASELINES
            ]
            lines.append(f"| {case.name} | {times[OURS]:.4g} s | {' | '.join(cells)} |")
    return "\n".join(lines)


BENCHMARK = Benchmark(
    name="compare",
    shows="ours against the plans of other planners, the same exact simulator for all, level 1",
    measure=measure,
)

if __name__ == "__main__":
    print(as_markdown(GRID))
    sys.exit()
