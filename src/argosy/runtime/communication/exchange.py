"""Run the collectives that convert a tensor between states on one group, as a ``Conversion`` of a
program describes them.

A shard of a dim seen as (outer, units, inner) is sent with its units in front, so that every rank's
part is contiguous: strided and plain cuts use the same code, and the uneven collectives of
``collectives`` get vectors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.cost.group import CollectiveMethod, GroupCollective
from argosy.runtime.communication.collectives import (
    GatherBy,
    Group,
    gather_uneven,
    scatter_sum_uneven,
    split_by,
    sum_uneven,
    swap_uneven,
)
from argosy.runtime.communication.marks import Exchanging, untold
from argosy.runtime.communication.shards import take
from argosy.space.operations.delivery import Conversion
from argosy.space.operations.sharding import State, local_shape, unit_counts

GATHERS = {CollectiveMethod.PADDED: GatherBy.PADDED, CollectiveMethod.GROUPED: GatherBy.BROADCASTS}
"""Ways to gather parts, by the method that a plan names; any other method uses an all-to-all."""


class GroupExchange:
    """The collectives that one rank of a group runs at given ratios."""

    def __init__(
        self, ratios: Sequence[float], group: Group = None, exchanging: Exchanging = untold
    ) -> None:
        self.ratios, self.group, self.exchanging = tuple(ratios), group, exchanging
        self.count = len(self.ratios)
        self.rank = dist.get_rank(group) if self.count > 1 else 0

    def take(self, whole: Tensor, state: State) -> Tensor:
        """Return this rank's part of a whole tensor."""
        return take(whole, state, self.ratios, self.rank)

    def counts(self, state: State) -> tuple[int, ...]:
        """Return the number of units of each rank."""
        return unit_counts(state.units, self.ratios)

    def convert(
        self, part: Tensor, shape: tuple[int, ...], step: Conversion, way: CollectiveMethod
    ) -> Tensor:
        """Convert a tensor of a whole shape from one state to another."""
        if self.count == 1:
            return part
        match step.kind:
            case GroupCollective.ALL_REDUCE:
                return self.all_reduce(part)
            case GroupCollective.REDUCE_SCATTER:
                return self.reduce_scatter(part, step.after)
            case GroupCollective.ALL_GATHER:
                whole = self.all_gather(
                    part, shape, step.before, GATHERS.get(way, GatherBy.ALL_TO_ALL)
                )
                return self.take(whole, step.after)
            case GroupCollective.ALL_TO_ALL:
                return self.all_to_all(part, shape, step.before, step.after)
        return self.take(part, step.after)

    def all_reduce(self, part: Tensor) -> Tensor:
        sizes = split_by(part.numel(), [1.0] * self.count)
        return sum_uneven(part.contiguous().flatten(), sizes, group=self.group).view(part.shape)

    def all_gather(
        self, part: Tensor, shape: tuple[int, ...], state: State, by: GatherBy
    ) -> Tensor:
        sent = _as_bytes(part)
        flat = _units_first(sent, state, self.counts(state)[self.rank])
        unit_size = prod(shape) // state.units
        sizes = [count * unit_size for count in self.counts(state)]
        whole = gather_uneven(flat.flatten(), sizes, group=self.group, by=by)
        return _units_back(whole, shape, state, state.units).to(part.dtype)

    def all_parts(self, part: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have one shape, along a new first dim."""
        sizes = [part.numel()] * self.count
        flat = part.contiguous().flatten()
        parts = gather_uneven(flat, sizes, group=self.group, by=GatherBy.PADDED)
        return parts.view(self.count, *part.shape)

    def reduce_scatter(self, part: Tensor, state: State) -> Tensor:
        counts = self.counts(state)
        flat = _units_first(part, state, state.units)
        unit_size = part.numel() // state.units
        own = scatter_sum_uneven(
            flat.flatten(), [count * unit_size for count in counts], group=self.group
        )
        return _units_back(own, tuple(part.shape), state, counts[self.rank])

    def all_to_all(
        self, part: Tensor, shape: tuple[int, ...], before: State, after: State
    ) -> Tensor:
        """Convert between cuts of different dims: every rank sends to each other rank what that
        rank will hold of its own part."""
        sent = _as_bytes(part)
        ranks, ratios = range(self.count), self.ratios
        pieces = [take(sent, after, ratios, rank).flatten() for rank in ranks]
        own = local_shape(shape, after, ratios, self.rank)
        shapes = [local_shape(own, before, ratios, rank) for rank in ranks]
        sizes = [prod(shape) for shape in shapes], [piece.numel() for piece in pieces]
        received = swap_uneven(torch.cat(pieces), *sizes, group=self.group)
        parts = [
            piece.view(piece_shape)
            for piece, piece_shape in zip(received.split(sizes[0]), shapes, strict=True)
        ]
        opened = [
            piece.unflatten(before.dim, (before.outer, count, -1))
            for piece, count in zip(parts, self.counts(before), strict=True)
        ]
        whole = torch.cat(opened, before.dim + 1).flatten(before.dim, before.dim + 2)
        return whole.to(part.dtype)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return booleans as bytes, since backends cannot send booleans; other tensors as they are."""
    return tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor


def _units_first(tensor: Tensor, state: State, count: int) -> Tensor:
    opened: Tensor = tensor.unflatten(state.dim, (state.outer, count, -1))
    return opened.movedim(state.dim + 1, 0).contiguous()


def _units_back(flat: Tensor, shape: tuple[int, ...], state: State, count: int) -> Tensor:
    inner = shape[state.dim] // (state.outer * state.units)
    opened = (count, *shape[: state.dim], state.outer, inner, *shape[state.dim + 1 :])
    placed = flat.view(opened).movedim(0, state.dim + 1)
    return placed.flatten(state.dim, state.dim + 2).contiguous()
