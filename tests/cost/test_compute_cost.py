"""Seconds of compute: identities of the roofline, the order of recomputation, measured times, and figures by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import KIND

from argosy.cluster.device import Device
from argosy.cost.compute import ComputeModel, layer_seconds, stage_seconds, update_seconds
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.plan.plan import Recompute, Replica, Stage
from argosy.workload.chain import Chain, Layer
from argosy.workload.load import load_model
from argosy.workload.profile import Profile, ProfileRow

MODEL = ComputeModel(achievable=0.5, launch=10e-6)
CARD = Device(
    name="n0.0",
    node="n0",
    kind=replace(KIND, flops=((Dtype.BF16, 100e12),), memory_bandwidth=1e12),
    efficiency=0.8,
)
EMBEDDING = Layer(
    name="embedding",
    kind="embedding",
    forward_flop=0,
    backward_flop=0,
    parameters=5_000_000,
    activation_bytes=1e6,
    output_bytes=1e6,
)
BLOCK = Layer(
    name="block0",
    kind="block",
    forward_flop=4e9,
    backward_flop=8e9,
    parameters=1_000_000,
    activation_bytes=2e6,
    output_bytes=1e6,
    selective_bytes=0.5e6,
    selective_flop=0.4e9,
)
HEAD = replace(
    EMBEDDING, name="head", kind="head", forward_flop=10e9, backward_flop=20e9, parameters=0,
    tied_to=0, tied_parameters=5_000_000,
)  # fmt: skip
TOY = Chain(
    name="toy",
    layers=(EMBEDDING, BLOCK, replace(BLOCK, name="block1"), HEAD),
    sequence_length=1,
    dtype=Dtype.BF16,
)


def seconds(
    layer: Layer = BLOCK, *, device: Device = CARD, samples: int = 1, share: float = 1.0
) -> tuple[float, float]:
    return layer_seconds(MODEL, TOY, layer, device, samples, share, round(1 / share))


def whole(recompute: Recompute = Recompute.NONE) -> Stage:
    return Stage(first=0, end=4, replicas=(Replica(devices=("n0.0",), samples=1),), recompute=recompute)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    flop = draw(st.floats(0, 1e12))
    return replace(
        BLOCK,
        forward_flop=flop,
        backward_flop=2 * flop,
        parameters=draw(st.integers(0, 10**9)),
        activation_bytes=draw(st.floats(0, 1e10)),
    )


def test_a_block_by_hand() -> None:
    # 4 samples, half of the layer: 8 GFLOP at 0.5 x 0.8 x 100 TFLOP/s against 5 MB at 0.8 x 1 TB/s
    assert seconds(samples=4, share=0.5) == pytest.approx((200e-6 + 10e-6, 400e-6 + 20e-6))


def test_an_embedding_by_hand() -> None:
    # No FLOP: 10 MB of weights and 1 MB of activations at 0.8 x 1 TB/s, twice in the backward
    assert seconds(EMBEDDING) == pytest.approx((13.75e-6 + 10e-6, 27.5e-6 + 20e-6))


def test_a_stage_by_hand() -> None:
    # embedding, two blocks of 4 GFLOP at 40 TFLOP/s, a head of 10 GFLOP whose 11 MB are hidden behind 250 us
    assert stage_seconds(MODEL, TOY, whole(), CARD, 1, 1.0, 1) == pytest.approx(
        (13.75e-6 + 2 * 100e-6 + 250e-6 + 4 * 10e-6, 27.5e-6 + 2 * 200e-6 + 500e-6 + 8 * 10e-6)
    )


def test_an_update_by_hand() -> None:
    # 7 M parameters of 2 + 2 + 12 bytes, read and written at 0.8 x 1 TB/s
    assert update_seconds(TOY, whole(), CARD, 1.0) == pytest.approx(2 * 7e6 * 16 / 0.8e12)


def test_recomputation_by_hand() -> None:
    none, selective, full = (stage_seconds(MODEL, TOY, whole(recompute), CARD, 1, 1.0, 1) for recompute in Recompute)
    # Selective: per block 0.4 GFLOP at 40 TFLOP/s, more than 0.5 MB at 0.8 TB/s. Full: the forward once more.
    assert selective == pytest.approx((none[0], none[1] + 2 * 10e-6))
    assert full == pytest.approx((none[0], none[1] + none[0]))


@given(st.integers(1, 64))
def test_twice_the_samples_take_twice_the_time_where_flop_bind(samples: int) -> None:
    one, two = seconds(samples=samples), seconds(samples=2 * samples)
    assert two[0] - MODEL.launch == pytest.approx(2 * (one[0] - MODEL.launch))
    assert two[1] - 2 * MODEL.launch == pytest.approx(2 * (one[1] - 2 * MODEL.launch))


@given(layers(), st.integers(1, 64))
def test_twice_the_samples_take_at_most_twice_the_time(layer: Layer, samples: int) -> None:
    for one, two in zip(seconds(layer, samples=samples), seconds(layer, samples=2 * samples), strict=True):
        assert one <= two <= 2 * one * (1 + 1e-12)


@given(layers(), st.integers(1, 64))
def test_twice_the_peak_or_the_memory_bandwidth_never_slows(layer: Layer, samples: int) -> None:
    now = seconds(layer, samples=samples)
    twice = tuple((dtype, 2 * rate) for dtype, rate in CARD.kind.flops)
    for faster in (
        replace(CARD.kind, flops=twice),
        replace(CARD.kind, memory_bandwidth=2 * CARD.kind.memory_bandwidth),
    ):
        then = seconds(layer, device=replace(CARD, kind=faster), samples=samples)
        assert all(new <= old for new, old in zip(then, now, strict=True))


@given(layers(), st.integers(1, 64))
def test_half_the_efficiency_takes_twice_the_time_beside_launches(layer: Layer, samples: int) -> None:
    now = seconds(layer, samples=samples)
    then = seconds(layer, device=replace(CARD, efficiency=CARD.efficiency / 2), samples=samples)
    for old, new, launches in zip(now, then, (1, 2), strict=True):
        assert new - launches * MODEL.launch == pytest.approx(2 * (old - launches * MODEL.launch))


@given(layers(), st.integers(1, 64), st.lists(st.floats(0.05, 1), min_size=1, max_size=8))
def test_the_shares_of_a_tensor_group_sum_to_the_whole(layer: Layer, samples: int, weights: list[float]) -> None:
    parts = [layer_seconds(MODEL, TOY, layer, CARD, samples, weight / sum(weights), len(weights)) for weight in weights]
    forward, backward = seconds(layer, samples=samples)
    assert sum(part[0] - MODEL.launch for part in parts) == pytest.approx(forward - MODEL.launch)
    assert sum(part[1] - 2 * MODEL.launch for part in parts) == pytest.approx(backward - 2 * MODEL.launch)


@given(layers(), st.integers(1, 64))
def test_a_backward_of_twice_the_flop_takes_twice_the_forward(layer: Layer, samples: int) -> None:
    forward, backward = seconds(layer, samples=samples)
    assert backward == pytest.approx(2 * forward)


def test_a_stage_takes_the_sum_of_its_parts() -> None:
    cut = [replace(whole(), end=1), replace(whole(), first=1, end=3), replace(whole(), first=3)]
    parts = [stage_seconds(MODEL, TOY, stage, CARD, 3, 1.0, 1) for stage in cut]
    together = stage_seconds(MODEL, TOY, whole(), CARD, 3, 1.0, 1)
    assert tuple(map(sum, zip(*parts, strict=True))) == pytest.approx(together)


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "bert-base", "mixtral-8x7b", "t5-base", "vit-base"])
def test_the_more_is_computed_again_the_longer_the_backward(name: str) -> None:
    chain = load_model(name)
    stage = Stage(first=0, end=len(chain.layers), replicas=(Replica(devices=("n0.0",), samples=1),))
    card = replace(CARD, kind=replace(CARD.kind, flops=tuple((dtype, 1e14) for dtype in Dtype)))
    times = [
        stage_seconds(MODEL, chain, replace(stage, recompute=recompute), card, 4, 1.0, 1)
        for recompute in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    ]
    assert times[0][0] == times[1][0] == times[2][0]
    assert times[0][1] <= times[1][1] <= times[2][1]
    assert times[0][1] < times[2][1]


MEASURED = Profile(
    device="plain",
    model="toy",
    rows=tuple(
        ProfileRow(
            layer=layer,
            micro_batch=count,
            tensor_width=width,
            dtype=Dtype.BF16,
            forward_seconds=count / width,
            backward_seconds=3 * count / width,
        )
        for layer in ("embedding", "block", "block1", "head")
        for count in (1, 4)
        for width in (1, 2)
    ),
)


def test_measured_times_replace_the_roofline() -> None:
    model = replace(MODEL, profiles={"plain": MEASURED})
    exact = replace(CARD, efficiency=1.0)
    assert layer_seconds(model, TOY, BLOCK, exact, 4, 1.0, 1) == (4, 12)
    assert layer_seconds(model, TOY, BLOCK, exact, 2, 1.0, 1) == (2, 6)


def test_an_uneven_share_and_the_efficiency_stretch_measured_times() -> None:
    model = replace(MODEL, profiles={"plain": MEASURED})
    # Three quarters of a layer that was measured in halves (2 s), on a device that reaches 0.8 of its kind
    assert layer_seconds(model, TOY, BLOCK, CARD, 4, 0.75, 2) == pytest.approx((2 * 1.5 / 0.8, 6 * 1.5 / 0.8))


def test_a_layer_that_was_not_measured_is_named() -> None:
    model = replace(MODEL, profiles={"plain": replace(MEASURED, rows=MEASURED.rows[:4])})
    with pytest.raises(InputError) as caught:
        layer_seconds(model, TOY, BLOCK, CARD, 1, 1.0, 1)
    assert str(caught.value) == "block0: expected a measurement of it in the profile of toy for plain"


def test_a_micro_batch_that_was_not_measured_is_named() -> None:
    model = replace(MODEL, profiles={"plain": MEASURED})
    with pytest.raises(InputError) as caught:
        layer_seconds(model, TOY, BLOCK, CARD, 8, 1.0, 1)
    assert str(caught.value) == ("micro_batch: found 8, expected 1 to 4 samples, as measured for block of toy on plain")


def test_a_model_without_flop_needs_a_profile() -> None:
    silent = replace(TOY, layers=tuple(replace(layer, forward_flop=0) for layer in TOY.layers))
    with pytest.raises(InputError) as caught:
        layer_seconds(MODEL, silent, silent.layers[1], CARD, 1, 1.0, 1)
    assert str(caught.value) == (
        "layer block0: expected a measured profile of toy for plain, because the model states no FLOP"
    )


def test_a_dtype_that_a_device_does_not_have_is_named() -> None:
    with pytest.raises(InputError) as caught:
        layer_seconds(MODEL, replace(TOY, dtype=Dtype.FP8), BLOCK, CARD, 1, 1.0, 1)
    assert str(caught.value) == 'dtype: found "fp8", expected a dtype that plain has (bf16)'
