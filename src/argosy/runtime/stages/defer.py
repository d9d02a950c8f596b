"""Split a backward: compute what the previous stage needs first and weight gradients later.

For y = x w^T the backward computes dx = dy w, which the previous stage waits for, and dw = dy^T x,
which is not needed before the update. While a ``Deferral`` is entered, products with a weight
(linear, addmm, convolution) store (x, dy) instead of computing dw; ``settle`` computes it. Weights
in other operations (norms, embeddings, biases) are small and get their gradients at once: the sum
is the same, no matter which gradients are deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn import grad
from torch.overrides import TorchFunctionMode

Debt = Callable[[], None]
"""A function that computes one weight gradient and adds it to ``grad``."""

_CONVOLUTIONS: dict[Any, tuple[Any, Any]] = {
    F.conv1d: (grad.conv1d_input, grad.conv1d_weight),
    F.conv2d: (grad.conv2d_input, grad.conv2d_weight),
    F.conv3d: (grad.conv3d_input, grad.conv3d_weight),
}
"""The functions that compute the gradients of the input and of the weight, by convolution."""


class Deferral(TorchFunctionMode):
    """A mode that replaces products with weights by ones whose weight gradient is deferred to
    ``debts``."""

    def __init__(self) -> None:
        super().__init__()
        self.debts: list[Debt] = []

    def take(self) -> list[Debt]:
        """Return what has been deferred since the last call."""
        debts, self.debts = self.debts, []
        return debts

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            if function is F.linear and _is_weight(_argument(args, kwargs, 1, "weight")):
                return self._linear(*args, **kwargs)
            if function is torch.addmm and len(args) == 3 and not kwargs and _is_weight(args[2]):
                return self._linear(args[1], args[2], args[0], transposed=True)
            if function in _CONVOLUTIONS and _is_weight(_argument(args, kwargs, 1, "weight")):
                return self._convolution(function, *args, **kwargs)
        return function(*args, **kwargs)

    def _linear(
        self,
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        transposed: bool = False,
    ) -> Tensor:
        dtype = (
            torch.get_autocast_dtype(input.device.type)
            if torch.is_autocast_enabled(input.device.type)
            else None
        )
        result: Tensor = _Linear.apply(input, weight, self, transposed, dtype)
        return result if bias is None else result + bias.to(result.dtype)

    def _convolution(
        self,
        function: Any,
        input: Tensor,  # noqa: A002
        weight: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        settings = (
            dict(zip(("bias", "stride", "padding", "dilation", "groups"), args, strict=False))
            | kwargs
        )
        if isinstance(settings.get("padding"), str) or torch.is_autocast_enabled(input.device.type):
            return function(input, weight, **settings)
        bias: Tensor | None = settings.pop("bias", None)
        result: Tensor = _Convolution.apply(input, weight, self, function, settings)
        if bias is None:
            return result
        return result + bias.to(result.dtype).reshape(-1, *([1] * (weight.dim() - 2)))


def settle(debts: list[Debt]) -> None:
    """Compute deferred gradients and clear the list."""
    with torch.no_grad():
        for debt in debts:
            debt()
    debts.clear()


def _argument(args: Any, kwargs: Any, index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs.get(name)


def _is_weight(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad and value.is_leaf


def _add(weight: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(weight.dtype)
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        deferral: Deferral,
        transposed: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.deferral, ctx.transposed, ctx.dtype, ctx.input_dtype = (
            deferral,
            transposed,
            dtype,
            x.dtype,
        )
        ctx.weight = weight
        x, matrix = (x, weight) if dtype is None else (x.to(dtype), weight.to(dtype))
        ctx.save_for_backward(x)
        return x @ (matrix if transposed else matrix.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        matrix = weight if ctx.dtype is None else weight.to(ctx.dtype)
        left, right = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        ctx.deferral.debts.append(
            lambda: _add(weight, right.t() @ left if ctx.transposed else left.t() @ right)
        )
        needed = ctx.needs_input_grad[0]
        back = gradient @ (matrix.t() if ctx.transposed else matrix) if needed else None
        return None if back is None else back.to(ctx.input_dtype), None, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, deferral: Deferral, function: Any, settings: Any
    ) -> Tensor:
        ctx.deferral, ctx.function, ctx.settings, ctx.weight = deferral, function, settings, weight
        ctx.save_for_backward(x)
        return function(x, weight, **settings)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous()
        (x,) = ctx.saved_tensors
        weight, settings = ctx.weight, ctx.settings
        of_input, of_weight = _CONVOLUTIONS[ctx.function]
        ctx.deferral.debts.append(
            lambda: _add(weight, of_weight(x, weight.shape, gradient, **settings))
        )
        back = of_input(x.shape, weight, gradient, **settings) if ctx.needs_input_grad[0] else None
        return back, None, None, None, None
