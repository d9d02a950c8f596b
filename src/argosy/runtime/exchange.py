"""Collectives between states of a tensor on one group: what a ``Conversion`` of a program runs.

A shard of a dim seen as (outer, units, inner) is sent with its units in front, so that every rank's part is one run of
elements: strided and plain cuts take the same path, and the uneven collectives of ``collectives`` see vectors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.cost.group import Collective, Way
from argosy.runtime.collectives import GatherBy, Group, gather_uneven, scatter_sum_uneven, split_by, sum_uneven
from argosy.runtime.shards import take
from argosy.space.delivery import Conversion
from argosy.space.sharding import State, local_shape, unit_counts

GATHERS = {Way.PADDED: GatherBy.PADDED, Way.GROUPED: GatherBy.BROADCASTS}


class Exchange:
    """The collectives of one rank of one group at given ratios."""

    def __init__(self, ratios: Sequence[float], group: Group = None) -> None:
        self.ratios, self.group = tuple(ratios), group
        self.rank = dist.get_rank(group) if len(ratios) > 1 else 0

    def convert(self, part: Tensor, shape: tuple[int, ...], step: Conversion, way: Way) -> Tensor:
        """A tensor of a whole shape, from one state to another."""
        if len(self.ratios) == 1:
            return part
        match step.kind:
            case Collective.ALL_REDUCE:
                return self.all_reduce(part)
            case Collective.REDUCE_SCATTER:
                return self.reduce_scatter(part, step.after)
            case Collective.ALL_GATHER:
                whole = self.all_gather(part, shape, step.before, GATHERS.get(way, GatherBy.ALL_TO_ALL))
                return take(whole, step.after, self.ratios, self.rank)
            case Collective.ALL_TO_ALL:
                return self.all_to_all(part, shape, step.before, step.after)
        return take(part, step.after, self.ratios, self.rank)

    def all_reduce(self, part: Tensor) -> Tensor:
        sizes = split_by(part.numel(), [1.0] * len(self.ratios))
        return sum_uneven(part.contiguous().flatten(), sizes, group=self.group).view(part.shape)

    def all_gather(self, part: Tensor, shape: tuple[int, ...], state: State, by: GatherBy) -> Tensor:
        sent = _as_bytes(part)
        flat = _units_first(sent, state, unit_counts(state.units, self.ratios)[self.rank])
        each = prod(shape) // state.units
        sizes = [count * each for count in unit_counts(state.units, self.ratios)]
        whole = gather_uneven(flat.flatten(), sizes, group=self.group, by=by)
        return _units_back(whole, shape, state, state.units).to(part.dtype)

    def reduce_scatter(self, part: Tensor, state: State) -> Tensor:
        counts = unit_counts(state.units, self.ratios)
        flat = _units_first(part, state, state.units)
        each = part.numel() // state.units
        own = scatter_sum_uneven(flat.flatten(), [count * each for count in counts], group=self.group)
        return _units_back(own, tuple(part.shape), state, counts[self.rank])

    def all_to_all(self, part: Tensor, shape: tuple[int, ...], before: State, after: State) -> Tensor:
        """Between cuts of different dims: every rank sends to each what the other will hold of its own part."""
        sent = _as_bytes(part)
        ranks = range(len(self.ratios))
        pieces = [take(sent, after, self.ratios, rank).flatten() for rank in ranks]
        own = local_shape(shape, after, self.ratios, self.rank)
        shapes = [local_shape(own, before, self.ratios, rank) for rank in ranks]
        received = sent.new_empty(sum(prod(shape) for shape in shapes))
        sizes = [prod(shape) for shape in shapes], [piece.numel() for piece in pieces]
        dist.all_to_all_single(received, torch.cat(pieces), *sizes, group=self.group)
        parts = [piece.view(s) for piece, s in zip(received.split(sizes[0]), shapes, strict=True)]
        counts = unit_counts(before.units, self.ratios)
        opened = [p.unflatten(before.dim, (before.outer, c, -1)) for p, c in zip(parts, counts, strict=True)]
        whole = torch.cat(opened, before.dim + 1).flatten(before.dim, before.dim + 2)
        return whole.to(part.dtype)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Truth values travel as bytes."""
    return tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor


def _units_first(tensor: Tensor, state: State, count: int) -> Tensor:
    opened: Tensor = tensor.unflatten(state.dim, (state.outer, count, -1))
    return opened.movedim(state.dim + 1, 0).contiguous()


def _units_back(flat: Tensor, shape: tuple[int, ...], state: State, count: int) -> Tensor:
    inner = shape[state.dim] // (state.outer * state.units)
    opened = (count, *shape[: state.dim], state.outer, inner, *shape[state.dim + 1 :])
    placed = flat.view(opened).movedim(0, state.dim + 1)
    return placed.flatten(state.dim, state.dim + 2).contiguous()
