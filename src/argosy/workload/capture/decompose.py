"""A few operations written as smaller ones at capture, so that every one that is left splits over samples exactly.

An average over a tensor that is cut into unequal parts is not the average of averages, so averages become a sum and a
division by the whole count:

    (1)  mean(x)                 = sum(x) / count
    (2)  nll_loss(mean)          = nll_loss(sum) / weight that was counted
    (3)  batch_norm in training  = sums of x and of (x - mean)^2 over samples and positions, then pointwise
    (4)  its backward            = two sums over samples and positions, then pointwise

so that a normalisation over the batch is synchronised by nothing more than the sums becoming global. Random masks
(5) become ``argosy.bernoulli``, a function of (seed, place in the program, position of the element) alone: every plan,
on every number of ranks, draws the same mask, and a rank draws only its shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
MEAN, SUM = 1, 2
"""Values of ATen's ``reduction`` argument."""

_mask_count: ContextVar[Iterator[int]] = ContextVar("mask_count")


@torch.library.custom_op("argosy::bernoulli", mutates_args=())
def bernoulli(like: Tensor, keep: float, place: int) -> Tensor:
    """Ones with probability ``keep``, else zeros; replaced by the runtime, which knows seed and shard."""
    raise NotImplementedError("argosy::bernoulli is drawn by the runtime")


@bernoulli.register_fake
def _(like: Tensor, keep: float, place: int) -> Tensor:
    return torch.empty_like(like)


def mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """(1)."""
    total: Tensor = aten.sum.default(x, dtype=dtype)
    return total / x.numel()


def mean_dim(x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """(1)."""
    dims = dim or list(range(x.dim()))
    total: Tensor = aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype)
    return total / math.prod(x.shape[d] for d in dims)


def _nll_forward(op: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int) -> Any:
        """(2)."""
        if reduction != MEAN:
            return NotImplemented
        total, counted = op(x, target, weight, SUM, ignore)
        return total / counted, counted

    return forward


def _nll_backward(op: Callable[..., Any]) -> Callable[..., Any]:
    def backward(
        grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int, counted: Tensor
    ) -> Any:
        """(2)."""
        if reduction != MEAN:
            return NotImplemented
        return op(grad / counted, x, target, weight, SUM, ignore, counted)

    return backward


def mse_loss(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    square = (x - target) * (x - target)
    return mean(square) if reduction == MEAN else square.sum() if reduction == SUM else square


def mse_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    scale = 2.0 / x.numel() if reduction == MEAN else 2.0
    return (x - target) * grad * scale


def _over_samples(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(x: Tensor, like: Tensor) -> Tensor:
    return x.view([1, -1] + [1] * (like.dim() - 2))


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """(3): output, mean, 1/deviation, and the running averages after it."""
    if not training:
        return NotImplemented
    count = x.numel() // x.shape[1]
    center = mean_dim(x, _over_samples(x))
    moved = x - _per_channel(center, x)
    spread = mean_dim(moved * moved, _over_samples(x))
    inverse = torch.rsqrt(spread + eps)
    out = moved * _per_channel(inverse, x)
    if weight is not None:
        out = out * _per_channel(weight, x)
    if bias is not None:
        out = out + _per_channel(bias, x)
    unbiased = spread * (count / max(count - 1, 1))
    new_mean = running_mean * (1 - momentum) + center * momentum
    return out, center, inverse, new_mean, running_var * (1 - momentum) + unbiased * momentum


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    center: Tensor,
    inverse: Tensor,
    training: bool,
    eps: float,
    mask: list[bool],
) -> Any:
    """(4)."""
    if not training:
        return NotImplemented
    count = x.numel() // x.shape[1]
    normal = (x - _per_channel(center, x)) * _per_channel(inverse, x)
    sum_grad = grad.sum(_over_samples(x))
    sum_normal = (grad * normal).sum(_over_samples(x))
    scale = inverse if weight is None else inverse * weight
    inner = grad - _per_channel(sum_grad / count, x) - normal * _per_channel(sum_normal / count, x)
    return inner * _per_channel(scale, x), sum_normal if mask[1] else None, sum_grad if mask[2] else None


def _next_place() -> int:
    return next(_mask_count.get())


def bernoulli_p(like: Tensor, keep: float = 0.5, *, generator: object = None) -> Tensor:
    """(5)."""
    return torch.ops.argosy.bernoulli(like, keep, _next_place())  # type: ignore[no-any-return]


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """(5)."""
    if train is False or p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = torch.ops.argosy.bernoulli(x, 1 - p, _next_place())
    return x * mask / (1 - p), mask.to(torch.bool)


TABLE: dict[Any, Callable[..., Any]] = {
    aten.mean.default: mean,
    aten.mean.dim: mean_dim,
    aten.nll_loss_forward.default: _nll_forward(aten.nll_loss_forward.default),
    aten.nll_loss_backward.default: _nll_backward(aten.nll_loss_backward.default),
    aten.nll_loss2d_forward.default: _nll_forward(aten.nll_loss2d_forward.default),
    aten.nll_loss2d_backward.default: _nll_backward(aten.nll_loss2d_backward.default),
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.bernoulli.p: bernoulli_p,
    aten.native_dropout.default: native_dropout,
}


@contextmanager
def numbered_masks() -> Iterator[None]:
    """Inside, random masks are numbered from 0 in the order in which the program draws them."""
    token = _mask_count.set(iter(range(1 << 30)))
    try:
        yield
    finally:
        _mask_count.reset(token)
