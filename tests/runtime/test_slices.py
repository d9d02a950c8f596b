"""A transformer's layers as they are timed have the weights and keep the bytes that the cost model
counts."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.measure.slices import build_layer, check_sliceable
from argosy.measure.stack import Stack, measure_stack, stack_seconds
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
from argosy.workload.preset import read_preset
from argosy.workload.transformer import build_chain

HIDDEN, TOKENS, SAMPLES = 64, 128, 2


def architecture(*, gated: bool = False, kv_heads: int = 4, parallel: bool = False) -> Architecture:
    block = Block(
        attention=Attention(heads=4, kv_heads=kv_heads, head_dim=16),
        feed_forward=FeedForward(inner=256, gated=gated),
        norm=NormKind.LAYER,
        parallel=parallel,
    )
    return Architecture(
        hidden=HIDDEN,
        embedding=TokenEmbedding(vocabulary=96, width=HIDDEN, position_rows=TOKENS),
        blocks=(block, block),
        head=Head(outputs=96, width=HIDDEN, norm=NormKind.LAYER, tied=False),
        context=TOKENS,
    )


SHAPES = {
    "plain": architecture(),
    "gated": architecture(gated=True, kv_heads=2),
    "parallel": architecture(parallel=True),
}


def kept_bytes(module: nn.Module, given: Tensor) -> int:
    """Distinct storages that autograd keeps, the input among them, weights not."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {given.untyped_storage().data_ptr(): given.untyped_storage().nbytes()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = module(given)
    result.sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "index"), [("block", 1), ("head", -1)])
def test_a_slice_keeps_its_share(shape: str, width: int, kind: str, index: int) -> None:
    layer = build_chain(SHAPES[shape], name=shape, sequence_length=TOKENS, dtype=Dtype.FP32).layers[
        index
    ]
    given = torch.randn(SAMPLES, TOKENS // width, HIDDEN, requires_grad=True)
    kept = kept_bytes(build_layer(SHAPES[shape], kind, width=width), given)
    assert kept == pytest.approx(SAMPLES * layer.activation_bytes / width, rel=0.03)


@pytest.mark.parametrize("kind", ["embedding", "block", "head"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_layer_has_its_weights(shape: str, kind: str) -> None:
    chain = build_chain(SHAPES[shape], name=shape, sequence_length=TOKENS, dtype=Dtype.FP32)
    layer = next(layer for layer in chain.layers if layer.kind == kind)
    built = build_layer(SHAPES[shape], kind, width=1)
    assert sum(parameter.numel() for parameter in built.parameters()) == layer.parameters


def test_gradients_through_slices_are_those_of_the_same_mathematics() -> None:
    """With every device's tokens alike, a gathered product is the plain one on repeated tokens."""
    torch.manual_seed(0)
    block = build_layer(architecture(gated=True), "block", width=2).double()
    given = torch.randn(1, 8, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = [p for p in block.parameters() if p.ndim == 2]
    block(given).square().sum().backward()
    for weight in weights:
        assert weight.grad is not None
        found, at = weight.grad[0, 0].item(), weight.detach()
        at[0, 0] += (step := 1e-6)
        above = block(given).square().sum().item()
        at[0, 0] -= 2 * step
        below = block(given).square().sum().item()
        at[0, 0] += step
        assert found == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-6)


def norm_of(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x: Tensor) -> Tensor:
    """Pairs (i, i + half) of a head as complex numbers, turned by token times 10000^(-2 i /
    size)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 1e4 ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    numbers = (
        torch.complex(x[..., :half], x[..., half:])
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat((numbers.real, numbers.imag), -1)


def test_a_block_with_turned_and_normed_heads_and_norms_after_is_its_mathematics() -> None:
    """Written out: queries and keys normed per head and turned, shared keys, a norm after every
    sum."""
    torch.manual_seed(0)
    attention = Attention(heads=4, kv_heads=2, head_dim=8, qk_norm="head")
    plain = Block(
        attention=attention, feed_forward=FeedForward(inner=48), norm=NormKind.LAYER, pre_norm=False
    )
    whole = architecture()
    whole = replace(whole, blocks=(plain,), embedding=replace(whole.embedding, position_rows=0))  # type: ignore[type-var]
    block: Any = build_layer(whole, "block", width=1).double()
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    both = block.attention.query_key(x).unflatten(-1, (6, 8))
    q, k = (turned(norm_of(part, torch.finfo(torch.float64).eps)) for part in both.split((4, 2), 2))
    v = block.attention.value(x).unflatten(-1, (2, 8))
    k, v = (part.repeat_interleave(2, 2) for part in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1)
    mixed = block.attention.out(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2))
    middle = nn.functional.layer_norm(x + mixed, (HIDDEN,))
    wanted = nn.functional.layer_norm(middle + block.feed_forward(middle), (HIDDEN,))
    torch.testing.assert_close(block(x), wanted)


def test_a_head_that_transforms_is_its_mathematics() -> None:
    torch.manual_seed(0)
    whole = architecture()
    whole = replace(whole, head=replace(whole.head, transform=NormKind.LAYER))
    head: Any = build_layer(whole, "head", width=1).double()
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    hidden = nn.functional.gelu(
        nn.functional.layer_norm(x, (HIDDEN,)) @ head.transform.weight.T + head.transform.bias
    )
    logits = head.logits(nn.functional.layer_norm(hidden, (HIDDEN,)))
    torch.testing.assert_close(head(x), (logits.logsumexp(-1) - logits[..., 0]).mean().float())


def stack(*, width: int) -> Stack:
    return Stack(
        architecture=architecture(), kind="block", samples=1, tokens=32, width=width, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip


def test_a_stack_is_timed_per_layer() -> None:
    row = measure_stack(stack(width=1), seconds=0.0)
    assert row.layers == 4
    assert row.weight_bytes == 4 * architecture().blocks[0].parameters(HIDDEN)
    assert 0 < row.forward_seconds < 1
    assert row.peak_bytes is None


def test_a_row_can_be_timed_again() -> None:
    forward, backward = stack_seconds(stack(width=2), seconds=0.0)
    assert 0 < forward < 1
    assert 0 < backward < 1
    assert gc.isenabled()


def test_what_cannot_be_built_is_refused_by_name() -> None:
    mixture = Experts(expert=FeedForward(inner=256), count=8, active=2)
    windowed = replace(SHAPES["plain"].blocks[0], feed_forward=mixture, attention=Attention(
        heads=4, kv_heads=4, head_dim=16, window=64))  # fmt: skip
    with pytest.raises(InputError) as caught:
        check_sliceable(
            replace(SHAPES["plain"], blocks=(windowed,)), tokens=TOKENS, width=3, name="odd"
        )
    text = str(caught.value)
    for part in (
        "mixture of experts",
        "64 of 128 tokens",
        "4 heads of keys over 3",
        "128 tokens over 3",
    ):
        assert part in text
    with pytest.raises(
        InputError, match=r"an encoder beside a decoder[\s\S]*learned relative positions"
    ):
        check_sliceable(
            read_preset("t5-base").config.architecture, tokens=512, width=1, name="t5-base"
        )
    with pytest.raises(InputError, match="patches of images, expected a table of tokens"):
        check_sliceable(
            read_preset("vit-base").config.architecture, tokens=197, width=1, name="vit-base"
        )
    check_sliceable(
        read_preset("llama-3-8b").config.architecture, tokens=8192, width=8, name="llama-3-8b"
    )
