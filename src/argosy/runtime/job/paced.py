"""Make layers take a given time: they compute, and then wait until that time has passed.

    (1)  the forward of n samples takes n s seconds, the backward 2 n s,
         s seconds per sample on this device

Processes of one machine can represent devices of unequal speed in this way, with real weights,
gradients and messages. A layer whose computation alone takes longer than its time does not wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class _Call:
    """A micro-batch that is in a layer, with its clock."""

    seconds: float
    """The seconds that its forward takes."""
    began: float

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, self.began + seconds - time.perf_counter()))


class _Begin(torch.autograd.Function):
    """An identity on a layer's output, whose backward runs when the layer's backward begins."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.call.began = time.perf_counter()
        return gradients[0], None


class _End(torch.autograd.Function):
    """An identity on a layer's input, whose backward runs when the layer's backward ends."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.call.wait(2 * ctx.call.seconds)
        return gradients[0], None


def pace(layer: nn.Module, seconds: float) -> None:
    """Make a layer take ``seconds`` per sample by (1). It takes one tensor, samples first, and
    returns one."""
    calls: list[_Call] = []

    def before(_: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        call = _Call(seconds * len(arguments[0]), time.perf_counter())
        calls.append(call)
        return (_End.apply(arguments[0], call),)

    def after(_: nn.Module, arguments: tuple[Tensor], result: Tensor) -> Tensor:
        call = calls.pop()
        call.wait(call.seconds)
        return _Begin.apply(result, call)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)
