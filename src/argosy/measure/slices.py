"""Build a transformer's layers from its shape, as one device of a tensor-parallel group runs them,
so that they can be timed.

The device has 1 / w of the heads, of the inner width and of the table's rows, and 1 / w of the
tokens between them:

    (1)  the input of a projection is gathered from all devices, and freed afterwards: its backward
         gathers it again
    (2)  the output of a projection is a partial sum, of which the device keeps its own tokens

Neither sends anything: (1) repeats the device's own tokens and (2) takes the first, because the
network model predicts the times of links. Weights are random, and so are the results; the
computation, the kept memory and the copies are as in training. A gated feed-forward keeps its two
projections and their product, and no activation function's result.

Experts, cross attention, patches of images, windows shorter than the sequence, tables of relative
positions and norms over all heads are not built, and refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from argosy.errors import Problem, raise_any
from argosy.workload.architecture import (
    Architecture,
    Attention,
    Block,
    FeedForward,
    Head,
    NormKind,
    PatchEmbedding,
    TokenEmbedding,
)

# The probability of dropout, a usual value.
_DROPOUT = 0.1


def check_sliceable(architecture: Architecture, *, tokens: int, width: int, name: str) -> None:
    """Raise an ``InputError`` with everything about a model that cannot be built, or not at this
    width."""
    problems = [
        Problem(name, actual, expected)
        for actual, expected in dict.fromkeys(_problems(architecture, tokens, width))
    ]
    raise_any(problems)


def _problems(architecture: Architecture, tokens: int, width: int) -> Iterator[tuple[str, str]]:
    if architecture.encoder:
        yield "an encoder beside a decoder", "a model with blocks of one kind"
    if isinstance(architecture.embedding, PatchEmbedding):
        yield "patches of images", "a table of tokens"
    for block in architecture.blocks:
        attention, part = block.attention, block.feed_forward
        if not isinstance(part, FeedForward):
            yield "a mixture of experts", "one feed-forward for all tokens"
        elif part.inner % width:
            yield f"{part.inner} inner columns over {width} devices", "a width that divides them"
        if attention.window is not None and attention.window < tokens:
            yield f"attention to {attention.window} of {tokens} tokens", "attention to all of them"
        if attention.latent is not None:
            yield "latent attention", "queries, keys and values that are not compressed"
        if attention.relative_buckets or attention.qk_norm == "all":
            yield "learned relative positions, or a norm over all heads", "neither"
        if attention.kv_heads % width:
            yield (
                f"{attention.kv_heads} heads of keys over {width} devices",
                "a width that divides them",
            )
    if tokens % width:
        yield f"{tokens} tokens over {width} devices", "a width that divides them"


def build_layer(architecture: Architecture, kind: str, *, width: int) -> nn.Module:
    """Return the ``embedding``, a ``block`` or the ``head`` of an architecture that passed
    ``check_sliceable``."""
    hidden, block = architecture.hidden, architecture.blocks[0]
    embedding, head = architecture.embedding, architecture.head
    match kind:
        case "embedding":
            assert isinstance(embedding, TokenEmbedding)
            return EmbeddingSlice(embedding, hidden, width)
        case "block":
            rotary = isinstance(embedding, TokenEmbedding) and not embedding.position_rows
            causal = head.transform is None and not head.first_token_only
            return BlockSlice(block, hidden, width, rotary=rotary, causal=causal)
    return HeadSlice(head, hidden, width)


class _Gathered(torch.autograd.Function):
    """A product of gathered tokens (1) with a weight that gathers again in its backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.width = width
        return part.repeat(1, width, 1) @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        part, weight = ctx.saved_tensors
        whole = part.repeat(1, ctx.width, 1)
        of_weight = gradient.flatten(0, 1).T @ whole.flatten(0, 1)
        return _own_tokens(gradient @ weight, ctx.width), of_weight, None


