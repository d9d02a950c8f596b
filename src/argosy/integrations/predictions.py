"""Assemble on every rank the outputs of a model that ranks of the last stage computed in parts.

A part consists of the numbers of some rows of the batch and a pytree of tensors with these rows.
Every rank that has parts broadcasts them: first their form, as JSON (``runtime.stages.carry``),
then tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from argosy.runtime.processes.failure import in_contact
from argosy.runtime.stages.carry import describe, loads_form

Part = tuple[Tensor, Any]
"""The numbers of rows, and the outputs for them."""


def assembled(
    parts: Sequence[Part], count: int, sources: Sequence[int], device: torch.device
) -> Any:
    """Assemble the outputs of ``count`` rows from the parts of all ranks in ``sources``; every rank
    calls this."""
    mine = _together(parts) if dist.get_rank() in sources else None
    with in_contact("while predictions were exchanged"):
        arrived = [_broadcast(mine, source, device) for source in sources]
    leaves, tree = tree_flatten(arrived[0][1])
    whole = [leaf.new_empty(count, *leaf.shape[1:]) for leaf in leaves]
    for rows, outputs in arrived:
        for target, values in zip(whole, tree_flatten(outputs)[0], strict=True):
            target[rows] = values
    return tree_unflatten(whole, tree)


def _together(parts: Sequence[Part]) -> Part:
    """Join all parts of this rank into one."""
    flat = [tree_flatten(part) for part in parts]
    joined = [
        torch.cat(leaves).contiguous()
        for leaves in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    rows, outputs = tree_unflatten(joined, flat[0][1])
    return rows, outputs


def _broadcast(mine: Part | None, source: int, device: torch.device) -> Part:
    if dist.get_rank() == source:
        assert mine is not None, "a source has parts"
        form, tensors = describe(mine, len(mine[0]), where="predictions")
        data = bytearray(form.dumps(where="predictions"))
        text = torch.frombuffer(data, dtype=torch.uint8).to(device)
        sizes = torch.tensor([len(text), len(mine[0])], device=device)
    else:
        sizes = torch.zeros(2, dtype=torch.int64, device=device)
    dist.broadcast(sizes, source)
    length, rows = sizes.tolist()
    if dist.get_rank() != source:
        text = torch.empty(length, dtype=torch.uint8, device=device)
    dist.broadcast(text, source)
    if dist.get_rank() != source:
        form = loads_form(bytes(text.tolist()))
        tensors = [
            torch.empty(rows, *leaf.shape, dtype=leaf.dtype, device=device) for leaf in form.tensors
        ]
    for tensor in tensors:
        dist.broadcast(tensor, source)
    return form.assemble(tensors)


def kept(outputs: Any) -> Any:
    """Detach outputs; 16-bit numbers become fp32, as accelerate returns them."""

    def detached(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        is_half = leaf.dtype in (torch.bfloat16, torch.float16)
        return leaf.detach().float() if is_half else leaf.detach()

    return tree_map(detached, outputs)
