"""A global batch, and the part of it that one replica works on in one micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from argosy.errors import InputError, Problem
from argosy.plan.plan import Plan
from argosy.runtime.ranks import Seat


def check_batch(batch: Any, plan: Plan) -> None:
    """Raise an ``InputError`` unless every tensor of a batch has as many rows as the plan's global batch."""
    leaves, _ = tree_flatten_with_path(batch)
    problems = []
    for path, leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != plan.global_batch):
            found = f"a tensor of shape {tuple(leaf.shape)}"
            expected = f"a first dim of {plan.global_batch}, the plan's global batch"
            suggestion = "hold what all samples share in a buffer of the model"
            where = f"batch{keystr(path)}"
            problems.append(Problem(path=where, found=found, expected=expected, suggestion=suggestion))
    if not any(isinstance(leaf, Tensor) for _, leaf in leaves):
        problems.append(Problem(path="batch", found=type(batch).__name__, expected="a pytree with tensors"))
    if problems:
        raise InputError(problems)


def portion(batch: Any, plan: Plan, seat: Seat, micro_batch: int, device: torch.device) -> Any:
    """The samples of a micro-batch that a seat works on, on its device."""
    start = micro_batch * plan.micro_batch_size
    begin, end = start + seat.begin, start + seat.end

    def rows(leaf: Any) -> Any:
        return leaf[begin:end].to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    return tree_map(rows, batch)
