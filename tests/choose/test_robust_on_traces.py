"""Some of the cases of ``benchmarks/scenarios.py``: the plan for the trace beats the plan for its
average."""

from __future__ import annotations

from itertools import chain

import pytest

from argosy.choose.scenario import Robust
from benchmarks.scenarios import Case, bamboo_cases, generated_cases, oboe_cases

NAMES = ("on-off 2", "markov 3", "bamboo-g4dn.csv")


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {case.name: case for case in chain(generated_cases(), oboe_cases(), bamboo_cases())}


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES[1:])]
)
def test_the_plan_for_the_trace_beats_the_plan_for_its_average(
    name: str, cases: dict[str, Case]
) -> None:
    if name not in cases:
        pytest.skip(f"no measured traces: {name} is absent from the data folder")
    choice = cases[name].choose(Robust.P95, iterations=30)
    least = (
        1.0 if name.startswith("bamboo") else 0.97
    )  # by that trace the same plan is best for both
    assert choice.chosen.p95 <= least * choice.average.p95
    assert choice.chosen.mean <= 1.01 * choice.average.mean
