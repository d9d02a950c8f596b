"""Rewrite a few operations as smaller ones at capture, so that each splits exactly over samples.

The average over a tensor that is cut into unequal parts is not the average of averages, so averages
become a sum and a division by the whole count:

    (1)  mean(x)                 = sum(x) / count
    (2)  nll_loss(mean)          = nll_loss(sum) / weight that was counted, which depends on the
         targets alone
    (3)  batch_norm in training  = sums of x and of (x - mean)^2 over samples and positions, then
         pointwise
    (4)  its backward            = two sums over samples and positions, then pointwise

So a normalisation over the batch is synchronised as soon as its sums are global. Other rewritings:

    (5)  random masks            = ``argosy.bernoulli``
    (6)  other random numbers    = functions of ``argosy.uniform``
    (7)  other losses            = the loss of every element, then (1) or a sum
    (8)  copies and writes into parts of complex tensors, which torch cannot differentiate, =
         operations that it can
    (9)  views by strides        = elements by their places (``strides``)

``argosy.bernoulli`` and ``argosy.uniform`` depend only on the seed, the place in the program and
the position of the element. So every plan, on any number of ranks, draws the same numbers, and a
rank draws only its shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from argosy.workload.capture.strides import as_strided, as_strided_scatter

aten = torch.ops.aten
# Values of ATen's reduction argument.
NONE, MEAN, SUM = 0, 1, 2

# Numbers of the random masks of the capture that runs, in order.
_mask_count: ContextVar[Iterator[int]] = ContextVar("mask_count")


@torch.library.custom_op("argosy::bernoulli", mutates_args=())
def bernoulli(like: Tensor, keep: float, place: int) -> Tensor:
    """Return ones with probability ``keep``, else zeros; the runtime, which has seed and shard,
    replaces this operation."""
    raise NotImplementedError("argosy::bernoulli is drawn by the runtime")


@bernoulli.register_fake
def _(like: Tensor, keep: float, place: int) -> Tensor:
    return torch.empty_like(like)


@torch.library.custom_op("argosy::uniform", mutates_args=())
def uniform(like: Tensor, place: int) -> Tensor:
    """Return random numbers between 0 and 1, both excluded; the runtime, which has seed and shard,
    replaces this operation."""
    raise NotImplementedError("argosy::uniform is drawn by the runtime")


@uniform.register_fake
def _(like: Tensor, place: int) -> Tensor:
    return torch.empty_like(like)


def mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the mean of a tensor as a sum and a division (1)."""
    total: Tensor = aten.sum.default(x, dtype=dtype)
    return total / x.numel()


