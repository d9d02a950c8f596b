"""Run collectives whose parts have unequal sizes, on any backend.

A vector of N elements is cut into parts of ``sizes`` elements, part i on member i of a group.
Backends refuse unequal parts in most of their collectives, some of them only after other members
have begun; so everything here rests on ``all_to_all_single`` with split sizes, broadcasts and
padding, and sizes are checked before anything is sent.

    (1)  gather    every member gets the concatenation of all parts
    (2)  scatter   member i gets part i of the sum over members, added in the order of members, so
                   that it has the same bits on any backend
    (3)  sum       (2), then (1)
    (4)  fill      (1) into a vector that has the caller's part in its place, while the caller goes
                   on: each member sends its part to every other, straight into place
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.errors import invalid
from argosy.runtime.communication.tags import Tag

Group = dist.ProcessGroup | None
"""A process group; None is the group of all ranks."""


class Pending(Protocol):
    """A collective that was begun."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Messages:
    """Messages that were begun together and are waited for together."""

    works: Sequence[Pending]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class _FillOnHost:
    """A fill (4) that receives into host memory and is then copied to the device."""

    pending: Pending
    host: Tensor
    whole: Tensor

    def wait(self) -> None:
        self.pending.wait()
        self.whole.copy_(self.host)


class GatherBy(StrEnum):
    """A method by which unequal parts are gathered."""

    ALL_TO_ALL = "all-to-all"
    """Every member sends its part to every other: least traffic."""
    BROADCASTS = "broadcasts"
    """One broadcast per part, straight into place: least memory."""
    PADDED = "padded"
    """Parts are padded to the largest, then gathered equally: one call, most traffic."""


def gather_uneven(
    part: Tensor, sizes: Sequence[int], *, group: Group = None, by: GatherBy = GatherBy.ALL_TO_ALL
) -> Tensor:
    """Return the concatenation of every member's part (1); ``part`` is the caller's own,
    one-dimensional."""
    rank = dist.get_rank(group)
    _check_part(part, sizes[rank], len(sizes), group)
    if len(sizes) == 1:
        return part.clone()
    if is_foreign(part, group):
        return gather_uneven(part.cpu(), sizes, group=group, by=by).to(part.device)
    whole = part.new_empty(sum(sizes))
    match by:
        case GatherBy.ALL_TO_ALL:
            dist.all_to_all_single(
                whole,
                part.repeat(len(sizes)),
                list(sizes),
                [part.numel()] * len(sizes),
                group=group,
            )
        case GatherBy.BROADCASTS:
            _gather_by_broadcasts(whole, part, sizes, group)
        case GatherBy.PADDED:
            _gather_padded(whole, part, sizes, group)
    return whole


def _gather_by_broadcasts(whole: Tensor, part: Tensor, sizes: Sequence[int], group: Group) -> None:
    slices = whole.split(list(sizes))
    slices[dist.get_rank(group)].copy_(part)
    works = [
        dist.broadcast(piece, group_src=member, group=group, async_op=True)
        for member, piece in enumerate(slices)
        if piece.numel()
    ]
    for work in works:
        work.wait()


def _gather_padded(whole: Tensor, part: Tensor, sizes: Sequence[int], group: Group) -> None:
    most = max(sizes)
    padded = part.new_zeros(most)
    padded[: part.numel()] = part
    rows = [part.new_empty(most) for _ in sizes]
    dist.all_gather(rows, padded, group=group)
    torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)], out=whole)


def begin_fill(whole: Tensor, sizes: Sequence[int], *, group: Group = None) -> Pending:
    """Begin to fill a vector with every member's part (4); the members call this in the same
    order."""
    _check_part(whole, sum(sizes), len(sizes), group)
    rank = dist.get_rank(group)
    parts = whole.split(list(sizes))
    own = parts[rank]
    if is_foreign(whole, group):
        host = torch.empty(whole.shape, dtype=whole.dtype)
        host.split(list(sizes))[rank].copy_(own)
        return _FillOnHost(begin_fill(host, sizes, group=group), host, whole)
    if dist.get_backend(group) == "nccl":
        nothing = own[:0]
        sent = [nothing if member == rank else own for member in range(len(sizes))]
        received = [nothing if member == rank else part for member, part in enumerate(parts)]
        return Messages([dist.all_to_all(received, sent, group=group, async_op=True)])
    peers = [member for member in range(len(sizes)) if member != rank]
    works: list[Any] = [
        dist.irecv(parts[peer], group=group, group_src=peer, tag=Tag.FILL)
        for peer in peers
        if sizes[peer]
    ]
    for peer in peers if sizes[rank] else ():
        works.append(dist.isend(own, group=group, group_dst=peer, tag=Tag.FILL))
    return Messages(works)


class PendingPart(Protocol):
    """A part of a sum that was begun."""

    def wait(self) -> Tensor: ...


