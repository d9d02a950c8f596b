"""Reject hooks on gradients, because a plan computes gradients in parts and by operations of its
own.

A hook on a parameter would receive the gradient of some samples, before gradients are summed. Hooks
on modules and tensors would not be called at all if operations of a captured forward run in place
of modules.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from argosy.errors import InputError, invalid

# Functions that register a hook on a tensor.
HOOKS_OF_TENSORS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
# Expected value in the error about a hook.
_EXPECTED = "gradients as torch computes them"
# Suggestion in the error about a hook.
_SUGGESTION = (
    "scale or clip gradients in the optimizer, or write the change as a torch.autograd.Function"
)


def refused_hook(where: str, found: str) -> InputError:
    """Return the error for a hook."""
    return invalid(where, found, _EXPECTED, suggestion=_SUGGESTION)


def check_hooks(model: nn.Module) -> None:
    """Raise an ``InputError`` for a model whose parameters or modules have hooks on gradients."""
    for name, parameter in model.named_parameters():
        given: list[Any] = [
            parameter._backward_hooks,
            getattr(parameter, "_post_accumulate_grad_hooks", None),
        ]
        if any(given):
            raise refused_hook(name, "a hook on the gradient of this parameter")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise refused_hook(name or "model", "a hook on the backward of this module")
