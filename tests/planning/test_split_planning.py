"""Where sequences in parts and experts over holders pay, on bundled clusters and models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.cluster.file import load_cluster
from argosy.errors import InfeasibleError
from argosy.explain import with_prediction
from argosy.plan.check import check_plan
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan
from argosy.space import enumerate as space
from argosy.space.price import Prices
from argosy.workload.load import load_model


def planned(model: str, length: int, cluster: str, batch: int, **settings: bool) -> Plan:
    chain, where = load_model(model, sequence_length=length), load_cluster(cluster)
    plan = find_plan(chain, where, global_batch=batch, settings=Settings(**settings))
    check_plan(plan, chain, where)
    return plan


def planned_whole(model: str, length: int, cluster: str, batch: int, **settings: bool) -> Plan:
    """By a search that splits neither sequences nor experts."""
    with_splits = space.with_splits

    def unsplit(scope: space.Scope, prices: Prices) -> space.Scope:
        return with_splits(replace(scope, context=(1,), expert=(1,)), prices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space, "with_splits", unsplit)
        plan = planned(model, length, cluster, batch, **settings)
    assert all(stage.context == stage.expert == 1 for stage in plan.stages)
    return plan


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.iteration_seconds


@pytest.mark.parametrize(("cluster", "gain"), [("three-kinds-64", 1.02)])
def test_a_long_sequence_is_faster_in_parts(cluster: str, gain: float) -> None:
    """128 Ki tokens: keys and values are an eighth of what tensor parallelism reduces, and
    attention hides them."""
    whole = planned_whole("llama-3-8b", 131_072, cluster, 16)
    parts = planned("llama-3-8b", 131_072, cluster, 16)
    assert any(stage.context > 1 for stage in parts.stages)
    assert gain * seconds(parts) < seconds(whole)


def test_single_cards_hold_a_long_sequence_only_in_parts() -> None:
    """Nodes of one card have no tensor parallelism inside them, and activations do not fit; groups
    across nodes hold them, and are slower."""
    with pytest.raises(InfeasibleError):
        planned_whole("mistral-7b", 32_768, "one-per-node-16", 8, spanning=False)
    plan = planned("mistral-7b", 32_768, "one-per-node-16", 8)
    assert seconds(plan) < seconds(planned_whole("mistral-7b", 32_768, "one-per-node-16", 8))
    assert all(stage.context > 1 for stage in plan.stages)
    chain, where = load_model("mistral-7b", sequence_length=32_768), load_cluster("one-per-node-16")
    predicted = with_prediction(plan, chain, where).predicted
    assert predicted is not None
    assert all(held < where.device(name).kind.memory for name, held in predicted.peak_memory_bytes)


@pytest.mark.parametrize(
    ("cluster", "batch", "gain"), [("three-kinds-64", 256, 1.02), ("racks-128", 512, 1.04)]
)
def test_a_mixture_is_faster_with_its_experts_over_holders(
    cluster: str, batch: int, gain: float
) -> None:
    """Routed tokens stay inside a node and are fewer bytes than what wider tensor parallelism
    reduces."""
    whole = planned_whole("mixtral-8x7b", 4096, cluster, batch)
    split = planned("mixtral-8x7b", 4096, cluster, batch)
    assert any(stage.expert > 1 for stage in split.stages)
    assert gain * seconds(split) < seconds(whole)
