"""Describe the carry that one stage sends to the next: a pytree of tensors, each with the samples
of a micro-batch along its first dim.

Its form (tree, shapes without the samples, dtypes, which tensors have gradients) is equal for all
micro-batches of a run, so it is sent once, before the first; after it only tensors are sent, into
buffers that wait. It is sent as JSON: what arrives is data that cannot be executed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from argosy.errors import invalid

Carry = Any
"""A pytree of tensors, tuples, lists, dicts, and constants equal for all micro-batches."""
_CONSTANTS = (type(None), bool, int, float, str)
"""Types of constants that a carry may contain."""


@dataclass(frozen=True)
class TensorForm:
    """The form of a tensor of a carry, which is valid for any number of samples."""

    shape: tuple[int, ...]
    """The shape without the first dim."""
    dtype: torch.dtype
    has_gradient: bool

    def bytes_per_sample(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class CarryForm:
    """The form of a carry, which leaves out the numbers."""

    tree: TreeSpec
    leaves: tuple[object, ...]
    """For each leaf its ``TensorForm``, or the constant itself."""

    @property
    def tensors(self) -> tuple[TensorForm, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorForm))

    @property
    def gradients(self) -> tuple[TensorForm, ...]:
        """Return the forms of the tensors whose gradients a backward sends back."""
        return tuple(form for form in self.tensors if form.has_gradient)

    def assemble(self, tensors: Sequence[Tensor]) -> Carry:
        """Return a carry of this form that contains other tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, TensorForm) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.tree)

    def dumps(self, *, where: str) -> bytes:
        """Return the form as JSON; raise an ``InputError`` if the tree holds more than a carry
        may."""
        return json.dumps(_written(tree_unflatten(list(self.leaves), self.tree), where)).encode()


def loads_form(data: bytes) -> CarryForm:
    """Return the form that ``dumps`` wrote."""
    leaves, tree = tree_flatten(_read(json.loads(data)))
    return CarryForm(tree, tuple(leaves))


def _written(part: object, where: str) -> object:
    """Return a constant as itself and everything else as [kind, content]."""
    if isinstance(part, TensorForm):
        return [
            "tensor",
            [list(part.shape), str(part.dtype).removeprefix("torch."), part.has_gradient],
        ]
    if isinstance(part, tuple | list) and type(part) in (tuple, list):
        return [type(part).__name__, [_written(inner, where) for inner in part]]
    if type(part) is dict and all(type(key) in (int, str) for key in part):
        return ["dict", [[key, _written(inner, where)] for key, inner in part.items()]]
    if type(part) not in _CONSTANTS:
        expected = "tensors, tuples, lists, dicts by name or number, and constants"
        raise invalid(where, f"{type(part).__name__} in the output", expected)
    return part


def _read(written: Any) -> Any:
    if not isinstance(written, list):
        return written
    kind, content = written
    match kind:
        case "tensor":
            shape, dtype, has_gradient = content
            return TensorForm(tuple(shape), getattr(torch, dtype), has_gradient)
        case "dict":
            return {key: _read(inner) for key, inner in content}
        case "tuple":
            return tuple(_read(inner) for inner in content)
    return [_read(inner) for inner in content]


def describe(carry: Carry, samples: int, *, where: str) -> tuple[CarryForm, list[Tensor]]:
    """Return the form of a carry and its tensors; raise an ``InputError`` if a tensor does not have
    one row per sample."""
    values, tree = tree_flatten(carry)
    tensors = [value for value in values if isinstance(value, Tensor)]
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] != samples:
            actual = f"a tensor of shape {tuple(tensor.shape)} in the output"
            raise invalid(where, actual, f"a first dim of the {samples} samples")
    leaves = tuple(_leaf(value) for value in values)
    return CarryForm(tree, leaves), tensors


def _leaf(value: object) -> object:
    if isinstance(value, Tensor):
        return TensorForm(tuple(value.shape[1:]), value.dtype, value.requires_grad)
    return value
