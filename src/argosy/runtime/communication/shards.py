"""Cut tensors into the shards that devices hold, and join shards to whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from argosy.space.operations.sharding import PARTIAL, State, unit_counts


def take(whole: Tensor, state: State, ratios: Sequence[float], rank: int) -> Tensor:
    """Return a device's part of a whole tensor; of a partial sum the first device has all, the
    others zeros."""
    if state == PARTIAL:
        return whole if rank == 0 else torch.zeros_like(whole)
    if not state.is_sharded:
        return whole
    counts = unit_counts(state.units, ratios)
    opened: Tensor = whole.unflatten(state.dim, (state.outer, state.units, -1))
    part = opened.narrow(state.dim + 1, sum(counts[:rank]), counts[rank])
    # Some kernels misread strided shards, so the shard is made contiguous.
    return part.flatten(state.dim, state.dim + 2).contiguous()


def join(parts: Sequence[Tensor], state: State, ratios: Sequence[float]) -> Tensor:
    """Return the whole tensor from every device's part."""
    if state == PARTIAL:
        return torch.stack(list(parts)).sum(0)
    if not state.is_sharded:
        return parts[0]
    counts = unit_counts(state.units, ratios)
    opened = [
        part.unflatten(state.dim, (state.outer, count, -1))
        for part, count in zip(parts, counts, strict=True)
    ]
    return torch.cat(opened, state.dim + 1).flatten(state.dim, state.dim + 2)


def positions(shape: Sequence[int], state: State, ratios: Sequence[float], rank: int) -> Tensor:
    """Return the flat index in the whole tensor of each element of a device's part."""
    indices = torch.arange(torch.Size(shape).numel()).view(*shape)
    return take(indices, state, ratios, rank)
