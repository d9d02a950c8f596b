"""Seconds of compute: identities of the roofline, the order of recomputation, measured times, and
figures by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import KIND

from argosy.cluster.catalogue import device_kind
from argosy.cluster.device import Device, Reached
from argosy.cluster.file import load_cluster
from argosy.cost.calibration import Calibration
from argosy.cost.compute import (
    ComputeModel,
    Portion,
    layer_seconds,
    recompute_seconds,
    stage_seconds,
    update_seconds,
)
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.plan.plan import Recompute, Replica, Stage
from argosy.workload.chain import Chain, Layer
from argosy.workload.load import load_model
from argosy.workload.profile import Profile, ProfileRow

MODEL = ComputeModel(
    forward_peak=0.5,
    backward_peak=0.4,
    passes=2.0,
    forward_floor=50e-6,
    backward_floor=200e-6,
    gathered=0.0,
)
WITHOUT_FLOOR = replace(MODEL, forward_floor=0.0, backward_floor=0.0)
CARD = Device(
    name="n0.0",
    node="n0",
    kind=replace(KIND, flops=((Dtype.BF16, 100e12),), memory_bandwidth=1e12),
    efficiency=0.8,
)
ONE = Portion(device=CARD, samples=1)
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
    layer: Layer = BLOCK,
    *,
    model: ComputeModel = WITHOUT_FLOOR,
    device: Device = CARD,
    samples: int = 1,
    share: float = 1.0,
    width: int = 1,
) -> tuple[float, float]:
    return layer_seconds(
        model, TOY, layer, Portion(device=device, samples=samples, share=share, width=width)
    )


def whole(recompute: Recompute = Recompute.NONE) -> Stage:
    return Stage(
        first=0, end=4, replicas=(Replica(devices=("n0.0",), samples=1),), recompute=recompute
    )


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    flop = draw(st.integers(0, 10**12).map(float))
    return replace(
        BLOCK,
        forward_flop=flop,
        backward_flop=2 * flop,
        parameters=draw(st.integers(0, 10**9)),
        activation_bytes=draw(st.integers(0, 10**10).map(float)),
    )


def test_a_block_by_hand() -> None:
    # 4 samples, half of the layer: 8 GFLOP at 0.5 x 0.8 x 100 TFLOP/s, and 5 MB twice at 0.8 x 1
    # TB/s; backward 16 GFLOP at 0.4 x 0.8 x 100 TFLOP/s, and the bytes twice as often
    assert seconds(model=MODEL, samples=4, share=0.5) == pytest.approx(
        (200e-6 + 12.5e-6, 500e-6 + 25e-6)
    )


def test_an_embedding_by_hand() -> None:
    # No FLOP: 10 MB of weights and 1 MB of activations twice at 0.8 x 1 TB/s, and twice as often in
    # the backward
    assert seconds(EMBEDDING, model=MODEL) == pytest.approx((27.5e-6, 55e-6))


def test_launching_the_kernels_takes_its_time_whatever_the_device() -> None:
    assert seconds(model=MODEL, share=0.1) == (50e-6, 200e-6)
    assert seconds(model=MODEL, share=0.1, device=replace(CARD, efficiency=1.5)) == (50e-6, 200e-6)


def test_a_stage_by_hand() -> None:
    # embedding, two blocks of 4 and a head of 10 GFLOP at 40 TFLOP/s (backward 32), each with its
    # bytes
    forward = 27.5e-6 + 2 * (100e-6 + 10e-6) + (250e-6 + 27.5e-6)
    backward = 55e-6 + 2 * (250e-6 + 20e-6) + (625e-6 + 55e-6)
    assert stage_seconds(MODEL, TOY, whole(), ONE) == pytest.approx((forward, backward))


def test_an_update_by_hand() -> None:
    # 7 M parameters of 2 + 2 + 12 bytes, read and written at 0.8 x 1 TB/s
    assert update_seconds(TOY, whole(), ONE) == pytest.approx(2 * 7e6 * 16 / 0.8e12)


def test_recomputation_by_hand() -> None:
    none, selective, full = (
        stage_seconds(MODEL, TOY, whole(recompute), ONE) for recompute in Recompute
    )
    # Selective: per block 0.4 GFLOP at 40 TFLOP/s, more than 0.5 MB at 0.8 TB/s. Full: the forward
    # once more.
    assert selective == pytest.approx((none[0], none[1] + 2 * 10e-6))
    assert full == pytest.approx((none[0], none[1] + none[0]))


@given(layers(), st.integers(1, 64))
def test_twice_the_samples_take_twice_the_time_where_no_weights_are_read(
    layer: Layer, samples: int
) -> None:
    bare = replace(layer, parameters=0)
    one, two = seconds(bare, samples=samples), seconds(bare, samples=2 * samples)
    assert two == pytest.approx((2 * one[0], 2 * one[1]))


@given(layers(), st.integers(1, 64))
def test_every_further_sample_takes_the_same_time(layer: Layer, samples: int) -> None:
    one, two, three = (seconds(layer, samples=count * samples) for count in (1, 2, 3))
    for way in (0, 1):
        assert three[way] - two[way] == pytest.approx(two[way] - one[way], abs=1e-9 * three[way])


@given(layers(), st.integers(1, 64))
def test_twice_the_samples_take_at_most_twice_the_time(layer: Layer, samples: int) -> None:
    now, then = (seconds(layer, model=MODEL, samples=count * samples) for count in (1, 2))
    for one, two in zip(now, then, strict=True):
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
def test_half_the_efficiency_takes_twice_the_time(layer: Layer, samples: int) -> None:
    now = seconds(layer, samples=samples)
    then = seconds(layer, device=replace(CARD, efficiency=CARD.efficiency / 2), samples=samples)
    assert then == pytest.approx((2 * now[0], 2 * now[1]))


@given(layers(), st.integers(1, 64), st.lists(st.floats(0.05, 1), min_size=1, max_size=8))
def test_the_shares_of_a_tensor_group_sum_to_the_whole(
    layer: Layer, samples: int, weights: list[float]
) -> None:
    parts = [
        seconds(layer, samples=samples, share=weight / sum(weights), width=len(weights))
        for weight in weights
    ]
    assert tuple(map(sum, zip(*parts, strict=True))) == pytest.approx(
        seconds(layer, samples=samples)
    )


@given(layers(), st.integers(1, 64), st.floats(0.01, 1))
def test_floors_only_lengthen(layer: Layer, samples: int, share: float) -> None:
    free = seconds(layer, samples=samples, share=share)
    real = seconds(layer, model=MODEL, samples=samples, share=share)
    floors = (MODEL.forward_floor, MODEL.backward_floor) if layer.forward_flop else (0.0, 0.0)
    assert real == (max(free[0], floors[0]), max(free[1], floors[1]))


@pytest.mark.parametrize(
    ("width", "context", "times"), [(1, 1, 1), (2, 1, 1.5), (2, 2, 1), (4, 2, 1.5)]
)
def test_a_layer_whose_tensors_are_split_makes_more_launches(
    width: int, context: int, times: float
) -> None:
    model = replace(MODEL, forward_floor=1.0, backward_floor=2.0, split_launches=1.5)
    portion = Portion(device=CARD, samples=1, share=1 / width, width=width, context=context)
    assert layer_seconds(model, TOY, TOY.layers[1], portion) == (1.0 * times, 2.0 * times)


def test_a_stage_takes_the_sum_of_its_parts() -> None:
    cut = [replace(whole(), end=1), replace(whole(), first=1, end=3), replace(whole(), first=3)]
    three = replace(ONE, samples=3)
    parts = [stage_seconds(MODEL, TOY, stage, three) for stage in cut]
    together = stage_seconds(MODEL, TOY, whole(), three)
    assert tuple(map(sum, zip(*parts, strict=True))) == pytest.approx(together)


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-3-8b", "bert-base", "mixtral-8x7b", "t5-base", "vit-base"]
)
def test_the_more_is_computed_again_the_longer_the_backward(name: str) -> None:
    chain = load_model(name)
    stage = Stage(first=0, end=len(chain.layers), replicas=(Replica(devices=("n0.0",), samples=1),))
    card = replace(CARD, kind=replace(CARD.kind, flops=tuple((dtype, 1e14) for dtype in Dtype)))
    times = [
        stage_seconds(
            MODEL, chain, replace(stage, recompute=recompute), Portion(device=card, samples=4)
        )
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
    assert seconds(model=model, device=exact, samples=4) == (4, 12)
    assert seconds(model=model, device=exact, samples=2) == (2, 6)


def test_an_uneven_share_and_the_efficiency_stretch_measured_times() -> None:
    model = replace(MODEL, profiles={"plain": MEASURED})
    # Three quarters of a layer that was measured in halves (2 s), on a device that reaches 0.8 of
    # its kind
    assert seconds(model=model, samples=4, share=0.75, width=2) == pytest.approx((3 / 0.8, 9 / 0.8))


def test_a_layer_that_was_not_measured_is_named() -> None:
    model = replace(MODEL, profiles={"plain": replace(MEASURED, rows=MEASURED.rows[:4])})
    with pytest.raises(InputError) as caught:
        seconds(model=model)
    assert (
        str(caught.value) == "block0: expected a measurement of it in the profile of toy for plain"
    )


def test_a_micro_batch_that_was_not_measured_is_named() -> None:
    model = replace(MODEL, profiles={"plain": MEASURED})
    with pytest.raises(InputError) as caught:
        seconds(model=model, samples=8)
    assert str(caught.value) == (
        "micro_batch: found 8, expected 1 to 4 samples, as measured for block of toy on plain"
    )


def test_a_model_without_flop_needs_a_profile() -> None:
    silent = replace(TOY, layers=tuple(replace(layer, forward_flop=0) for layer in TOY.layers))
    with pytest.raises(InputError) as caught:
        layer_seconds(MODEL, silent, silent.layers[1], ONE)
    assert str(caught.value) == (
        "Cannot predict the time of layer block0 on plain because toy states no FLOP. "
        "Try a measured profile."
    )


def test_a_dtype_that_a_device_does_not_have_is_named() -> None:
    with pytest.raises(InputError) as caught:
        layer_seconds(MODEL, replace(TOY, dtype=Dtype.FP8), BLOCK, ONE)
    assert str(caught.value) == 'dtype: found "fp8", expected a dtype that plain has (bf16)'


def test_whole_outputs_and_seconds_beside_the_work_are_added_where_they_are_stated() -> None:
    """1 MB of output over 0.8 TB/s, three times in a forward and six in a backward, whatever the
    share."""
    more = replace(WITHOUT_FLOOR, gathered=3.0, forward_start=1e-5, backward_start=2e-5)
    for share in (0.25, 0.75):
        plain, added = (
            seconds(BLOCK, model=model, samples=4, share=share, width=2)
            for model in (WITHOUT_FLOOR, more)
        )
        whole = 4 * 1e6 / 0.8e12
        assert added == pytest.approx((plain[0] + 3 * whole + 1e-5, plain[1] + 6 * whole + 2e-5))
    alone = seconds(BLOCK, model=more, samples=4)
    assert alone == pytest.approx(
        tuple(a + b for a, b in zip(seconds(BLOCK, samples=4), (1e-5, 2e-5), strict=True))
    )
    assert seconds(EMBEDDING, model=more, samples=4) == seconds(EMBEDDING, samples=4)


def test_a_kind_without_tf32_multiplies_it_at_its_fp32_rate() -> None:
    old = device_kind("V100-32GB")
    assert Dtype.TF32 not in dict(old.flops)
    assert old.peak(Dtype.TF32) == old.peak(Dtype.FP32) > 0


def test_a_process_that_leaves_no_memory_is_refused() -> None:
    cluster = load_cluster("two-cards")
    with pytest.raises(
        InputError, match=r"process_bytes: found .*, expected a process that takes less than the "
    ):
        Calibration(process_bytes=1e12).cluster(cluster)


MIXED = replace(
    CARD,
    efficiency=1.0,
    kind=replace(
        CARD.kind,
        flops=((Dtype.BF16, 100e12), (Dtype.FP8, 200e12)),
        reached=Reached(products=((Dtype.BF16, 0.5), (Dtype.FP8, 0.4)), attention=0.25, passes=2.0),
    ),
)
ATTENTIVE = replace(BLOCK, attention_flop=1e9, parameters=0, activation_bytes=0.0)


def test_attention_has_a_share_of_the_peak_of_its_own() -> None:
    """3 GFLOP of products at 1.076 x 0.5 x 100 TFLOP/s and 1 of attention at 7 / 6 x 0.25 x 100;
    twice that in the backward, at 14 / 15 x 0.25 x 100."""
    plain = ComputeModel(forward_floor=0.0, backward_floor=0.0)
    ahead, back = seconds(ATTENTIVE, model=plain, device=MIXED)
    assert ahead == pytest.approx(3e9 / 53.8e12 + 6 / 7 * 1e9 / 25e12)
    assert back == pytest.approx(6e9 / 48.3e12 + 15 / 14 * 2e9 / 25e12)
    fixed = replace(plain, forward_peak=0.3, backward_peak=0.3, attention_peak=0.1)
    assert seconds(ATTENTIVE, model=fixed, device=MIXED)[0] == pytest.approx(
        3e9 / 30e12 + 6 / 7 * 1e9 / 10e12
    )


def test_a_fused_backward_of_attention_takes_two_and_a_half_forwards() -> None:
    """Recomputation of unfused attention, which keeps its scores, takes half of a backward."""
    plain = ComputeModel(forward_floor=0.0, backward_floor=0.0)
    alone = replace(ATTENTIVE, forward_flop=1e9, backward_flop=2e9)
    ahead, back = seconds(alone, model=plain, device=MIXED)
    assert back / ahead == pytest.approx(2.5)
    assert ahead + back == pytest.approx(3e9 / 25e12)
    ahead, back = seconds(replace(alone, score_bytes=1.0), model=plain, device=MIXED)
    assert back / ahead == pytest.approx(2.0)


def test_a_recomputation_that_stops_early_leaves_out_the_last_product() -> None:
    plain = ComputeModel(forward_floor=0.0, backward_floor=0.0)
    layer = replace(ATTENTIVE, last_flop=1e9)
    portion = Portion(device=MIXED, samples=1)
    ahead, _ = layer_seconds(plain, TOY, layer, portion)
    early = replace(TOY, stops_early=True)
    again = [
        recompute_seconds(plain, chain, layer, portion, Recompute.FULL, ahead)
        for chain in (TOY, early)
    ]
    assert again[0] == ahead
    assert again[0] - again[1] == pytest.approx(1e9 / 53.8e12)


def test_under_fp8_only_projections_of_blocks_are_multiplied_in_it() -> None:
    plain = ComputeModel(forward_floor=0.0, backward_floor=0.0)
    chain, portion = replace(TOY, dtype=Dtype.FP8), Portion(device=MIXED, samples=1)
    ahead, _ = layer_seconds(plain, chain, ATTENTIVE, portion)
    assert ahead == pytest.approx(3e9 / (1.076 * 0.4 * 200e12) + 6 / 7 * 1e9 / 25e12)
    head = replace(HEAD, tied_to=None, tied_parameters=0, activation_bytes=0.0)
    assert layer_seconds(plain, chain, head, portion)[0] == pytest.approx(10e9 / 53.8e12)
    assert (
        load_model("gpt2", dtype="fp8").layers[1].output_bytes
        == load_model("gpt2").layers[1].output_bytes
    )


def test_a_fused_step_moves_less_and_a_group_that_repeats_the_sequence_more() -> None:
    eager = replace(WITHOUT_FLOOR, forward_peak=1.0, backward_peak=1.0, gathered=1.0)
    still = replace(BLOCK, forward_flop=1.0, backward_flop=1.0)
    assert seconds(still, model=replace(eager, compiled=True))[0] == pytest.approx(
        0.65 * seconds(still, model=eager)[0]
    )
    one = Portion(device=CARD, samples=1, share=0.5, width=2)
    split = layer_seconds(eager, TOY, still, one)[0]
    whole = layer_seconds(eager, replace(TOY, sequence_parallel=False), still, one)[0]
    assert whole - split == pytest.approx(0.33 * still.output_bytes / (0.8 * 1e12))
