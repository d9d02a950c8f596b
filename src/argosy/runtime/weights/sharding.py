"""Divide optimizer state, gradients and weights among the replicas of a stage (ZeRO): each keeps
only some rows.

Of a weight with R rows (its first dim), member i of the n replicas keeps R_i rows, in proportion to
the replicas' weights, with sum R; the R_i may differ and may be 0. Several weights are sent as one
vector, in the widest of their dtypes: all that member 0 keeps, then all that member 1 keeps, and so
on.

    (1)  level 1: the sum of the gradients is scattered once per step, in buckets; after the update
         rows are gathered
    (2)  level 2: it is scattered after every layer's backward, so that whole gradients never add
         up; it may travel while other layers compute (``gate``)
    (3)  level 3: weights are gathered before a layer's forward and backward and freed after it
         (``gate``)
    (4)  only some members may have a gradient of a weight (an expert that none of a member's
         samples was routed to), so no member decides on its own: all scatter equally often, from
         the last layer to the first, and the number of members that have one is sent along; if it
         is zero, the optimizer gets no gradient

Updates must be element by element (SGD, Adam and similar): an optimizer sees rows as parameters of
their own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from argosy.runtime.communication.boxes import TensorBox
from argosy.runtime.communication.collectives import Pending, PendingPart, offsets
from argosy.runtime.communication.marks import Exchanging, untold
from argosy.runtime.processes.failure import in_contact
from argosy.runtime.processes.world import await_device
from argosy.runtime.weights.overlap import KeptFlags, Summand
from argosy.runtime.weights.summing import Way

_GATHERING = "while weights were gathered from the replicas of a stage"
_SCATTERING = "while gradients were scattered over the replicas of a stage"


class Shard:
    """The rows that one member keeps of a weight, or of a region of it."""

    def __init__(
        self,
        summand: Summand,
        member: int,
        sizes: Sequence[int],
        boxes: tuple[TensorBox, ...],
        *,
        level: int,
        rows: Tensor | None = None,
    ) -> None:
        """Take a member's rows.

        ``sizes`` holds the rows that each member keeps, ``boxes`` locates this member's rows, and
        ``rows`` contains them for a weight of level 3 that is not in memory whole.
        """
        self.summand, self.weight, self.member, self.boxes = summand, summand.weight, member, boxes
        self.sizes = list(sizes)
        if rows is None:
            begin = offsets(self.sizes)[member]
            part = summand.of(summand.parameter.detach())[0]
            rows = part[begin : begin + self.sizes[member]]
            rows = rows.clone() if level == 3 else rows
        self.own = nn.Parameter(rows, requires_grad=summand.parameter.requires_grad)
        """The parameter that the optimizer updates: a view of the weight, or at level 3 a tensor of
        its own."""
        self.row_shape = tuple(rows.shape[1:])

    def size(self) -> tuple[int, torch.dtype]:
        """Return the number of elements of all members, and their dtype."""
        return self.summand.size()

    def elements(self, member: int) -> int:
        return self.sizes[member] * math.prod(self.row_shape)

    def rows(self, tensor: Tensor, member: int) -> Tensor:
        """Return a member's rows of what this rank holds, as a view."""
        begin = offsets(self.sizes)[member]
        return self.summand.of(tensor)[0][begin : begin + self.sizes[member]]


