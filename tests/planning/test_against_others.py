"""A part of the grid of ``python -m benchmarks compare``: nobody's plan is faster than ours in the
exact simulator."""

from __future__ import annotations

import pytest

from argosy.planner import find_plan
from benchmarks.compare import against_best, times_of
from benchmarks.compare_cases import GRID, Case

SORTS = {
    ("two-cards", "gpt2-medium", "calm"),
    ("a100-8", "gpt2-xl", "calm"),
    ("mixed-8", "gpt2-medium", "calm"),
    ("three-kinds-12", "gpt2-medium", "calm"),
    ("geo-8", "gpt2-medium", "as the file says"),
    ("one-per-node-16", "gpt2-medium", "straggler l3.0"),
}


@pytest.mark.parametrize(
    "case", [c for c in GRID if (c.cluster, c.model, c.scenario) in SORTS], ids=lambda c: c.name
)
def test_nobody_is_faster(case: Case) -> None:
    assert against_best(times_of(case)) >= 1 - 1e-9


def test_devices_alone_in_their_nodes_are_searched_one_by_one() -> None:
    """Two kinds of eight: in units of several the best plan takes 0.61 s."""
    case = next(
        c
        for c in GRID
        if (c.cluster, c.model, c.scenario) == ("one-per-node-16", "gpt2-medium", "calm")
    )
    plan = find_plan(case.chain(), case.load(), global_batch=case.batch)
    assert plan.certificate is not None and plan.certificate.granularity == 1
    assert plan.predicted is not None and plan.predicted.iteration_seconds < 0.58
