"""What the chain of a transformer computes, keeps and sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.dtype import Dtype
from argosy.workload.architecture import (
    Architecture,
    Attention,
    Block,
    Experts,
    FeedForward,
    Head,
    NormKind,
    TokenEmbedding,
)
from argosy.workload.chain import Chain, Layer
from argosy.workload.load import load_model, preset_names
from argosy.workload.transformer import build_chain

DECODERS = [name for name in preset_names() if not name.startswith(("t5", "vit", "bert"))]


def active(layer: Layer) -> int:
    return layer.parameters if layer.active_parameters is None else layer.active_parameters


@pytest.mark.parametrize("name", DECODERS)
def test_forward_is_two_flop_per_weight_and_token_plus_attention(name: str) -> None:
    chain = load_model(name, sequence_length=1024)
    weights = sum(active(layer) + layer.tied_parameters for layer in chain.layers[1:])
    short = load_model(name, sequence_length=1)
    attention = chain.forward_flop - 1024 * short.forward_flop
    assert chain.forward_flop == pytest.approx(2 * 1024 * weights + attention, rel=0.02)
    assert 0 < attention < 0.35 * chain.forward_flop


@pytest.mark.parametrize("name", preset_names())
def test_backward_is_twice_forward(name: str) -> None:
    for layer in load_model(name).layers:
        factor = 1 if layer.name == "embedding" and name.startswith("vit") else 2
        assert layer.backward_flop == factor * layer.forward_flop


def test_attention_flop_are_quadratic_up_to_the_window() -> None:
    def attention_flop(sequence_length: int) -> float:
        block = load_model("mistral-7b", sequence_length=sequence_length).layers[1]
        projections = 2 * sequence_length * (41_943_040 + 3 * 4096 * 14336)
        return block.forward_flop - projections

    assert attention_flop(2048) == 4 * 2048 * 2048 * 4096
    assert attention_flop(8192) == 4 * 8192 * 4096 * 4096


@pytest.mark.parametrize(
    ("name", "multiply_adds"), [("vit-base", 17.564e9), ("vit-huge", 167.295e9)]
)
def test_vit_has_the_published_multiply_adds(name: str, multiply_adds: float) -> None:
    """As torchvision documents them for vit_b_16 and vit_h_14."""
    assert load_model(name).forward_flop / 2 == pytest.approx(multiply_adds, rel=1e-3)


def gpt_like(*, fused_attention: bool = True) -> Chain:
    """A block to which the formulas of Korthikanti et al. apply: 16-bit, dropout, inner width 4
    h."""
    attention = Attention(heads=16, kv_heads=16, head_dim=64, dropout=True)
    block = Block(
        attention=attention, feed_forward=FeedForward(inner=4096), norm=NormKind.LAYER, dropout=True
    )
    return build_chain(
        Architecture(
            hidden=1024,
            embedding=TokenEmbedding(vocabulary=1000, width=1024),
            blocks=(block,),
            head=Head(outputs=1000, width=1024, norm=NormKind.LAYER, tied=True),
            context=512,
        ),
        name="gpt-like",
        sequence_length=512,
        dtype=Dtype.BF16,
        fused_attention=fused_attention,
    )


def test_kept_bytes_are_those_of_korthikanti() -> None:
    s, h, a = 512, 1024, 16
    assert gpt_like().layers[1].activation_bytes == 34 * s * h
    assert gpt_like(fused_attention=False).layers[1].activation_bytes == 34 * s * h + 5 * a * s * s


def test_selective_recomputation_of_unfused_attention_repeats_its_core() -> None:
    fused, unfused = gpt_like().layers[1], gpt_like(fused_attention=False).layers[1]
    assert unfused.selective_bytes - fused.selective_bytes == 5 * 16 * 512 * 512
    assert unfused.selective_flop - fused.selective_flop == 4 * 512 * 512 * 1024
    assert fused.selective_flop < 0.01 * fused.forward_flop


@pytest.mark.parametrize("name", preset_names())
def test_amounts_are_consistent(name: str) -> None:
    chain = load_model(name)
    assert [layer.kind for layer in (chain.layers[0], chain.layers[-1])] == ["embedding", "head"]
    assert len({layer.name for layer in chain.layers}) == len(chain.layers)
    for before, layer in zip((None, *chain.layers), chain.layers, strict=False):
        assert 0 <= layer.selective_bytes < layer.activation_bytes
        assert layer.max_tensor_width >= 1
        if before is not None and not name.startswith("t5"):
            assert layer.activation_bytes >= before.output_bytes


def test_a_block_hands_on_and_reduces_the_residual_stream() -> None:
    chain = load_model("llama-3-8b", sequence_length=2048)
    stream = 2048 * 4096 * 2
    embedding, block, head = chain.layers[0], chain.layers[1], chain.layers[-1]
    assert (embedding.output_bytes, block.output_bytes, head.output_bytes) == (stream, stream, 0)
    assert (embedding.reduced_bytes, block.reduced_bytes, head.reduced_bytes) == (
        stream / 2,
        2 * stream,
        stream / 2,
    )
    assert block.max_tensor_width == 8
    assert head.activation_bytes == 2 * stream + 4 * 2048 * 128256


def test_a_parallel_block_reduces_once() -> None:
    chain = load_model("gpt-neox-20b")
    assert chain.layers[1].reduced_bytes == 2048 * 6144 * 2


def test_blocks_are_one_run() -> None:
    assert [count for _, count in load_model("llama-3-8b").runs()] == [1, 32, 1]


def test_t5_carries_the_encoder_through_its_decoder() -> None:
    chain = load_model("t5-base")
    stream = 512 * 768 * 2
    kinds = [layer.kind for layer in chain.layers]
    assert kinds == ["embedding", *["encoder"] * 12, "embedding", *["decoder"] * 12, "head"]
    assert [layer.output_bytes / stream for layer in chain.layers[11:16]] == [1, 1, 2, 2, 2]
    assert chain.layers[25].output_bytes == stream
    assert (chain.layers[13].tied_to, chain.layers[13].tied_parameters) == (0, 32128 * 768)
    assert (chain.layers[26].tied_to, chain.layers[26].parameters) == (0, 768)


def test_twice_the_bytes_in_fp32() -> None:
    half, full = load_model("llama-2-7b"), load_model("llama-2-7b", dtype="fp32")
    assert full.layers[1].activation_bytes == 2 * half.layers[1].activation_bytes
    assert full.forward_flop == half.forward_flop


def test_latent_attention_keeps_compressed_vectors_before_and_after_their_norms() -> None:
    """Beside queries, keys, values and the result; keys and values are what parts of a sequence
    exchange."""
    chain = load_model("deepseek-v3", sequence_length=1024)
    dense = chain.layers[1]
    heads = 128 * (192 + 192 + 128 + 128)
    compressed = 2 * (1536 + 512)
    assert dense.activation_bytes == 2 * 1024 * (4 * 7168 + heads + compressed + 3 * 18432)
    assert dense.selective_bytes == 2 * 1024 * (2 * 7168 + 1536 + 512 + 18432)
    assert dense.key_value_bytes == 2 * 1024 * 128 * (192 + 128)
    assert dense.attention_flop == 2 * 1024 * 1024 * 128 * (192 + 128)


def test_a_shared_expert_keeps_what_a_feed_forward_of_its_width_keeps() -> None:
    """Beside the routed ones: its own activations, and its result, which a gate scales."""

    def kept(part: FeedForward | Experts) -> float:
        attention = Attention(heads=4, kv_heads=4, head_dim=16)
        block = Block(attention=attention, feed_forward=part, norm=NormKind.RMS)
        shape = Architecture(
            hidden=64,
            embedding=TokenEmbedding(vocabulary=100, width=64),
            blocks=(block,),
            head=Head(outputs=100, width=64, norm=NormKind.RMS, tied=True),
            context=128,
        )
        return (
            build_chain(shape, name="one", sequence_length=128, dtype=Dtype.BF16)
            .layers[1]
            .activation_bytes
        )

    routed = Experts(expert=FeedForward(inner=24, gated=True), count=8, active=2)
    narrow, wide = (FeedForward(inner=inner, gated=True) for inner in (40, 72))
    alone, beside = kept(routed), kept(replace(routed, shared=narrow))
    assert beside - alone == 2 * 128 * (3 * 40 + 64)
    assert kept(replace(routed, shared=wide)) - beside == kept(wide) - kept(narrow)