@dataclass(frozen=True)
class Part:
    """A part of a sum that was complete as soon as it was begun."""

    part: Tensor

    def wait(self) -> Tensor:
        return self.part


@dataclass(frozen=True)
class _ArrivingPart:
    """A part of a sum that is added up once all summands have arrived."""

    pending: Pending
    sent: Tensor
    """The vector that is being sent, which must stay until then."""
    received: Tensor
    num_members: int
    device: torch.device

    def wait(self) -> Tensor:
        self.pending.wait()
        first, *others = (
            self.received.chunk(self.num_members) if self.received.numel() else (self.received,)
        )
        total = first.clone()
        for other in others:
            total += other
        return total.to(self.device)


def scatter_sum_uneven(whole: Tensor, sizes: Sequence[int], *, group: Group = None) -> Tensor:
    """Return the caller's part of the sum over the members' vectors, one-dimensional (2)."""
    return begin_scatter_sum(whole, sizes, group=group).wait()


def begin_scatter_sum(whole: Tensor, sizes: Sequence[int], *, group: Group = None) -> PendingPart:
    """Begin a sum over the members' vectors (2); the members call this in the same order."""
    _check_part(whole, sum(sizes), len(sizes), group)
    if len(sizes) == 1:
        return Part(whole.clone())
    sent = whole.cpu() if is_foreign(whole, group) else whole.contiguous()
    rank = dist.get_rank(group)
    own = sizes[rank]
    received = sent.new_empty(own * len(sizes))
    if dist.get_backend(group) == "nccl":
        pending: Pending | None = dist.all_to_all_single(
            received, sent, [own] * len(sizes), list(sizes), group=group, async_op=True
        )
        assert pending is not None
    else:
        pending = _begin_swap(received, sent.split(list(sizes)), rank, group)
    return _ArrivingPart(pending, sent, received, len(sizes), whole.device)


def _begin_swap(received: Tensor, parts: Sequence[Tensor], rank: int, group: Group) -> Messages:
    """Begin to send each member its part, while theirs arrive one after another in ``received``.

    These are messages of their own, because gloo's all-to-all uses a link in one direction at a
    time.
    """
    own = parts[rank].numel()
    works: list[Any] = []
    for member, part in enumerate(parts):
        place = received[member * own : (member + 1) * own]
        if member == rank:
            place.copy_(part)
        elif own:
            works.append(dist.irecv(place, group=group, group_src=member, tag=Tag.SCATTER))
    for member, part in enumerate(parts):
        if member != rank and part.numel():
            works.append(dist.isend(part, group=group, group_dst=member, tag=Tag.SCATTER))
    return Messages(works)


def swap_uneven(
    sent: Tensor, receiving: Sequence[int], sending: Sequence[int], *, group: Group = None
) -> Tensor:
    """Return the elements that the members sent to the caller, in the order of members; ``sending``
    lists how many elements of ``sent`` each of them gets."""
    if is_foreign(sent, group):
        return swap_uneven(sent.cpu(), receiving, sending, group=group).to(sent.device)
    received = sent.new_empty(sum(receiving))
    dist.all_to_all_single(received, sent.contiguous(), list(receiving), list(sending), group=group)
    return received


def sum_uneven(whole: Tensor, sizes: Sequence[int], *, group: Group = None) -> Tensor:
    """Return the sum over the members' vectors on every member (3)."""
    return gather_uneven(scatter_sum_uneven(whole, sizes, group=group), sizes, group=group)


def split_by(count: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split ``count`` into integers in proportion to ``weights`` with the same sum: largest
    remainders are rounded up first, ties from the front.

    >>> split_by(10, [2, 1, 1])
    (5, 3, 2)
    """
    total = sum(weights)
    exact = [count * weight / total for weight in weights]
    sizes = [int(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda index: (sizes[index] - exact[index], index))
    for index in order[: count - sum(sizes)]:
        sizes[index] += 1
    return tuple(sizes)


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the index at which each part begins.

    >>> offsets((5, 3, 2))
    (0, 5, 8)
    """
    return (0, *accumulate(sizes))[:-1]


def is_foreign(tensor: Tensor, group: Group) -> bool:
    """Return whether a tensor must pass through host memory: gloo cannot send unequal parts from a
    GPU."""
    return tensor.device.type != "cpu" and dist.get_backend(group) == "gloo"


def _check_part(tensor: Tensor, expected: int, num_parts: int, group: Group) -> None:
    """Raise an ``InputError`` if sizes do not match. A backend that refuses a size itself leaves
    its members out of step."""
    members = dist.get_world_size(group)
    if num_parts != members:
        wanted = f"one size for each of the {members} members of the group"
        raise invalid(found=f"{num_parts} sizes", expected=wanted)
    if tensor.dim() != 1 or tensor.numel() != expected:
        actual = f"a tensor of shape {tuple(tensor.shape)}"
        raise invalid(found=actual, expected=f"a vector of {expected} elements")
