"""What one stage hands to the next: a pytree of tensors, each with the samples of a micro-batch along its first dim.

Its form (tree, shapes without the samples, dtypes, which tensors take part in the gradient) is the same for every
micro-batch of a run, so it travels once, ahead of the first; what follows is bare tensors into buffers that wait.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from argosy.errors import InputError, Problem

Carry = Any
"""A pytree: tensors, tuples, lists, dicts, and constants that are equal for all micro-batches."""


@dataclass(frozen=True)
class TensorForm:
    """A tensor of a carry, for any number of samples."""

    shape: tuple[int, ...]
    """Without the first dim."""
    dtype: torch.dtype
    has_gradient: bool

    def bytes_per_sample(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class CarryForm:
    """A carry without its numbers."""

    tree: TreeSpec
    leaves: tuple[object, ...]
    """Per leaf its ``TensorForm``, or the constant itself."""

    @property
    def tensors(self) -> tuple[TensorForm, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorForm))

    @property
    def gradients(self) -> tuple[TensorForm, ...]:
        """Of the tensors that a backward hands back."""
        return tuple(form for form in self.tensors if form.has_gradient)

    def assemble(self, tensors: Sequence[Tensor]) -> Carry:
        """A carry of this form around other tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, TensorForm) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.tree)

    def dumps(self) -> bytes:
        return pickle.dumps(tree_unflatten(list(self.leaves), self.tree))


def loads_form(data: bytes) -> CarryForm:
    """Read back what ``dumps`` of a rank of the same run wrote."""
    leaves, tree = tree_flatten(pickle.loads(data))
    return CarryForm(tree, tuple(leaves))


def describe(carry: Carry, samples: int, *, where: str) -> tuple[CarryForm, list[Tensor]]:
    """The form of a carry and its tensors; an ``InputError`` where a tensor has not one row per sample."""
    values, tree = tree_flatten(carry)
    tensors = [value for value in values if isinstance(value, Tensor)]
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] != samples:
            found = f"a tensor of shape {tuple(tensor.shape)} among what is handed on"
            raise InputError([Problem(path=where, found=found, expected=f"a first dim of the {samples} samples")])
    leaves = tuple(_leaf(value) for value in values)
    return CarryForm(tree, leaves), tensors


def _leaf(value: object) -> object:
    if isinstance(value, Tensor):
        return TensorForm(tuple(value.shape[1:]), value.dtype, value.requires_grad)
    return value
