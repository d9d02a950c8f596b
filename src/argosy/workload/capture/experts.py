"""Capture the call of a module of experts as one operation.

What a mixture of experts computes depends on the experts that its tokens choose, so it cannot be
captured operation by operation. The runtime, which has the module, runs it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.library.custom_op("argosy::experts", mutates_args=())
def experts(tokens: Tensor, numbers: Tensor, weights: Tensor, parameters: list[Tensor]) -> Tensor:
    """Return a result for each token."""
    raise NotImplementedError("argosy::experts is computed by the runtime")


@experts.register_fake
def _(tokens: Tensor, numbers: Tensor, weights: Tensor, parameters: list[Tensor]) -> Tensor:
    return torch.empty_like(tokens)


def captured_experts(module: nn.Module, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
    """Return what a module of experts returns, as one operation in a capture."""
    held: list[Tensor] = [tensor for tensor in module._parameters.values() if tensor is not None]
    if not torch.is_grad_enabled():  # seen as such inside the operation, too
        tokens, weights, held = tokens.detach(), weights.detach(), [part.detach() for part in held]
    result: Tensor = experts(tokens, numbers, weights, held)
    return result