def mean_dim(
    x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the mean over dims as a sum and a division (1)."""
    dims = dim or list(range(x.dim()))
    total: Tensor = aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype)
    return total / math.prod(x.shape[d] for d in dims)


def _nll_forward(op: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
    ) -> Any:
        """Compute a mean loss as a sum over the counted weight (2)."""
        if reduction != MEAN:
            return NotImplemented
        total, _ = op(x, target, weight, SUM, ignore)
        counted = _counted(x, target, weight, ignore)
        return total / counted, counted

    return forward


def _counted(x: Tensor, target: Tensor, weight: Tensor | None, ignore: int) -> Tensor:
    """Return the number of targets that count, or the sum of their weights."""
    counts = (target != ignore).to(x.dtype)
    if weight is not None:
        counts = counts * weight[target.clamp(0, weight.shape[0] - 1)]
    return counts.sum()


def _nll_backward(op: Callable[..., Any]) -> Callable[..., Any]:
    def backward(
        grad: Tensor,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignore: int,
        counted: Tensor,
    ) -> Any:
        """Compute the gradient of a mean loss by that of a sum (2)."""
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


def _elementwise(op: Any, place: int) -> Callable[..., Any]:
    def loss(*given: Any) -> Any:
        """Compute a loss from the losses of all elements (7)."""
        defaults = [argument.default_value for argument in op._schema.arguments]
        arguments = (*given, *defaults[len(given) :])
        reduction = arguments[place]
        if reduction == NONE:
            return NotImplemented
        losses = op(*arguments[:place], NONE, *arguments[place + 1 :])
        return mean(losses) if reduction == MEAN else losses.sum()

    return loss


def _elementwise_backward(op: Callable[..., Any], place: int) -> Callable[..., Any]:
    def backward(grad: Tensor, x: Tensor, *arguments: Any) -> Any:
        """Compute the gradient of a loss from those of all elements (7)."""
        reduction = arguments[place]
        if reduction == NONE:
            return NotImplemented
        gradients = (grad / x.numel() if reduction == MEAN else grad).expand_as(x)
        return op(gradients, x, *arguments[:place], NONE, *arguments[place + 1 :])

    return backward


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return ``source`` with the shape and dtype of ``target`` (8)."""
    return source.to(target.dtype).expand(target.shape)


def _scatter(op: Callable[..., Any]) -> Callable[..., Any]:
    def scatter(x: Tensor, source: Tensor, dim: int = 0, *place: Any) -> Any:
        """Write into a part of a complex tensor as two real ones (8)."""
        if not x.is_complex():
            return NotImplemented
        parts = op(torch.view_as_real(x), torch.view_as_real(source), dim % x.dim(), *place)
        return torch.view_as_complex(parts)

    return scatter


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
    """Return output, mean, 1/deviation, and the running averages after a batch norm in training
    (3)."""
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
    """Return the gradients of input, weight and bias of a batch norm in training (4)."""
    if not training:
        return NotImplemented
    count = x.numel() // x.shape[1]
    normal = (x - _per_channel(center, x)) * _per_channel(inverse, x)
    sum_grad = grad.sum(_over_samples(x))
    sum_normal = (grad * normal).sum(_over_samples(x))
    scale = inverse if weight is None else inverse * weight
    inner = grad - _per_channel(sum_grad / count, x) - normal * _per_channel(sum_normal / count, x)
    return (
        inner * _per_channel(scale, x),
        sum_normal if mask[1] else None,
        sum_grad if mask[2] else None,
    )


def _next_place() -> int:
    return next(_mask_count.get())


def bernoulli_p(like: Tensor, keep: float = 0.5, *, generator: None = None) -> Tensor:
    """Draw a random mask (5)."""
    return torch.ops.argosy.bernoulli(like, keep, _next_place())


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Apply dropout with a random mask (5), by the operations that torch uses on a CPU."""
    if train is False or p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = torch.ops.argosy.bernoulli(torch.empty_like(x), 1 - p, _next_place())
    return x * aten.div.Scalar(mask, 1 - p), mask.to(torch.bool)


def _uniform(like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.complex(_uniform(like.real), _uniform(like.real))
    return torch.ops.argosy.uniform(like, _next_place())


def _normal(like: Tensor) -> Tensor:
    """Return normal numbers, by the inverse of the normal distribution at uniform ones; complex
    ones have a variance of 1 too."""
    if like.is_complex():
        return torch.complex(_normal(like.real), _normal(like.real)) * math.sqrt(0.5)
    return torch.erfinv(_uniform(like) * 2 - 1) * math.sqrt(2)


def _made(size: list[int], options: dict[str, Any]) -> Tensor:
    """Return a tensor that stands for a shape."""
    return torch.empty(
        size, **{key: options[key] for key in ("dtype", "device") if options.get(key) is not None}
    )


def rand(size: list[int], **options: Any) -> Tensor:
    """Draw uniform numbers (6)."""
    return _uniform(_made(size, options))


def randn(size: list[int], **options: Any) -> Tensor:
    """Draw normal numbers (6)."""
    return _normal(_made(size, options))


def rand_like(like: Tensor, **options: Any) -> Tensor:
    """Draw uniform numbers in the shape of a tensor (6)."""
    return _uniform(like if options.get("dtype") is None else like.to(options["dtype"]))


def randn_like(like: Tensor, **options: Any) -> Tensor:
    """Draw normal numbers in the shape of a tensor (6)."""
    return _normal(like if options.get("dtype") is None else like.to(options["dtype"]))


def _whole_numbers(like: Tensor, low: int, high: int, dtype: torch.dtype | None) -> Tensor:
    drawn = _uniform(like) * (high - low) + low
    return drawn.floor().to(torch.int64 if dtype is None else dtype)


def randint_low(
    low: int, high: int, size: list[int], *, dtype: torch.dtype | None = None, **options: Any
) -> Tensor:
    """Draw whole numbers from ``low`` to below ``high`` (6)."""
    return _whole_numbers(_made(size, {**options, "dtype": torch.float64}), low, high, dtype)


def randint(high: int, size: list[int], **options: Any) -> Tensor:
    """Draw whole numbers from 0 to below ``high`` (6)."""
    return randint_low(0, high, size, **options)


def randint_like_low(
    like: Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    """Draw whole numbers from ``low`` to below ``high`` in the shape of a tensor (6)."""
    return _whole_numbers(like.to(torch.float64), low, high, like.dtype if dtype is None else dtype)


def randint_like(like: Tensor, high: int, **options: Any) -> Tensor:
    """Draw whole numbers from 0 to below ``high`` in the shape of a tensor (6)."""
    return randint_like_low(like, 0, high, **options)


def randperm(count: int, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Draw a permutation (6)."""
    order: Tensor = _uniform(_made([count], {**options, "dtype": torch.float64})).argsort()
    return order.to(torch.int64 if dtype is None else dtype)


def normal_functional(
    like: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: None = None
) -> Tensor:
    """Draw normal numbers with a mean and a deviation in the shape of a tensor (6)."""
    return _normal(like) * std + mean


def normal_tensors(mean: Any, std: Any = 1.0, *, generator: None = None) -> Tensor:
    """Draw normal numbers with means and deviations per element (6)."""
    like = mean + std
    drawn: Tensor = _normal(like) * std + mean
    return drawn


def uniform_between(
    like: Tensor, low: float = 0.0, high: float = 1.0, *, generator: None = None
) -> Tensor:
    """Draw uniform numbers between two bounds in the shape of a tensor (6)."""
    return _uniform(like) * (high - low) + low


def exponential(like: Tensor, rate: float = 1.0, *, generator: None = None) -> Tensor:
    """Draw exponential numbers with a rate (6)."""
    return -torch.log(_uniform(like)) / rate


def bernoulli_of(chance: Tensor, *, generator: None = None) -> Tensor:
    """Draw ones with the chances in a tensor, else zeros (6)."""
    return (_uniform(chance) < chance).to(chance.dtype)


def bernoulli_tensor(like: Tensor, chance: Tensor, *, generator: None = None) -> Tensor:
    """Draw ones with the chances in a tensor, in the shape of another (6)."""
    return (_uniform(like if like.is_floating_point() else like.to(chance.dtype)) < chance).to(
        like.dtype
    )


def multinomial(
    chances: Tensor, count: int, replacement: bool = False, *, generator: None = None
) -> Tensor:
    """Draw indices with given chances, as the smallest of exponential numbers with these rates
    (6)."""
    if replacement and count > 1:
        chances = chances.unsqueeze(-2).expand(*chances.shape[:-1], count, chances.shape[-1])
        return (chances / exponential(chances)).argmax(-1)
    chosen: Tensor = (chances / exponential(chances)).topk(count, -1).indices
    return chosen


# Losses that are a reduction of their elements, and the places of their reductions.
_LOSSES = {
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
    aten.soft_margin_loss.default: 2,
}
# Their backwards, and the places of the reductions behind the gradient and the input.
_LOSS_GRADIENTS = {
    aten.smooth_l1_loss_backward.default: 1,
    aten.huber_loss_backward.default: 1,
    aten.binary_cross_entropy_backward.default: 2,
    aten.soft_margin_loss_backward.default: 1,
}
# Decompositions by operation, for ``make_fx``.
TABLE: dict[Any, Callable[..., Any]] = {
    aten.mean.default: mean,
    aten.mean.dim: mean_dim,
    **{
        op: _nll_forward(op)
        for op in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
    },
    **{
        op: _nll_backward(op)
        for op in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
    },
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
    **{op: _elementwise(op, place) for op, place in _LOSSES.items()},
    **{op: _elementwise_backward(op, place) for op, place in _LOSS_GRADIENTS.items()},
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.copy.default: copy,
    aten.select_scatter.default: _scatter(aten.select_scatter.default),
    aten.slice_scatter.default: _scatter(aten.slice_scatter.default),
    aten.as_strided.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.bernoulli.p: bernoulli_p,
    aten.native_dropout.default: native_dropout,
    aten.rand.default: rand,
    aten.randn.default: randn,
    aten.rand_like.default: rand_like,
    aten.randn_like.default: randn_like,
    aten.randint.default: randint,
    aten.randint.low: randint_low,
    aten.randint_like.default: randint_like,
    aten.randint_like.low_dtype: randint_like_low,
    aten.randperm.default: randperm,
    aten.normal_functional.default: normal_functional,
    aten.normal.Tensor_Tensor: normal_tensors,
    aten.normal.Tensor_float: normal_tensors,
    aten.normal.float_Tensor: normal_tensors,
    aten.uniform.default: uniform_between,
    aten.exponential.default: exponential,
    aten.bernoulli.default: bernoulli_of,
    aten.bernoulli.Tensor: bernoulli_tensor,
    aten.multinomial.default: multinomial,
}


@contextmanager
def numbered_masks() -> Iterator[None]:
    """Number random masks inside the block from 0 in the order in which the program draws them."""
    token = _mask_count.set(iter(range(1 << 30)))
    try:
        yield
    finally:
        _mask_count.reset(token)
