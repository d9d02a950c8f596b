"""Compute attention as a capture on CPU writes it, on devices that lack that kernel, with the same
arguments and results.

    (1)  s = scale q k^T + mask,  l = log sum exp s,  p = exp(s - l),  o = p v
    (2)  dv = p^T do,  ds = p (do v^T - sum(do o)),  dq = scale ds k,  dk = scale ds^T q

A stage runs the forward alone and lets torch differentiate it, so torch chooses its kernel
(``attend``). A ring of devices needs l, and the gradients of each pair of parts: it computes (1)
and (2) as written.
"""

from __future__ import annotations

from collections.abc import Callable
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


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Return output and l of (1); use the CPU's own kernel on a CPU."""
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, dropout, causal, attn_mask=attn_mask, scale=scale
        )
    return math_forward(q, k, v, causal, attn_mask, scale)


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
        return forward(q, k, v, dropout, causal, attn_mask=attn_mask, scale=scale)
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
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Return the gradients of (2); use the CPU's own kernel on a CPU."""
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, q, k, v, out, total, dropout, causal, attn_mask=attn_mask, scale=scale
        )
    return math_backward(grad, q, k, v, out, total, causal, attn_mask, scale)


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
