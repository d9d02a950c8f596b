"""Shards of tensors: what a device holds of a whole."""

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
    return part.flatten(
        state.dim, state.dim + 2
    ).contiguous()  # some kernels misread strided shards
