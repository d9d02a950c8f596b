"""What exchanges under ZeRO 2 and 3 take from layers that compute: figures by hand, the same in the
exact engine and in the prices that the search ranks by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.planning_cases import cluster_of

from argosy.cluster.catalogue import catalogue, device_kind
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel, Portion, stage_seconds
from argosy.cost.taken import taken_seconds
from argosy.dtype import Dtype
from argosy.plan.plan import Plan, Recompute, Replica, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import iteration_seconds
from argosy.space.option import Option
from argosy.space.part import PoolPart
from argosy.space.pool import find_pools
from argosy.space.price import Prices
from argosy.workload.chain import Chain, Layer

LAYER = Layer(
    name="layer",
    kind="block",
    forward_flop=1e12,
    backward_flop=2e12,
    parameters=10**9,
    output_bytes=1e6,
    activation_bytes=1e6,
    max_tensor_width=2,
)
CHAIN = Chain(name="two", layers=(LAYER, LAYER), sequence_length=1, dtype=Dtype.BF16)
MODEL = ComputeModel(spread=0.0)
RATE = 1e12
"""Bytes/s that a device of the tests would send."""
TAKEN = 3 / 4 * 2 * 2e9 / RATE
"""Seconds that one exchange of all weights among four devices takes: 3 of 4 GB."""


def cluster(rate: float | None = RATE, efficiency: float = 1.0) -> Cluster:
    """Four devices in one node, with links that take hardly any time."""
    kind: dict[str, Any] = {
        "name": "card",
        "memory": "80 GB",
        "memory_bandwidth": "1 TB/s",
        "flops": {"bf16": "100 TFLOP/s"},
    }
    if rate is not None:
        kind["exchange_rate"] = f"{rate} B/s"
    node = {
        "name": "a",
        "devices": {"kind": "card", "count": 4, "efficiency": efficiency},
        "intra": [{"medium": "nvlink", "bandwidth": "1e9 GB/s"}],
    }
    return cluster_of({"name": "four", "kinds": [kind], "nodes": [node]})


def stage(zero: int, width: int = 1) -> Stage:
    names = [device.name for device in cluster().devices]
    groups = [tuple(names[at : at + width]) for at in range(0, 4, width)]
    replicas = tuple(Replica(devices=group, samples=1) for group in groups)
    return Stage(first=0, end=2, replicas=replicas, zero=zero)


def step(zero: int, where: Cluster, *, whole: bool, micro_batches: int = 3) -> float:
    plan = Plan(
        model=CHAIN.name,
        cluster=where.name,
        stages=(stage(zero),),
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        micro_batch_size=4,
        num_micro_batches=micro_batches,
        global_batch=4 * micro_batches,
    )
    return iteration_seconds(plan, CHAIN, where, MODEL, whole=whole)


@pytest.mark.parametrize(("zero", "forwards", "backwards"), [(0, 0, 0), (1, 0, 0), (2, 0, 1), (3, 1, 2)])  # fmt: skip
def test_each_exchange_takes_what_it_sends_over_the_rate(
    zero: int, forwards: int, backwards: int
) -> None:
    device = cluster(efficiency=0.5).devices[0]
    expected = (2 * forwards * TAKEN, 2 * backwards * TAKEN)
    assert taken_seconds(CHAIN, stage(zero), device, 1.0) == pytest.approx(expected)


def test_a_group_of_two_sends_half_as_much_among_half_as_many() -> None:
    device = cluster().devices[0]
    taken = taken_seconds(CHAIN, stage(3, width=2), device, 0.5)
    assert taken == pytest.approx((1 / 2 * 2e9 / RATE, 2 * 1 / 2 * 2e9 / RATE))


def test_experts_go_around_the_devices_that_hold_the_same() -> None:
    """Half of the weights are experts', which two pairs of devices hold half each."""
    layer = replace(LAYER, num_experts=4, expert_parameters=5 * 10**8, active_parameters=10**9)
    chain = replace(CHAIN, layers=(layer, layer))
    shared = replace(stage(2), expert=2)
    _, taken = taken_seconds(chain, shared, cluster().devices[0], 1.0)
    assert taken == pytest.approx((3 / 4 * 2e9 + 1 / 2 * 1 / 2 * 2e9) / RATE)


def test_one_holder_and_kinds_without_a_rate_lose_nothing() -> None:
    alone = replace(stage(3), replicas=stage(3).replicas[:1])
    assert taken_seconds(CHAIN, alone, cluster().devices[0], 1.0) == (0.0, 0.0)
    assert taken_seconds(CHAIN, stage(3), cluster(None).devices[0], 1.0) == (0.0, 0.0)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("zero", "times"), [(0, 0), (1, 0), (2, 1), (3, 3)])
def test_a_step_is_longer_by_its_exchanges(zero: int, times: int, whole: bool) -> None:
    longer = step(zero, cluster(), whole=whole) - step(zero, cluster(None), whole=whole)
    assert longer == pytest.approx(3 * times * TAKEN, rel=1e-4)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_search_prices_a_stage_as_the_engine_computes_it(zero: int) -> None:
    for rate in (RATE, 1e11):
        where = cluster(rate)
        prices = Prices(CHAIN, find_pools(where), MODEL)
        part = PoolPart(pool=0, width=1, replicas=4, samples=1)
        option = Option(
            prices=prices, vector=(4,), parts=(part,), recompute=Recompute.NONE, zero=zero
        )
        portion = Portion(device=where.devices[0], samples=1)
        exact = stage_seconds(MODEL, CHAIN, stage(zero), portion)
        assert option.seconds(0, 2) == pytest.approx(exact, rel=1e-4)


def test_the_catalogue_has_a_rate_for_cards_of_nvidia_and_for_no_cpu() -> None:
    assert device_kind("V100-32GB").exchange_rate == pytest.approx(80 * 10e9)
    # A product is 30 to 40 % slower beside an exchange at the rate that collectives reach.
    for kind, link in (("A100-80GB", 0.79 * 300e9), ("H100-80GB", 0.79 * 450e9)):
        assert 0.3 <= link / device_kind(kind).exchange_rate <= 0.4
    for kind in catalogue():
        is_card = kind.vendor == "NVIDIA"
        assert (kind.exchange_rate < 1e13) == is_card, kind.name
