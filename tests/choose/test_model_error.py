"""``--robust model``: of plans that are about as fast, the one that more is known of."""

from __future__ import annotations

from support.planning_cases import cluster_of

from argosy.choose.model_error import find_plan_within_error
from argosy.cluster.topology import Cluster
from argosy.cost.uncertainty import interval
from argosy.dtype import Dtype
from argosy.planner import find_plan
from argosy.workload.chain import Chain, Layer

LAYER = Layer(
    name="layer",
    kind="layer",
    forward_flop=2e12,
    backward_flop=4e12,
    parameters=1_000_000,
    output_bytes=1e4,
    activation_bytes=1e5,
)
CHAIN = Chain(name="even", layers=(LAYER,) * 4, sequence_length=128, dtype=Dtype.FP16)


def two_kinds(speed: float) -> Cluster:
    """Four A100, and beside them a device of a kind without a generation, of which nothing was
    measured."""
    unknown = {
        "name": "unknown",
        "memory": "80 GB",
        "memory_bandwidth": "2 TB/s",
        "flops": {"fp16": f"{speed} TFLOP/s"},
    }
    link = {
        "intra": [{"medium": "nvlink", "bandwidth": "300 GB/s"}],
        "nic": {"bandwidth": "100 GB/s"},
    }
    nodes = [
        {"name": "a", "devices": {"kind": "A100-80GB", "count": 4}, **link},
        {"name": "u", "devices": {"kind": "unknown", "count": 1}, "nic": {"bandwidth": "100 GB/s"}},
    ]
    return cluster_of({"name": "two", "kinds": [unknown], "nodes": nodes})


def kinds(cluster: Cluster, devices: tuple[str, ...]) -> set[str]:
    return {cluster.device(name).kind.name for name in devices}


def test_a_small_gain_by_an_unknown_kind_is_not_worth_its_uncertainty() -> None:
    cluster = two_kinds(speed=250.0)
    fastest = find_plan(CHAIN, cluster, global_batch=64)
    robust = find_plan_within_error(CHAIN, cluster, global_batch=64)
    assert kinds(cluster, fastest.devices) == {"A100-80GB", "unknown"}
    assert kinds(cluster, robust.devices) == {"A100-80GB"}
    assert fastest.predicted and robust.predicted
    times = fastest.predicted.iteration_seconds, robust.predicted.iteration_seconds
    assert times[0] < times[1]
    assert interval(robust, cluster, times[1]).high < interval(fastest, cluster, times[0]).high
    assert len(robust.left_out) == 1
    assert robust.certificate is None
    assert any("within 50 %" in other.reason for other in robust.runner_ups)


def test_a_large_gain_is() -> None:
    cluster = two_kinds(speed=3000.0)
    fastest = find_plan(CHAIN, cluster, global_batch=64)
    robust = find_plan_within_error(CHAIN, cluster, global_batch=64)
    assert (robust.stages, robust.certificate) == (fastest.stages, fastest.certificate)
