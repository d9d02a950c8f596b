"""Check a global batch, and take the part of it that one replica computes in one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map

from argosy.errors import Problem, invalid, raise_any
from argosy.plan.plan import Plan
from argosy.runtime.processes.ranks import Seat
from argosy.runtime.stages.carry import Carry
from argosy.runtime.stages.moment import Moment


def check_batch(batch: Any, plan: Plan, *, may_be_short: bool = False) -> int:
    """Return the number of samples of a batch.

    Raise an ``InputError`` unless every tensor has as many rows as the plan's global batch, or all
    have the same smaller number of rows and the batch ``may_be_short``.
    """
    leaves, _ = tree_flatten_with_path(batch)
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    sizes = {leaf.shape[0] for _, leaf in tensors if leaf.dim() > 0}
    samples = plan.global_batch
    if may_be_short and len(sizes) == 1 and 0 < min(sizes) < samples:
        samples = min(sizes)
    problems = []
    for path, leaf in tensors:
        if leaf.dim() == 0 or leaf.shape[0] != samples:
            actual = f"a tensor of shape {tuple(leaf.shape)}"
            expected = f"a first dim of {plan.global_batch}, the plan's global batch"
            suggestion = "hold what all samples share in a buffer of the model"
            if leaf.dim() > 0 and len(sizes) == 1 and leaf.shape[0] < plan.global_batch:
                suggestion = (
                    "programs and layers that mix samples, and programs on groups of devices, "
                    "take whole batches only; drop_last=True"
                )
            where = f"batch{keystr(path)}"
            problems.append(Problem(where, actual, expected, suggestion=suggestion))
    if not tensors:
        problems.append(Problem("batch", type(batch).__name__, "a pytree with tensors"))
    raise_any(problems)
    return samples


def check_as_captured(batch: Any, example: Any) -> None:
    """Raise an ``InputError`` unless a batch has the entries, the shapes and the plain values of
    the one that a program was captured with."""
    leaves, wanted = (tree_flatten_with_path(values)[0] for values in (batch, example))
    names, others = ([keystr(path) for path, _ in side] for side in (leaves, wanted))
    if names != others:
        expected = f"{', '.join(others)}, as in the batch that was captured"
        raise invalid("batch", ", ".join(names), expected)
    problems = []
    for (path, leaf), (_, other) in zip(leaves, wanted, strict=True):
        where = f"batch{keystr(path)}"
        if isinstance(leaf, Tensor) and isinstance(other, Tensor):
            if leaf.shape[1:] != other.shape[1:]:
                actual = f"a tensor of shape {tuple(leaf.shape)}"
                expected = f"{tuple(other.shape)}, the shape that was captured"
                remedy = "fill all batches up to one length"
                problems.append(Problem(where, actual, expected, suggestion=remedy))
        elif isinstance(other, int | float | str | None) and leaf != other:
            expected = f"{other!r}, the value that was captured"
            remedy = "give a value that changes as a tensor with a row per sample"
            problems.append(Problem(where, repr(leaf)[:40], expected, suggestion=remedy))
    raise_any(problems)


def filled_up(batch: Any, samples: int, plan: Plan) -> Any:
    """Return a short batch filled up with copies of its last sample to the plan's global batch."""
    if samples == plan.global_batch:
        return batch
    rows = torch.arange(plan.global_batch).clamp(max=samples - 1)
    return tree_map(
        lambda leaf: leaf[rows.to(leaf.device)] if isinstance(leaf, Tensor) else leaf, batch
    )


def first_samples(batch: Any, samples: int) -> Any:
    """Return the first samples of a batch, without copies that fill it up."""
    return tree_map(lambda leaf: leaf[:samples] if isinstance(leaf, Tensor) else leaf, batch)


def parts_of(batch: Any, size: int) -> Iterator[Any]:
    """Yield a batch in parts of ``size`` samples, the last with the remaining ones; a batch whose
    tensors differ in size is yielded whole."""
    leaves, _ = tree_flatten(batch)
    rows = {leaf.shape[0] if leaf.dim() else 0 for leaf in leaves if isinstance(leaf, Tensor)}
    if len(rows) != 1 or max(rows) <= size:
        yield batch
        return
    for first in range(0, max(rows), size):
        part = slice(first, first + size)
        yield tree_map(
            lambda leaf, part=part: leaf[part] if isinstance(leaf, Tensor) else leaf, batch
        )


def batch_form(batch: Any) -> str:
    """Return a text that determines the shapes of a step's messages: the tree of a batch, and its
    tensors' shapes and dtypes."""
    leaves, tree = tree_flatten(batch)
    tensors = [(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]
    return f"{tree} {tensors}"


def portion(batch: Any, plan: Plan, seat: Seat, micro_batch: int, device: torch.device) -> Any:
    """Return the samples of a micro-batch that a seat computes, on its device."""
    start = micro_batch * plan.micro_batch_size
    begin, end = start + seat.begin, start + seat.end

    def rows(leaf: Any) -> Any:
        return leaf[begin:end].to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    return tree_map(rows, batch)


def without_padding(
    moment: Moment, left: int, carry: Carry, rows: Any
) -> tuple[Moment, Carry, Any]:
    """Return the ``left`` samples of a portion that belong to the batch; if there are none, one
    copy of a sample."""
    kept = max(1, left)
    carry, rows = tree_map(
        lambda leaf: leaf[:kept] if isinstance(leaf, Tensor) else leaf, (carry, rows)
    )
    return replace(moment, samples=kept, is_padding=left < 1), carry, rows
