"""A transformer's layers as they are timed have the weights and keep the bytes that the cost model counts."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.runtime.slices import build_layer, check_sliceable
from argosy.runtime.stack import Stack, measure_stack, stack_seconds
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
    layer = build_chain(SHAPES[shape], name=shape, sequence_length=TOKENS, dtype=Dtype.FP32).layers[index]
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
        check_sliceable(replace(SHAPES["plain"], blocks=(windowed,)), tokens=TOKENS, width=3, name="odd")
    text = str(caught.value)
    for part in ("mixture of experts", "64 of 128 tokens", "4 heads of keys over 3", "128 tokens over 3"):
        assert part in text
    check_sliceable(read_preset("llama-3-8b").config.architecture, tokens=8192, width=8, name="llama-3-8b")
