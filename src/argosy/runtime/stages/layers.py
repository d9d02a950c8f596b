"""A model as a sequence of layers: which pieces of an ``nn.Module`` a pipeline may cut between.

A model is cut where it says so itself, in one of three ways, tried in this order:

    (1)  it has a method ``argosy_layers()`` that returns modules, first to last;
    (2)  it is an ``nn.Sequential``: its children;
    (3)  its class is in the table of known families (``huggingface``).

Layer 0 is called with whatever the model is called with; every later layer with what the one before
returned, a pytree of tensors whose first dim is the samples; the last returns what the model
returns. Where the last layer has a method ``finish``, that is called instead, with what the layer
before returned and then with the model's own arguments (a loss from labels, say). Anything that
skips layers, such as an encoder's output on its way to every decoder block, is simply part of what
they return.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from argosy.errors import InputError, Problem
from argosy.runtime.stages.huggingface import FAMILIES, check_attention
from argosy.workload.capture.hooks import check_hooks


def has_layers(model: nn.Module) -> bool:
    """Whether one of (1) to (3) applies."""
    return (
        callable(getattr(model, "argosy_layers", None))
        or isinstance(model, nn.Sequential)
        or type(model).__name__ in FAMILIES
    )


def find_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """(1) to (3); an ``InputError`` that says what to do where none applies."""
    check_hooks(model)
    own = getattr(model, "argosy_layers", None)
    if callable(own):
        return tuple(_modules(own(), type(model).__name__))
    if isinstance(model, nn.Sequential):
        return tuple(model)
    name = type(model).__name__
    if name in FAMILIES:
        check_attention(model)
        return FAMILIES[name](model)
    expected = (
        f"an nn.Sequential, a model with argosy_layers(), or one of {', '.join(sorted(FAMILIES))}"
    )
    suggestion = f"add a method argosy_layers() to {name} that returns its layers, first to last"
    raise InputError([Problem(path="model", found=name, expected=expected, suggestion=suggestion)])


def _modules(layers: Sequence[object], name: str) -> list[nn.Module]:
    modules = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            path = f"{name}.argosy_layers()[{index}]"
            raise InputError(
                [Problem(path=path, found=type(layer).__name__, expected="an nn.Module")]
            )
        modules.append(layer)
    return modules
