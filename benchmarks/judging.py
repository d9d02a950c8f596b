"""How near the judge of the search is to the exact engine, on the plans that level 1 ranks.

(1)  of every problem: the best plans that were judged, and some of the next ones up to 1.5 times
     the best
(2)  error = |judged / exact - 1|, the exact time being that of the folded plan in the exact engine
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

from argosy.cluster.lasting import at_time_zero
from argosy.errors import ArgosyError
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleSpec
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.fold import fold_plan
from argosy.solve.finalists.candidate import plan_key
from argosy.solve.finalists.devices import on_devices
from argosy.solve.finalists.judge import Complete, Judge
from argosy.solve.search.shape import Shape
from benchmarks.judging_cases import Problem, bundled, drawn
from benchmarks.registry import Benchmark, Row

_MOST = 10
_WITHIN = 1.5
_SEEDS = 100
"""Even ones were used for tuning, odd ones were kept apart."""

_Judged = tuple[float, Shape, Complete, ScheduleSpec]


def errors(problem: Problem) -> list[float]:
    """(2) of the plans of (1); none if nothing fits."""
    try:
        judge, ranked = _ranked(problem)
    except ArgosyError:
        return []
    cluster = at_time_zero(problem.cluster)
    found = []
    for seconds, shape, complete, schedule in _some(ranked):
        plan = on_devices(shape, schedule, complete, judge.prices, problem.cluster)
        graph, folded = fold_plan(plan, problem.chain, cluster, judge.prices.model)
        (exact,) = simulate_exact(graph, folded, record=0).iteration_ends
        found.append(abs(seconds / exact - 1))
    return found


def _ranked(problem: Problem) -> tuple[Judge, list[_Judged]]:
    """Everything that level 1 judges, best first."""
    seen: dict[object, _Judged] = {}
    judges: list[Judge] = []
    judge_seconds = Judge.seconds

    def recorded(
        self: Judge, shape: Shape, plans: Sequence[Complete], **limits: Any
    ) -> tuple[list[float], list[ScheduleSpec]]:
        times, schedules = judge_seconds(self, shape, plans, **limits)
        judges.append(self)
        for seconds, schedule, plan in zip(times, schedules, plans, strict=True):
            if seconds < math.inf:
                seen.setdefault(plan_key(shape, plan), (seconds, shape, plan, schedule))
        return times, schedules

    with patch.object(Judge, "seconds", recorded):
        find_plan(
            problem.chain,
            problem.cluster,
            global_batch=problem.global_batch,
            settings=Settings(level=1),
        )
    return judges[0], sorted(seen.values(), key=lambda item: item[0])


def _some(ranked: Sequence[_Judged]) -> list[_Judged]:
    """(1)"""
    half = _MOST // 2
    others = [item for item in ranked[half:] if item[0] < _WITHIN * ranked[0][0]]
    return [*ranked[:half], *others[:: max(1, len(others) // half)][:half]]


def _rows(name: str, problems: Iterable[Problem]) -> list[Row]:
    found = sorted(error for problem in problems for error in errors(problem))
    count = len(found)
    return [
        Row(what=f"{name}: plans", value=count, unit=""),
        Row(what=f"{name}: median error", value=100 * found[count // 2], unit="%"),
        Row(
            what=f"{name}: 95th percentile",
            value=100 * found[int(0.95 * count)],
            unit="%",
            target="<= 5",
        ),
        Row(what=f"{name}: worst", value=100 * found[-1], unit="%"),
        Row(
            what=f"{name}: within 5 %",
            value=100 * sum(error <= 0.05 for error in found) / count,
            unit="%",
        ),
    ]


def measure() -> list[Row]:
    return [
        *_rows("bundled clusters", bundled()),
        *_rows("random clusters, tuned on", (drawn(seed) for seed in range(0, _SEEDS, 2))),
        *_rows("random clusters, kept apart", (drawn(seed) for seed in range(1, _SEEDS, 2))),
    ]


BENCHMARK = Benchmark(
    name="judging",
    shows="the judge of the search against the exact engine, on plans that it ranks",
    measure=measure,
)
