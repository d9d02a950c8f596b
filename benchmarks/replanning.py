"""When re-planning pays for its migration: one plan throughout, re-planned at changes, and
hindsight, on the traces of ``scenarios``.

    python -m benchmarks replanning       the figures
    python -m benchmarks.replanning       the table of the result note

Every trace is also played slower, its states lasting 10 and 100 times as long, everything else the
same: what a move costs does not change, what it gains grows. The plans are searched once, for a
trace's averages and quantiles, which do not change with its pace.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

from argosy.choose.replan import Courses, Switch, TraceRun, courses_with, plans_for_trace
from argosy.choose.scenario import moments
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.cost.compute import ComputeModel
from argosy.planner import Settings
from argosy.workload.load import load_model
from benchmarks.registry import Benchmark, Row
from benchmarks.scenarios import SECONDS, Case, cases

PACES = (1, 10, 100)
_NOTHING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Found:
    """A trace, how long a state of it lasts on average, and the courses through it at each pace."""

    name: str
    state_seconds: float
    courses: tuple[Courses, ...]

    @property
    def moves(self) -> list[Switch]:
        """Every move that re-planning made, at any pace."""
        return [switch for one in self.courses for switch in _replanned(one).switches]


def slowed(cluster: Cluster, times: float) -> Cluster:
    """The same changes, each so many times later."""

    def later(trace: Trace) -> Trace:
        return Trace(tuple(time * times for time in trace.times), trace.values)

    links = [
        replace(link, bandwidth=later(link.bandwidth), latency=later(link.latency))
        for link in cluster.links
    ]
    devices = [replace(device, speed=later(device.speed)) for device in cluster.devices]
    return replace(cluster, links=tuple(links), devices=tuple(devices))


def found_for(case: Case, paces: Sequence[int] = PACES) -> Found:
    chain, model = (
        load_model(case.model, sequence_length=case.sequence_length, dtype="fp16"),
        ComputeModel(),
    )
    choices = plans_for_trace(chain, case.scenario, case.global_batch, SECONDS, Settings(), model)
    courses = [
        courses_with(choices, chain, slowed(case.scenario, pace), pace * SECONDS, model)
        for pace in paces
    ]
    return Found(
        name=case.name,
        state_seconds=SECONDS / len(moments(case.scenario, SECONDS)),
        courses=tuple(courses),
    )


@cache
def all_found() -> tuple[Found, ...]:
    return tuple(map(found_for, cases()))


def _replanned(courses: Courses) -> TraceRun:
    return courses.courses[2]


def over_static(courses: Courses) -> tuple[float, float]:
    """Iterations of re-planning and of hindsight over those of the better static plan, minus 1."""
    static = max(course.iterations for course in courses.courses[:2])
    return _replanned(courses).iterations / static - 1, courses.courses[3].iterations / static - 1


def measure() -> list[Row]:
    rows = []
    for found in all_found():
        for pace, courses in zip(PACES, found.courses, strict=True):
            replanned, hindsight = over_static(courses)
            what = f"{found.name}, states of {pace * found.state_seconds:.3g} s"
            rows += [
                Row(what=f"{what}: re-planned over static", value=100 * replanned, unit="%"),
                Row(what=f"{what}: hindsight over static", value=100 * hindsight, unit="%"),
            ]
        if found.moves:
            steps = median(switch.pays_after_steps for switch in found.moves)
            rows.append(
                Row(what=f"{found.name}: a move pays after (median)", value=steps, unit="steps")
            )
    return rows


def as_markdown() -> str:
    gains = [f"x{pace}: re-planned, hindsight" for pace in PACES]
    titles = ["trace", "a state lasts", "static", "re-planned (moves)", "hindsight", *gains]
    titles += ["a move takes", "pays after", "pays from"]
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|", *map(_line, all_found())]
    return "\n".join(lines)


def _line(found: Found) -> str:
    as_is = found.courses[0]
    at_first, average, replanned, oracle = (
        course.mean_seconds(as_is.horizon) for course in as_is.courses
    )
    moves = len(_replanned(as_is).switches)
    cells = [found.name, f"{found.state_seconds:.3g} s"]
    cells += [f"{min(at_first, average):.3f} s", f"{replanned:.3f} s ({moves})", f"{oracle:.3f} s"]
    gains = [over_static(courses) for courses in found.courses]
    cells += [f"{100 * gain:+.1f} %, {100 * most:+.1f} %" for gain, most in gains]
    if not found.moves:
        return f"| {' | '.join([*cells, '-', '-', '-'])} |"
    pays = [pace for pace, (gain, _) in zip(PACES, gains, strict=True) if gain > _NOTHING]
    cells += [
        _range(
            [
                f"{switch.migration:.2g}"
                for switch in sorted(found.moves, key=lambda one: one.migration)
            ],
            "s",
        ),
        _range(
            [
                f"{math.ceil(steps)}"
                for steps in sorted(one.pays_after_steps for one in found.moves)
            ],
            "steps",
        ),
        f"x{pays[0]}" if pays else "never",
    ]
    return f"| {' | '.join(cells)} |"


def _range(ordered: Sequence[str], unit: str) -> str:
    return (
        f"{ordered[0]} {unit}"
        if ordered[0] == ordered[-1]
        else f"{ordered[0]} to {ordered[-1]} {unit}"
    )


BENCHMARK = Benchmark(
    name="replanning",
    shows="one plan throughout against re-planning, migrations counted",
    measure=measure,
)

if __name__ == "__main__":
    print(as_markdown())
    sys.exit()