class ShardSet:
    """A set of weights whose rows are sent together."""

    def __init__(
        self, shards: Sequence[Shard], level: int, way: Way, exchanging: Exchanging = untold
    ) -> None:
        self.shards, self.level, self.way, self.exchanging = shards, level, way, exchanging
        members = len(shards[0].sizes)
        self.sizes = [sum(shard.elements(at) for shard in shards) for at in range(members)]
        self.present = True
        """True if the whole weights are in memory; they are freed once all shards are made."""
        self.arriving: tuple[Tensor, Pending] | None = None
        """The vector of a gather that was begun."""
        self.leaving: PendingPart | None = None
        """The sum of gradients that was begun."""
        self.known: Tensor | None = None
        """By shard, how many gradients the members had since the last ``settle``."""
        self.had: list[bool] = []
        """By shard, whether it had a gradient before."""
        self.flags = KeptFlags()
        """The numbers that are sent along (4)."""

    def _pack(self, tensors: Sequence[Tensor], known: Tensor) -> Tensor:
        """Return whole tensors as one vector, member by member, each part followed by flags for the
        gradients ``known`` here."""
        pieces = []
        for at in range(len(self.sizes)):
            for shard, tensor in zip(self.shards, tensors, strict=True):
                pieces.append(shard.rows(tensor, at).reshape(-1))
            pieces.append(known)
        return torch.cat(pieces)

    def begin_scatter(self) -> None:
        """Begin to add up the members' gradients, each member its own rows (4).

        Whole gradients are freed; if other sets add up other regions of the same weight, ``let_go``
        frees it later.
        """
        sizes = [size + len(self.shards) for size in self.sizes]
        vector = self._taken()
        with in_contact(_SCATTERING):
            self.leaving = self.way.begin_scatter(vector, sizes)

    def end_scatter(self) -> None:
        """Wait for a sum that was begun, and add it to this member's gradients."""
        if self.leaving is None:
            return
        with self.exchanging(), in_contact(_SCATTERING):
            part = self.leaving.wait()
        self.leaving = None
        known = part[-len(self.shards) :]
        if self.known is None:
            self.had = [shard.own.grad is not None for shard in self.shards]
        self.known = known.clone() if self.known is None else self.known + known
        sizes = [shard.own.numel() for shard in self.shards]
        arrived = part[: sum(sizes)].split(sizes)
        sums, summands = [], []
        for shard, numbers in zip(self.shards, arrived, strict=True):
            rows = numbers.view_as(shard.own).to(shard.own.dtype)
            if shard.own.grad is None:
                shard.own.grad = rows  # a view of the part, which nothing else uses
            else:
                sums.append(shard.own.grad)
                summands.append(rows)
        if sums:
            torch._foreach_add_(sums, summands)

    def settle(self, counts: Sequence[float]) -> None:
        """Take away gradients of weights for which no member had one (4); ``counts`` has the
        numbers in ``known``."""
        for shard, had, count in zip(self.shards, self.had, counts, strict=True):
            if not (had or count):
                shard.own.grad = None
        self.known = None

    def _taken(self) -> Tensor:
        """Return the whole gradients as one vector; they are freed before other members' parts
        arrive."""
        parameters = [shard.weight.parameter for shard in self.shards]
        whole = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        has_gradient = tuple(p.grad is not None for p in parameters)
        known = self.flags.at(has_gradient, whole[0].device, whole[0].dtype)
        self.let_go(all_of_them=False)
        return self._pack(whole, known)

    def let_go(self, *, all_of_them: bool = True) -> None:
        """Free whole gradients: of weights that this set has all of, or of all weights."""
        for shard in self.shards:
            if all_of_them or shard.summand.regions is None:
                shard.weight.parameter.grad = None

    @property
    def stage(self) -> int:
        """Return the only stage that uses the weights."""
        return self.shards[0].weight.stages[0]

    @property
    def has_begun(self) -> bool:
        """Return whether gradients have been sent since the last ``settle``."""
        return self.leaving is not None or self.known is not None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole weights."""
        parameters = [shard.weight.parameter for shard in self.shards]
        return sum(p.numel() * p.element_size() for p in parameters)

    @torch.no_grad()
    def begin_gather(self) -> None:
        """Begin to gather every member's rows, unless the whole weights are in memory or on their
        way."""
        if self.arriving is not None or (self.level == 3 and self.present):
            return
        own = [shard.own.detach() for shard in self.shards]
        dtype = functools.reduce(torch.promote_types, [rows.dtype for rows in own])
        whole = torch.empty(sum(self.sizes), dtype=dtype, device=own[0].device)
        at = offsets(self.sizes)[self.shards[0].member]
        count = self.sizes[self.shards[0].member]
        torch.cat([rows.reshape(-1) for rows in own], out=whole[at : at + count])
        with in_contact(_GATHERING):
            self.arriving = whole, self.way.begin_fill(whole, self.sizes)

    @torch.no_grad()
    def gather(self) -> None:
        """Gather every member's rows into the whole weights, or wait until they are gathered."""
        self.begin_gather()
        if self.arriving is None:
            return
        whole, pending = self.arriving
        self.arriving = None
        with self.exchanging(), in_contact(_GATHERING):
            pending.wait()
        if self.level == 3:
            self.present = True
            for shard in self.shards:
                data = shard.weight.parameter.data
                data.untyped_storage().resize_(data.numel() * data.element_size())
        parts = whole.split([rows.numel() for rows in self.places])
        # One call for all, since a launch takes longer than copying the rows of a small weight.
        torch._foreach_copy_(
            self.places, [part.view_as(rows) for part, rows in zip(parts, self.places, strict=True)]
        )

    @functools.cached_property
    def places(self) -> list[Tensor]:
        """Return the rows of the members in the whole weights, as views that stay valid while the
        weights are freed and gathered again."""
        # .data is used because autograd keeps the weight from the forward and must not treat a
        # gather as a change.
        return [
            shard.rows(shard.weight.parameter.data, member)
            for member in range(len(self.sizes))
            for shard in self.shards
        ]

    def discard(self) -> None:
        """Wait for a gather that was begun for a layer which then did not run, and drop it."""
        if self.arriving is not None:
            with in_contact(_GATHERING):
                self.arriving[1].wait()
            self.arriving = None

    def release(self) -> None:
        """Free the whole weights at level 3."""
        if self.level == 3 and self.present:
            self.present = False
            for shard in self.shards:
                shard.weight.parameter.data.untyped_storage().resize_(0)


def begin_scatters(sets: Sequence[ShardSet]) -> None:
    """Begin to add up the gradients of sets that may have regions of the same weights."""
    for shards in sets:
        shards.begin_scatter()
    for shards in sets:
        shards.let_go()


def settle_all(sets: Sequence[ShardSet]) -> None:
    """Take away gradients that no member of a set had, after one or several backwards.

    The host waits here for the device, once for all sets.
    """
    counted = [(shards, shards.known) for shards in sets if shards.known is not None]
    if not counted:
        return
    known = torch.cat([counts for _, counts in counted])
    await_device(known.device, _SCATTERING)
    numbers = iter(known.tolist())
    for shards, counts in counted:
        shards.settle(list(itertools.islice(numbers, counts.numel())))


def finish_scatters(sets: Sequence[ShardSet]) -> None:
    """Add up the gradients of sets that may have regions of the same weights.

    A scatter that has not begun begins while those of the set before it are added up.
    """
    for shards, following in itertools.zip_longest(sets, sets[1:]):
        for ready in (shards, following):
            if ready is not None and not ready.has_begun:
                ready.begin_scatter()
        shards.end_scatter()
    for shards in sets:
        shards.let_go()
    settle_all(sets)


def gather_all(sets: Sequence[ShardSet]) -> None:
    """Gather the rows of all sets, each while those of the set before it are put in place."""
    for shards, following in itertools.zip_longest(sets, sets[1:]):
        shards.begin_gather()
        if following is not None:
            following.begin_gather()
        shards.gather()
