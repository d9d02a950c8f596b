"""Bytes of memory: what ZeRO divides, what recomputation drops, whose weights are counted, and
figures by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import chains

from argosy.cost.memory import (
    activation_bytes,
    gathered_bytes,
    optimizer_bytes,
    passing_bytes,
    recomputed_bytes,
    stage_parameters,
    state_bytes,
)
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.plan.plan import Recompute, Replica, Stage
from argosy.workload.chain import Chain, Layer
from argosy.workload.load import load_model

PRESETS = ["gpt2", "llama-3-8b", "bert-base", "mixtral-8x7b", "t5-base", "vit-base"]


def layer(name: str, **fields: object) -> Layer:
    figures = {
        "forward_flop": 1.0,
        "backward_flop": 2.0,
        "parameters": 10,
        "activation_bytes": 100.0,
    }
    return Layer(**({"name": name, "kind": name, "output_bytes": 20.0} | figures | fields))


TOY = Chain(
    name="toy",
    layers=(
        layer("embedding", parameters=1000, activation_bytes=8.0),
        layer("block0", selective_bytes=60.0),
        layer("block1", selective_bytes=60.0, output_bytes=30.0),
        layer("head", parameters=5, activation_bytes=50.0, tied_to=0, tied_parameters=1000),
    ),
    sequence_length=1,
    dtype=Dtype.BF16,
)


def stage(
    first: int, end: int, *, replicas: int = 1, zero: int = 0, recompute: Recompute = Recompute.NONE
) -> Stage:
    each = tuple(Replica(devices=(f"n0.{index}",), samples=1) for index in range(replicas))
    return Stage(first=first, end=end, replicas=each, zero=zero, recompute=recompute)


def test_state_by_hand() -> None:
    # 20 weights on two blocks, a quarter of them here: 5 elements of 2 + 2 + (8 + 4) bytes
    held = state_bytes(TOY, stage(1, 3), 0.25)
    assert (held.weights, held.gradients, held.optimizer, held.total) == (10, 10, 60, 80)


def test_activations_by_hand() -> None:
    # 8 + 100 + 100 + 50 per sample; selective drops 60 of each block; full keeps inputs of 0 + 20 +
    # 20 + 30
    kept = [
        activation_bytes(TOY, stage(0, 4, recompute=recompute), 3, 0.5) for recompute in Recompute
    ]
    assert kept == [258 * 1.5, 138 * 1.5, 70 * 1.5]


def test_what_is_computed_again_by_hand() -> None:
    held = [
        recomputed_bytes(TOY, stage(0, 4, recompute=recompute), 3, 0.5) for recompute in Recompute
    ]
    assert held == [0, 60 * 1.5, 100 * 1.5]


def test_tied_weights_count_once_per_stage() -> None:
    assert stage_parameters(TOY, stage(0, 4)) == TOY.parameters == 1025
    assert stage_parameters(TOY, stage(0, 1)) == 1000
    assert stage_parameters(TOY, stage(3, 4)) == 1005
    assert stage_parameters(TOY, stage(1, 4)) == 1025


def test_a_table_that_two_layers_of_a_stage_share_with_a_third_counts_once() -> None:
    """t5-base's decoder embeds tokens and predicts them by one table."""
    chain = load_model("t5-base")
    half = len(chain.layers) // 2
    decoder = sum(layer.parameters for layer in chain.layers[half:])
    assert (
        stage_parameters(chain, stage(half, len(chain.layers)))
        == decoder + 32128 * 768
        == 137_949_312
    )


@given(chains(), st.data())
def test_a_cut_holds_tied_weights_on_both_sides_and_others_once(
    chain: Chain, data: st.DataObject
) -> None:
    end = len(chain.layers)
    cut = data.draw(st.integers(1, end - 1))
    parts = stage_parameters(chain, stage(0, cut)) + stage_parameters(chain, stage(cut, end))
    assert parts == chain.parameters + chain.layers[-1].tied_parameters


@given(chains(), st.integers(1, 9))
def test_zero_divides_one_thing_more_at_each_level(chain: Chain, replicas: int) -> None:
    plain = state_bytes(chain, stage(0, 2, replicas=replicas), 1.0)
    held = [
        state_bytes(chain, stage(0, 2, replicas=replicas, zero=level), 1.0) for level in range(4)
    ]
    assert [one.optimizer for one in held] == pytest.approx(
        [plain.optimizer] + [plain.optimizer / replicas] * 3
    )
    assert [one.gradients for one in held] == pytest.approx(
        [plain.gradients] * 2 + [plain.gradients / replicas] * 2
    )
    assert [one.weights for one in held] == pytest.approx(
        [plain.weights] * 3 + [plain.weights / replicas]
    )