def _own_tokens(whole: Tensor, width: int) -> Tensor:
    """Return the device's own tokens of a partial sum (2)."""
    return whole if width == 1 else whole[:, : whole.shape[1] // width].contiguous()


class _GatedUnit(torch.autograd.Function):
    """SiLU of one half of a tensor times the other half, which keeps only the tensor."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        open_gate = gate * sigmoid
        of_gate = gradient * up * (sigmoid + open_gate * (1 - sigmoid))
        return torch.cat((of_gate, gradient * open_gate), -1)


class _Columns(nn.Module):
    """A projection whose columns are split: it reads all tokens and returns its columns of all
    tokens."""

    def __init__(self, read: int, written: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(read, written // width, bias=bias)

    def forward(self, part: Tensor) -> Tensor:
        if self.width == 1:
            return self.linear(part)
        product: Tensor = _Gathered.apply(part, self.linear.weight, self.width)
        return product if self.linear.bias is None else product + self.linear.bias


class _Rows(nn.Module):
    """A projection whose rows are split: it reads its rows and returns the device's own tokens."""

    def __init__(self, read: int, written: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(read // width, written, bias=bias)

    def forward(self, rows: Tensor) -> Tensor:
        return _own_tokens(self.linear(rows), self.width)


def _norm(kind: NormKind, hidden: int) -> nn.Module:
    return (
        nn.RMSNorm(hidden)
        if kind is NormKind.RMS
        else nn.LayerNorm(hidden, elementwise_affine=kind.parameters(1) > 0)
    )


class EmbeddingSlice(nn.Module):
    """A part of the token table, with the layers around it, that maps ids to hidden states."""

    def __init__(self, embedding: TokenEmbedding, hidden: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.table = nn.Embedding(embedding.vocabulary // width, embedding.width)
        self.positions = (
            nn.Embedding(embedding.position_rows, hidden) if embedding.position_rows else None
        )
        self.project = (
            nn.Linear(embedding.width, hidden, bias=False) if embedding.width != hidden else None
        )
        self.norm = None if embedding.norm is None else _norm(embedding.norm, hidden)
        self.dropout = _DROPOUT if embedding.dropout else 0.0

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = _own_tokens(self.table(ids.remainder(self.table.num_embeddings)), self.width)
        x = x if self.project is None else self.project(x)
        if self.positions is not None:
            x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        x = x if self.norm is None else self.norm(x)
        return F.dropout(x, self.dropout) if self.dropout else x


class AttentionSlice(nn.Module):
    """An attention that has some of the heads."""

    def __init__(
        self, shape: Attention, hidden: int, width: int, *, rotary: bool, causal: bool
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.heads // width,
            shape.kv_heads // width,
            shape.head_dim,
        )
        self.query_key = _Columns(
            hidden, shape.query_width + shape.key_width, width, bias=shape.qkv_bias
        )
        self.value = _Columns(hidden, shape.key_width, width, bias=shape.qkv_bias)
        self.out = _Rows(shape.query_width, hidden, width, bias=shape.output_bias)
        self.norms = (
            nn.ModuleList(nn.RMSNorm(shape.head_dim) for _ in range(2))
            if shape.qk_norm == "head"
            else None
        )
        self.rotary, self.causal = rotary, causal
        self.dropout = _DROPOUT if shape.dropout else 0.0

    def forward(self, x: Tensor) -> Tensor:
        both = self.query_key(x).unflatten(-1, (-1, self.head_dim))
        q, k = both.split((self.heads, self.kv_heads), dim=2)
        v = self.value(x).unflatten(-1, (-1, self.head_dim))
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        if self.rotary:
            turn = _turns(q.shape[1], self.head_dim, q.device, q.dtype)
            q, k = _turned(q, turn), _turned(k, turn)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=self.dropout,
            is_causal=self.causal,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


@lru_cache(maxsize=1)
def _turns(
    tokens: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotary angles, per token and element of a head."""
    rates = 1e4 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(tokens, device=device), rates).repeat(1, 2)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    front, back = x.chunk(2, -1)
    return x * turn[0] + torch.cat((-back, front), -1) * turn[1]


class FeedForwardSlice(nn.Module):
    """A feed-forward that has some of the inner columns."""

    def __init__(self, shape: FeedForward, hidden: int, width: int) -> None:
        super().__init__()
        self.gated = shape.gated
        self.up = _Columns(hidden, (1 + shape.gated) * shape.inner, width, bias=shape.bias)
        self.down = _Rows(shape.inner, hidden, width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        inner = _GatedUnit.apply(inner) if self.gated else F.gelu(inner, approximate="tanh")
        return self.down(inner)


class BlockSlice(nn.Module):
    """A block that runs attention and feed-forward, with norms before or after, one after the other
    or in parallel."""

    def __init__(
        self, block: Block, hidden: int, width: int, *, rotary: bool, causal: bool
    ) -> None:
        super().__init__()
        assert isinstance(block.feed_forward, FeedForward)
        self.attention = AttentionSlice(
            block.attention, hidden, width, rotary=rotary, causal=causal
        )
        self.feed_forward = FeedForwardSlice(block.feed_forward, hidden, width)
        self.norms = nn.ModuleList(_norm(block.norm, hidden) for _ in range(block.num_norms))
        self.pre_norm, self.parallel = block.pre_norm, block.parallel
        self.dropout = _DROPOUT if block.dropout else 0.0

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.norms[0], self.norms[-1]
        if self.parallel:
            return (
                x
                + self._dropped(self.attention(first(x)))
                + self._dropped(self.feed_forward(last(x)))
            )
        if self.pre_norm:
            x = x + self._dropped(self.attention(first(x)))
            return x + self._dropped(self.feed_forward(last(x)))
        x = first(x + self._dropped(self.attention(x)))
        return last(x + self._dropped(self.feed_forward(x)))


class HeadSlice(nn.Module):
    """A head that computes some of the logits of every token, and the loss over them."""

    def __init__(self, head: Head, hidden: int, width: int) -> None:
        super().__init__()
        self.norm = None if head.norm is None else _norm(head.norm, hidden)
        self.transform = None if head.transform is None else nn.Linear(hidden, hidden)
        self.after = None if head.transform is None else _norm(head.transform, hidden)
        self.project = nn.Linear(hidden, head.width, bias=False) if head.width != hidden else None
        self.logits = _Columns(head.width, head.outputs, width, bias=head.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        if self.transform is not None and self.after is not None:
            x = self.after(F.gelu(self.transform(x)))
        x = x if self.project is None else self.project(x)
        logits = self.logits(x).flatten(0, 1)
        labels = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        return F.cross_entropy(logits.float(), labels)
