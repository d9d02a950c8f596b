"""The chosen of many plans is slower than predicted: the closed form against draws, and where it is
shown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from argosy.calibrate.run import Degrees, even_plan
from argosy.cluster.file import load_cluster
from argosy.cost.compute import waiting
from argosy.cost.uncertainty import interval, optimism
from argosy.plan.plan import Search
from argosy.report.plan import interval_in_words
from argosy.workload.load import load_model


@pytest.mark.parametrize(
    ("count", "residual", "apart"), [(2, 0.08, 0.4), (10, 0.08, 0.4), (26, 0.2, 0.1)]
)
def test_the_chosen_plan_is_as_optimistic_as_simulated(
    count: int, residual: float, apart: float
) -> None:
    random = np.random.default_rng(1)
    true = apart * random.standard_normal((20_000, count))
    predicted = true + residual * random.standard_normal(true.shape)
    chosen = predicted.argmin(axis=1)
    slower = (true - predicted)[np.arange(len(true)), chosen]
    assert optimism(count, residual, apart) == pytest.approx(slower.mean(), rel=0.04, abs=1e-3)


def test_a_stage_waits_for_the_slowest_of_its_devices() -> None:
    """Against the largest of drawn speeds, beyond that of eight devices."""
    drawn = np.random.default_rng(2).standard_normal((20_000, 64))
    beyond = drawn.max(axis=1).mean() - drawn[:, :8].max(axis=1).mean()
    assert waiting(0.1, 64) == pytest.approx(1 + 0.1 * beyond, rel=2e-3)
    assert waiting(0.1, 8) == waiting(0.1, 1) == 1


def test_only_a_plan_that_was_chosen_is_expected_to_be_slower() -> None:
    cluster = load_cluster("mixed-16")
    degrees = Degrees(data=16, micro_batch=1, global_batch=16)
    plan = even_plan(degrees, load_model("gpt2", dtype="fp16"), cluster)
    assert "slower" not in interval_in_words(plan, cluster, 2.0)
    chosen = replace(plan, search=Search(cpu_seconds=1.0, candidates=900, pruned=()))
    found = interval(chosen, cluster, 2.0)
    assert found.optimism == optimism(26, 0.08)
    assert (found.low * found.high) ** 0.5 == pytest.approx(2.0 * (1 + found.optimism))
    assert f"{100 * found.optimism:.1f} % slower than predicted" in interval_in_words(
        chosen, cluster, 2.0
    )