@given(chains(), st.integers(1, 9))
def test_under_zero_3_the_replicas_together_hold_one_model(chain: Chain, replicas: int) -> None:
    one = state_bytes(chain, stage(0, 2), 1.0)
    each = state_bytes(chain, stage(0, 2, replicas=replicas, zero=3), 1.0)
    assert each.total * replicas == pytest.approx(one.total)


@pytest.mark.parametrize(
    ("zero", "forward", "backward"), [(0, 0, 0), (1, 0, 0), (2, 0, 3.25), (3, 2.25, 3.25)]
)
def test_sharded_weights_are_whole_for_a_moment(zero: int, forward: float, backward: float) -> None:
    """The largest layer: a head of 5 weights and the table of 1,000 that it shares, half of it
    here, 2 bytes each."""
    some = stage(1, 4, replicas=4, zero=zero)
    assert gathered_bytes(TOY, some, 0.5, backward=False) == forward * 1005
    assert gathered_bytes(TOY, some, 0.5, backward=True) == backward * 1005
    whole = (
        2 * 3 * max(layer.output_bytes for layer in TOY.layers[1:4])
    )  # of a group that shares each replica
    assert passing_bytes(TOY, some, 3, 0.5, backward=True) == backward * 1005 + whole
    assert gathered_bytes(TOY, replace(some, end=3), 0.5, backward=True) == backward * 10
    assert gathered_bytes(TOY, stage(1, 4, zero=zero), 0.5, backward=True) == 0


def test_experts_that_are_split_are_never_whole() -> None:
    chain = replace(
        TOY, layers=(layer("experts", parameters=1000, expert_parameters=800, num_experts=8),)
    )
    four = replace(stage(0, 1, replicas=4, zero=3), expert=4)
    assert gathered_bytes(chain, four, 1.0, backward=True) == 3.25 * 2 * (200 + 200)


@given(chains(), st.lists(st.floats(0.05, 1), min_size=1, max_size=8))
def test_the_shares_of_a_tensor_group_hold_the_whole(chain: Chain, weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    whole = stage(0, len(chain.layers))
    held = sum(state_bytes(chain, whole, share).total for share in shares)
    kept = sum(activation_bytes(chain, whole, 3, share) for share in shares)
    assert held == pytest.approx(state_bytes(chain, whole, 1.0).total)
    assert kept == pytest.approx(activation_bytes(chain, whole, 3, 1.0))


@given(chains(), st.integers(1, 64))
def test_activations_grow_with_the_samples_and_state_does_not_know_them(
    chain: Chain, samples: int
) -> None:
    whole = stage(0, len(chain.layers))
    one = activation_bytes(chain, whole, 1, 1.0)
    assert activation_bytes(chain, whole, samples, 1.0) == pytest.approx(samples * one)


@pytest.mark.parametrize("name", PRESETS)
def test_the_more_is_computed_again_the_less_is_kept(name: str) -> None:
    chain = load_model(name)
    for first, end in ((0, len(chain.layers)), (1, 2), (2, len(chain.layers))):
        none, selective, full = (
            activation_bytes(chain, stage(first, end, recompute=recompute), 4, 1.0)
            for recompute in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
        )
        assert none >= selective >= full


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_held_to_compute_again_was_dropped_before(name: str) -> None:
    chain = load_model(name)
    for recompute in Recompute:
        whole = stage(0, len(chain.layers), recompute=recompute)
        again = activation_bytes(chain, whole, 4, 1.0) + recomputed_bytes(chain, whole, 4, 1.0)
        once = activation_bytes(chain, replace(whole, recompute=Recompute.NONE), 4, 1.0)
        assert again <= once * (1 + 1e-9)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "total"),
    [
        ("adamw", Dtype.BF16, 16),
        ("adam", Dtype.FP16, 16),
        ("adamw", Dtype.FP32, 16),
        ("lion", Dtype.BF16, 12),
        ("momentum", Dtype.FP32, 12),
        ("sgd", Dtype.BF16, 8),
        ("sgd", Dtype.TF32, 8),
        ("adamw", Dtype.FP8, 16),
        (
            "adamw8bit",
            Dtype.BF16,
            6.03125,
        ),  # two moments of a byte and a 256th of 4 bytes, and no master copy
        ("adamw8bit", Dtype.FP32, 10.03125),
        ("adafactor", Dtype.BF16, 4.00390625),
    ],
)
def test_bytes_per_parameter(optimizer: str, dtype: Dtype, total: float) -> None:
    """Weights, gradients and optimizer state; below fp32 with a master copy of 4 bytes."""
    held = state_bytes(replace(TOY, optimizer=optimizer, dtype=dtype), stage(1, 2), 0.1)
    assert held.total == pytest.approx(total)


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(InputError) as caught:
        optimizer_bytes(replace(TOY, optimizer="adamz"))
    assert str(caught.value) == (
        'optimizer: found "adamz", expected one of the optimizers adamw, adam, lion, momentum, '
        "adamw8bit, adafactor, sgd; "
        'did you mean "adam"?'
    )
