"""What nothing prices yet is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.cluster.file import cluster_from_content
from argosy.errors import InputError
from argosy.plan.check import check_plan
from argosy.plan.file import load_plan
from argosy.workload.load import load_model


@pytest.mark.parametrize("name", ["context", "expert"])
def test_a_degree_that_nothing_prices_is_refused(name: str) -> None:
    plan = load_plan("gpt2-xl-on-two-cards")
    chain = load_model("gpt2-xl", sequence_length=plan.model.sequence_length, dtype=plan.model.dtype)
    stages = (replace(plan.stages[0], **{name: 2}), *plan.stages[1:])
    with pytest.raises(InputError) as raised:
        check_plan(replace(plan, stages=stages), chain, cluster_from_content(plan.cluster.content))
    assert str(raised.value) == f"stages[0].{name}: found 2, expected 1: {name} parallelism is not priced yet"
