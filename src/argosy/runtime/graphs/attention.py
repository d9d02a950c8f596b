"""Compute attention as a capture on CPU writes it, on devices that lack that kernel, with the same
arguments and results.

    (1)  s = scale q k^T + mask,  l = log sum exp s,  p = exp(s - l),  o = p v
    (2)  dv = p^T do,  ds = p (do v^T - sum(do o)),  dq = scale ds k,  dk = scale ds^T q

A stage runs the forward alone and lets torch differentiate it, so torch chooses its kernel
(``attend``). A ring of devices needs l, and the gradients of each pair of parts: it calls torch's
kernels itself (``forward``, ``backward``), and computes (1) and (2) as written only with masks, in
double precision, and for heads that no kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

aten = torch.ops.aten


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    scores = q @ k.transpose(-2, -1) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Return output and l of (1), for torch to differentiate; off a CPU l is empty, because no
    forward reads it."""
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, dropout, causal, attn_mask=attn_mask, scale=scale
        )
    return fused(q, k, v, causal, attn_mask, scale), q.new_empty(0)


def fused(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return output of (1) by the best kernel that torch has for a device; several heads of queries
    may share one of keys and values."""
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


class Kernel(StrEnum):
    """The kernel that computes (1) and (2)."""

    CPU = "cpu"
    FLASH = "flash"
    EFFICIENT = "efficient"
    WRITTEN_OUT = "written out"


# Of torch's kernels on a GPU, flash takes heads of at most this many elements, and both kernels
# need a multiple of the second number.
_FLASH_ELEMENTS, _ALIGNED_ELEMENTS = 256, 8
# The efficient kernel stores l for a multiple of this many queries.
_EFFICIENT_ROWS = 32


def kernel_of(q: Tensor, mask: Tensor | None) -> Kernel:
    """Return the fastest kernel that returns l and takes these operands; only the last one holds
    scores of all pairs of tokens."""
    if mask is not None or not (q.is_cpu or q.is_cuda):
        return Kernel.WRITTEN_OUT
    if q.is_cpu:
        return Kernel.CPU
    if q.shape[-1] % _ALIGNED_ELEMENTS or q.dtype is torch.float64:
        return Kernel.WRITTEN_OUT
    if q.dtype is torch.float32 or q.shape[-1] > _FLASH_ELEMENTS:
        return Kernel.EFFICIENT
    return Kernel.FLASH


def _per_head(q: Tensor, heads: Tensor) -> Tensor:
    """Return keys or values with one head for each head of the queries."""
    count = q.shape[1] // heads.shape[1]
    return heads.repeat_interleave(count, 1) if count > 1 else heads


def _shared(gradient: Tensor, count: int) -> Tensor:
    """Return the gradient of ``count`` heads, each of which was read by as many heads of
    queries."""
    if gradient.shape[1] == count:
        return gradient
    return gradient.unflatten(1, (count, -1)).sum(2)


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return output and l of (1); several heads of queries may share one of keys and values."""
    k, v = _per_head(q, k), _per_head(q, v)
    match kernel_of(q, mask):
        case Kernel.CPU:
            result = aten._scaled_dot_product_flash_attention_for_cpu.default(
                q, k, v, 0.0, causal, scale=scale
            )
        case Kernel.FLASH:
            result = aten._scaled_dot_product_flash_attention.default(
                q, k, v, 0.0, causal, scale=scale
            )
        case Kernel.EFFICIENT:
            result = aten._scaled_dot_product_efficient_attention.default(
                q, k, v, None, True, 0.0, causal, scale=scale
            )
        case Kernel.WRITTEN_OUT:
            return math_forward(q, k, v, causal, mask, scale)
    out, total = result[:2]
    return out, total[..., : q.shape[2]]


def math_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return output and l of (1) on any device."""
    scores = _scores(q, k, causal, mask, _scale(q, scale))
    total = torch.logsumexp(scores if scores.dtype is torch.float64 else scores.float(), -1)
    return _shares(scores, total).to(v.dtype) @ v, total


def _shares(scores: Tensor, total: Tensor) -> Tensor:
    """Return p of (1); zeros in rows that are fully masked, where l is minus infinity."""
    return torch.exp(scores - total.masked_fill(total == float("-inf"), 0.0).unsqueeze(-1))


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of (2) for l and an output that may also count other keys."""
    key_heads = k.shape[1]
    operands = (grad, q, _per_head(q, k), _per_head(q, v))
    match kernel_of(q, mask):
        case Kernel.CPU:
            result = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
                *operands, out, total, 0.0, causal, scale=scale
            )
        case Kernel.FLASH:
            seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # unused without dropout
            lengths = (None, None, q.shape[2], k.shape[2])
            result = aten._scaled_dot_product_flash_attention_backward.default(
                *operands, out, total, *lengths, 0.0, causal, seed, seed[:0], scale=scale
            )
        case Kernel.EFFICIENT:
            seed = torch.empty((), dtype=torch.int64, device=q.device)  # unused without dropout
            missing = -q.shape[2] % _EFFICIENT_ROWS
            total = F.pad(total, (0, missing), value=float("inf"))
            wanted = [True, True, True, False]
            result = aten._scaled_dot_product_efficient_attention_backward.default(
                *operands, None, out, total, seed, seed, 0.0, wanted, causal, scale=scale
            )
        case Kernel.WRITTEN_OUT:
            result = math_backward(*operands, out, total, causal, mask, scale)
    of_queries, of_keys, of_values = result[:3]
    return of_queries, _shared(of_keys, key_heads), _shared(of_values, key_heads)


def math_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of (2) on any device."""
    factor = _scale(q, scale)
    share = _shares(_scores(q, k, causal, mask, factor), total).to(q.dtype)
    inner = share * (grad @ v.transpose(-2, -1) - (grad * out).sum(-1, keepdim=True))
    return (
        factor * (inner @ k),
        factor * (inner.transpose(-2, -1) @ q),
        share.transpose(-2, -1) @ grad,
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attend
}
"""Replacements of CPU kernels, by the name of the captured operation."""
