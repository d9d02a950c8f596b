"""Recognise modules of experts, whose experts devices can share.

A module of experts has a number ``num_experts``, its own parameters all have that many entries in
their first dim, and it is called with tokens (t, width), the numbers of the experts of each (t, k)
and their weights (t, k). Hugging Face's mixtures of experts have this form since transformers 5.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten

from argosy.errors import invalid
from argosy.workload.capture.described import Description, Sized


def expert_modules(layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of experts in given layers, each once."""
    seen = set()
    for module in (module for layer in layers for module in layer.modules()):
        if id(module) not in seen and is_experts(module):
            seen.add(id(module))
            yield module


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has the form of a module of experts."""
    count = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    children = list(module.children())
    if not isinstance(count, int) or not own or any(list(c.parameters()) for c in children):
        return False
    wanted = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    return len(wanted) == 3 and all(p.dim() > 1 and p.shape[0] == count for p in own)


def is_call(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a module is called as experts are."""
    given = (*args, *kwargs.values())
    if len(given) != 3 or not all(isinstance(part, Tensor) and part.dim() == 2 for part in given):
        return False
    return bool(given[1].shape == given[2].shape)


def described_experts(module: nn.Module, given: Sequence[Any]) -> Description:
    """Return what the call of a module of experts makes: every choice of a token multiplies with
    the matrices of one expert, and keeps what they read and make."""
    tokens, numbers, _ = given
    matrices = [p for p in module.parameters(recurse=False) if p.dim() > 2]
    pairs = numbers.numel()
    flop = 2 * pairs * sum(math.prod(matrix.shape[1:]) for matrix in matrices)
    kept = numbers.shape[1] * sum(sum(matrix.shape[1:]) for matrix in matrices)
    count = module.num_experts
    assert isinstance(count, int)
    stands = (tokens.shape[0], count, math.ceil(kept * tokens.element_size() / count))
    dtype = str(tokens.dtype).removeprefix("torch.")
    sized = Sized((tuple(tokens.shape), stands), (dtype, "uint8"), flop)
    parts = ["e" + "." * (parameter.dim() - 1) for parameter in module.parameters()]
    whole = ["." * buffer.dim() for buffer in module.buffers()]
    labels = ",".join(["t.", "t.", "t.", *parts, *whole]) + "->t.,te."
    return Description(labels, tree_flatten(tokens)[1], (None,), count, sized)


def check_no_dropout(module: nn.Module) -> None:
    """Raise an ``InputError`` for experts with dropout, whose masks inside one operation would
    differ from those of one process."""
    if drops(module):
        raise invalid(
            type(module).__name__,
            "dropout in experts",
            "none in experts that are called as one operation",
        )


def drops(layer: nn.Module) -> bool:
    """Return whether a layer may draw masks: it has a dropout module, or an attribute between 0 and
    1 with "drop" in its name."""
    for module in layer.modules():
        if not module.training:
            continue
        if isinstance(module, _DropoutNd) and module.p > 0:
            return True
        numbers = [
            value
            for name, value in vars(module).items()
            if "drop" in name and isinstance(value, float)
        ]
        if any(0 < value < 1 for value in numbers):
            return True
    return False
