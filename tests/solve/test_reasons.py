"""Why plans lose and devices are left out: constructed so that one reason is the right one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.planning_cases import cluster_of, kind_fields, node_fields

from argosy.cluster.topology import Cluster
from argosy.dtype import Dtype
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan
from argosy.solve.finalists.reasons import why_slower
from argosy.workload.chain import Chain, Layer


def chain_of(layers: int = 4, *, kept: float = 1e8, output: float = 1e6) -> Chain:
    layer = Layer(
        name="block",
        kind="block",
        forward_flop=1e11,
        backward_flop=2e11,
        parameters=10**7,
        activation_bytes=kept,
        output_bytes=output,
    )
    return Chain(name="drawn", layers=(layer,) * layers, sequence_length=1, dtype=Dtype.BF16)


def cluster_with(*, flops: float = 1.0, memory: float = 64e9, nic: float = 10.0) -> Cluster:
    """Two good devices, and one that is in some way worse."""
    kinds: list[dict[str, Any]] = [
        kind_fields("a", flops=1.0, memory=64e9),
        kind_fields("b", flops=flops, memory=memory),
    ]
    nodes = [node_fields("a", count=2, nic=10.0), node_fields("b", nic=nic)]
    return cluster_of({"name": "drawn", "kinds": kinds, "nodes": nodes})


def planned(cluster: Cluster, **changes: Any) -> Plan:
    settings = Settings(level=2, gap=0.0, units=(1, 1))
    return find_plan(chain_of(**changes), cluster, global_batch=4, settings=settings)


def test_a_slow_device_is_left_out_for_its_pace() -> None:
    plan = planned(cluster_with(flops=0.01))
    (left,) = plan.left_out
    assert left.device == "b0.0"
    assert "slower; it takes" in left.reason or "among the" in left.reason
    assert "times as long as on kind-a" in left.reason


def test_a_small_device_is_left_out_for_its_memory() -> None:
    (left,) = planned(cluster_with(memory=1e8)).left_out
    assert left.reason.startswith("no layer fits into the")


def test_a_device_behind_a_slow_link_is_not_called_slow() -> None:
    (left,) = planned(cluster_with(nic=0.0001)).left_out
    assert "times as long" not in left.reason
    assert "slower" in left.reason or "among the" in left.reason


def test_runner_ups_differ_and_say_in_what_they_are_worse() -> None:
    plan = planned(cluster_with(flops=0.5), layers=7)
    descriptions = [other.description for other in plan.runner_ups]
    assert len(set(descriptions)) == len(descriptions) > 0
    for other in plan.runner_ups:
        assert plan.predicted is not None
        if other.iteration_seconds > plan.predicted.iteration_seconds * 1.001:
            assert " % slower: " in other.reason
            assert " against " in other.reason


def played(*, stage: float, tail: float, micro_batches: int = 4) -> Any:
    """A candidate of one stage."""
    option = SimpleNamespace(
        seconds=lambda first, end: (stage / 3, stage * 2 / 3), tail=lambda first, end: tail
    )
    shape = SimpleNamespace(num_micro_batches=micro_batches, micro_batch_size=1)
    return SimpleNamespace(
        plan=[SimpleNamespace(first=0, end=1, option=option)], shape=shape, effort=0
    )


def test_what_takes_longer_is_told_in_digits_that_show_it() -> None:
    winner, loser = played(stage=1.0, tail=0.12), played(stage=1.0, tail=0.12004)
    told = why_slower(loser, 4.12004, winner, 4.12)
    assert told == "0.000971 % slower: gradient exchange and update take 120.04 ms against 120 ms"
    longer = played(stage=1.0, tail=0.25)
    assert why_slower(longer, 4.25, winner, 4.12).endswith("update take 250 ms against 120 ms")


def test_no_part_is_blamed_that_is_not_longer() -> None:
    hidden = played(stage=1.0, tail=0.5)  # of which most is while something else goes on
    assert why_slower(played(stage=1.0, tail=0.4), 4.4, hidden, 4.0) == "10 % slower"
