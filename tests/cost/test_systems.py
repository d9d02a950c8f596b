"""What systems keep, sum and recompute: bytes by hand, and the uncertainty of predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from argosy.calibrate.run import Degrees, even_plan
from argosy.calibrate.table import machines
from argosy.cluster.catalogue import device_kind
from argosy.cluster.device import Device
from argosy.cluster.file import load_cluster
from argosy.cost.calibration import Calibration
from argosy.cost.calibration_file import read_calibration
from argosy.cost.compute import Portion, layer_seconds
from argosy.cost.memory import activation_bytes, state_bytes, working_bytes
from argosy.cost.uncertainty import interval, is_close, relative_error
from argosy.dtype import Dtype
from argosy.plan.plan import CostModelRef, Recompute, Replica, Stage
from argosy.sim.simulate import iteration_seconds
from argosy.workload.load import load_model, read_profiles
from argosy.workload.systems import Buffers, Selective

LLAMA = load_model("llama-3-8b", sequence_length=2048)
GPT = load_model("gpt2", sequence_length=1024, fused_attention=False)


def stage(first: int, end: int, *, width: int = 1, **settings: Recompute | int) -> Stage:
    devices = tuple(f"n0.{index}" for index in range(width))
    return Stage(first=first, end=end, replicas=(Replica(devices=devices, samples=1),), **settings)  # type: ignore[arg-type]


def test_gradients_in_fp32_take_four_bytes_and_go_around_as_such() -> None:
    stated = Calibration(gradient_dtype=Dtype.FP32, reduce_dtype=Dtype.FP32).chain(LLAMA)
    plain, more = (state_bytes(chain, stage(1, 2), 1.0) for chain in (LLAMA, stated))
    assert more.gradients == 2 * plain.gradients == 4 * LLAMA.layers[1].parameters
    assert (more.weights, more.optimizer) == (plain.weights, plain.optimizer)
    assert [LLAMA.exchanged_bytes(zero) for zero in (0, 1)] == [2, 2]
    assert [stated.exchanged_bytes(zero) for zero in (0, 1)] == [4, 3]


def test_without_sequence_parallelism_a_group_keeps_what_is_outside_its_products_whole() -> None:
    """Korthikanti et al., (2) and (4): of 34 s h bytes 10 are not split by tensor parallelism
    alone."""
    chain = load_model("gpt2", sequence_length=1024)
    unit = 1024 * 768
    block = stage(1, 2, width=4)
    assert activation_bytes(chain, block, 1, 0.25) == pytest.approx(34 / 4 * unit)
    assert activation_bytes(
        replace(chain, sequence_parallel=False), block, 1, 0.25
    ) == pytest.approx((10 + 24 / 4) * unit)


def test_selective_recomputation_is_what_a_system_means_by_it() -> None:
    block = stage(1, 2, recompute=Recompute.SELECTIVE)
    kept = {
        one: activation_bytes(Calibration(selective=one).chain(GPT), block, 1, 1.0)
        for one in Selective
    }
    whole = activation_bytes(GPT, stage(1, 2), 1, 1.0)
    assert kept[Selective.ATTENTION] == whole - GPT.layers[1].score_bytes
    assert kept[Selective.PRODUCTS] < kept[Selective.ELEMENTWISE] < kept[Selective.ATTENTION]
    fused = load_model("gpt2", sequence_length=1024)
    again = activation_bytes(Calibration(selective=Selective.ATTENTION).chain(fused), block, 1, 1.0)
    assert again == activation_bytes(fused, stage(1, 2), 1, 1.0)


def test_a_loss_holds_sixteen_bytes_for_a_logit_unless_it_is_fused() -> None:
    head = stage(len(LLAMA.layers) - 1, len(LLAMA.layers))
    logits = 2048 * 128256
    held = {
        name: working_bytes(calibration.chain(LLAMA), head, 1, 1.0) / logits
        for name, calibration in {
            "eager": Calibration(),
            "compiled": Calibration(compiled=True),
            "fused": Calibration(fused_loss=True),
        }.items()
    }
    assert held == {"eager": 12, "compiled": 12, "fused": 0}  # beside the 4 that are kept


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "deepspeed"])
def test_systems_come_as_calibrations(name: str) -> None:
    assert read_calibration(name).gradient_dtype is Dtype.FP32


def test_a_prediction_is_as_uncertain_as_its_least_known_kind() -> None:
    cluster = load_cluster("mixed-16")
    degrees = Degrees(data=16, micro_batch=1, global_batch=16)
    plan = even_plan(degrees, load_model("gpt2", dtype="fp16"), cluster)
    assert relative_error(plan, cluster) == 0.3  # of V100
    split = even_plan(
        replace(degrees, data=8, tensor=2, global_batch=8),
        load_model("gpt2", dtype="fp16"),
        cluster,
    )
    assert relative_error(split, cluster) == pytest.approx((0.3**2 + 0.08**2) ** 0.5)
    profiles = [{"device": device} for device in ("A100-80GB", "V100-32GB")]
    measured = replace(plan, cost_model=CostModelRef.of({"profiles": profiles}))
    assert relative_error(measured, cluster) == 0.1
    found = interval(plan, cluster, 2.0)
    assert (found.low, found.high) == pytest.approx((2 / 1.3, 2.6))
    assert is_close(75.0, 80.0) and not is_close(70.0, 80.0)


def test_links_outside_nodes_may_reach_another_share() -> None:
    cluster = load_cluster("mixed-16")
    slower = Calibration(bandwidth=0.5, nic_bandwidth=0.25).cluster(cluster)
    shares = {
        link.name: slow.bandwidth.at(0) / link.bandwidth.at(0)
        for link, slow in zip(cluster.links, slower.links, strict=True)
    }
    assert {share for name, share in shares.items() if "nic" in name} == {0.25}
    assert {share for name, share in shares.items() if "nvlink" in name} == {0.5}


def test_asynchronous_groups_wait_for_two_thirds_of_what_they_reduce() -> None:
    plain, late = (Calibration(async_tensor=one).chain(GPT) for one in (False, True))
    reduced = [sum(layer.reduced_bytes for layer in chain.layers) for chain in (plain, late)]
    assert reduced[1] == pytest.approx(0.66 * reduced[0])
    assert late.async_tensor


def test_torchtitan_gathers_in_fp8_what_it_multiplies_in_fp8() -> None:
    """Of a reduction the gather has one byte per element and the scatter two; of ZeRO 3 the two
    gathers have one and the scatter of fp32 gradients four."""
    chain = replace(GPT, dtype=Dtype.FP8)
    plain, titan, late = (
        Calibration(buffers=buffers, reduce_dtype=Dtype.FP32).chain(chain) for buffers in Buffers
    )
    assert late.exchanged_bytes(3) == titan.exchanged_bytes(3)
    reduced = [sum(layer.reduced_bytes for layer in chain.layers) for chain in (plain, titan)]
    assert reduced[1] == 3 / 4 * reduced[0] > 0
    assert (plain.exchanged_bytes(3), titan.exchanged_bytes(3)) == (8 / 3, 2)
    assert (plain.exchanged_bytes(1), titan.exchanged_bytes(1)) == (3, 2.5)


@pytest.mark.parametrize(
    ("constants", "recompute", "passes"),
    [
        ({}, Recompute.FULL, 1),
        ({"repeats_exchanges": True}, Recompute.FULL, 2),
        ({"repeats_exchanges": True, "stops_early": True}, Recompute.FULL, 1.75),
        ({"repeats_exchanges": True, "selective": Selective.PRODUCTS}, Recompute.SELECTIVE, 1.5),
        ({"repeats_exchanges": True, "selective": Selective.ATTENTION}, Recompute.SELECTIVE, 1),
    ],
)
def test_backwards_repeat_exchanges_as_the_engine_and_the_fold_price_them(
    constants: dict[str, Any], recompute: Recompute, passes: float
) -> None:
    calibration = Calibration(**constants)
    chain, cluster = calibration.chain(GPT), machines("A100-80GB", 4)
    degrees = Degrees(tensor=4, micro_batch=64, global_batch=256, recompute=recompute)
    plan, model = even_plan(degrees, chain, cluster), calibration.compute_model()
    bare = replace(chain, layers=tuple(replace(layer, reduced_bytes=0.0) for layer in chain.layers))
    reduced = sum(layer.reduced_bytes for layer in chain.layers)
    once = 2 * 64 * reduced * 3 / 4 / (0.79 * 300e9)
    for whole in (True, False):
        with_sums, without = (
            iteration_seconds(plan, each, cluster, model, whole=whole) for each in (chain, bare)
        )
        # Latencies are the rest.
        assert with_sums - without == pytest.approx(4 * (1 + passes) * once, rel=0.1)
        assert with_sums - without > 4 * (1 + passes) * once


def test_a_calibration_scales_measured_seconds() -> None:
    profile = read_profiles(["h200-llama-2-7b"])[0]
    chain = load_model("llama-2-7b", dtype="bf16")
    device = Device(name="h0.0", node="h0", kind=device_kind("H200"))
    portion = Portion(device=device, samples=1)
    times = [
        layer_seconds(
            Calibration(profile_factor=one).compute_model({"H200": profile}),
            chain,
            chain.layers[1],
            portion,
        )
        for one in (1.0, 1.5)
    ]
    assert times[1] == pytest.approx(tuple(1.5 * seconds for seconds in times[0]))
