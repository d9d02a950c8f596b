"""Divide optimizer state, gradients and weights among the replicas of a stage (ZeRO): each keeps
only some rows.

Of a weight with R rows (its first dim), member i of the n replicas keeps R_i rows, in proportion to
the replicas' weights, with sum R; the R_i may differ and may be 0. Several weights are sent as one
vector, in the widest of their dtypes: all that member 0 keeps, then all that member 1 keeps, and so
on.

    (1)  level 1: the sum of the gradients is scattered once per step, in buckets; after the update
         rows are gathered
    (2)  level 2: it is scattered after every layer's backward, so that whole gradients never add up
    (3)  level 3: weights are gathered before a layer's forward and backward and freed after it
    (4)  only some members may have a gradient of a weight (an expert that none of a member's
         samples was routed to), so no member decides on its own: all scatter equally often, from
         the last layer to the first, and the number of members that have one is sent along; if it
         is zero, the optimizer gets no gradient

Updates must be element by element (SGD, Adam and similar): an optimizer sees rows as parameters of
their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from argosy.runtime.communication.boxes import TensorBox
from argosy.runtime.communication.collectives import offsets
from argosy.runtime.communication.marks import Exchanging, untold
from argosy.runtime.processes.failure import in_contact
from argosy.runtime.processes.world import await_device
from argosy.runtime.weights.overlap import Summand
from argosy.runtime.weights.summing import Way


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

    def _pack(self, tensors: Sequence[Tensor], known: Tensor) -> Tensor:
        """Return whole tensors as one vector, member by member, each part followed by flags for the
        gradients ``known`` here."""
        pieces = []
        for at in range(len(self.sizes)):
            for shard, tensor in zip(self.shards, tensors, strict=True):
                pieces.append(shard.rows(tensor, at).reshape(-1))
            pieces.append(known)
        return torch.cat(pieces)

    def scatter_gradients(self) -> None:
        """Add up the members' gradients, each member its own rows (4).

        Whole gradients are freed; if other sets add up other regions of the same weight, ``let_go``
        frees it later.
        """
        num = len(self.shards)
        with (
            self.exchanging(),
            in_contact("while gradients were scattered over the replicas of a stage"),
        ):
            part = self.way.scatter(self._taken(), [size + num for size in self.sizes])
            await_device(part.device, "while gradients were scattered over the replicas of a stage")
        at = 0
        for shard, count in zip(self.shards, part[-num:].tolist(), strict=True):
            rows = part[at : at + shard.own.numel()].view_as(shard.own).to(shard.own.dtype)
            at += shard.own.numel()
            if not count:
                continue
            if shard.own.grad is None:
                shard.own.grad = rows.clone()
            else:
                shard.own.grad += rows

    def _taken(self) -> Tensor:
        """Return the whole gradients as one vector; they are freed before other members' parts
        arrive."""
        parameters = [shard.weight.parameter for shard in self.shards]
        whole = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        known = whole[0].new_tensor([float(p.grad is not None) for p in parameters])
        self.let_go(all_of_them=False)
        return self._pack(whole, known)

    def let_go(self, *, all_of_them: bool = True) -> None:
        """Free whole gradients: of weights that this set has all of, or of all weights."""
        for shard in self.shards:
            if all_of_them or shard.summand.regions is None:
                shard.weight.parameter.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Gather every member's rows into the whole weights."""
        if self.level == 3 and self.present:
            return
        own = torch.cat([shard.own.detach().reshape(-1) for shard in self.shards])
        with (
            self.exchanging(),
            in_contact("while weights were gathered from the replicas of a stage"),
        ):
            whole = self.way.gather(own, self.sizes)
        if self.level == 3:
            self.present = True
            for shard in self.shards:
                data = shard.weight.parameter.data
                data.untyped_storage().resize_(data.numel() * data.element_size())
        at = 0
        for member in range(len(self.sizes)):
            for shard in self.shards:
                count = shard.elements(member)
                # .data is used because autograd keeps the weight from the forward and must not
                # treat this as a change.
                rows = shard.rows(shard.weight.parameter.data, member)
                rows.copy_(whole[at : at + count].view_as(rows))
                at += count

    def release(self) -> None:
        """Free the whole weights at level 3."""
        if self.level == 3 and self.present:
            self.present = False
            for shard in self.shards:
                shard.weight.parameter.data.untyped_storage().resize_(0)


class WeightGate:
    """A gate that gathers and scatters around the layers of a stage by (2) to (4)."""

    def __init__(self, sets: Sequence[Sequence[ShardSet]]) -> None:
        self.sets = sets
        """Shard sets by layer of the stage; several if tensor-parallel groups of the stage share
        weights differently."""
        self.scatters = True
        """True if gradients are sent after each layer's backward; False while weight gradients are
        deferred."""
        self.left = len(sets)
        """The number of layers, counted from the first, whose gradients have not been sent in this
        backward."""

    def run(self, index: int, layer: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        sets = self.sets[index]
        if not sets:
            return layer(*arguments, **keywords)
        arguments, keywords = _after_backward(self, index, (arguments, keywords))
        is_gathered = sets[0].level == 3
        if is_gathered:
            _gather(sets)
        result = layer(*arguments, **keywords)
        _release(sets)
        return tree_map(lambda leaf: _apply(_Before, sets, leaf), result) if is_gathered else result

    def finish(self) -> None:
        """Scatter and free, at the end of a backward, what no layer's input gradient has
        triggered."""
        self._scatter(0)
        self.left = len(self.sets)
        for sets in self.sets:
            _release(sets)

    def after(self, index: int) -> None:
        """Handle that a layer has its gradients; all layers behind it have theirs, too."""
        if self.scatters:
            self._scatter(index)
        _release(self.sets[index])

    def _scatter(self, first: int) -> None:
        """Scatter the gradients of all remaining layers down to ``first`` (4)."""
        for sets in reversed(self.sets[first : self.left]):
            scatter_all(sets)
        self.left = min(self.left, first)


def scatter_all(sets: Sequence[ShardSet]) -> None:
    """Add up the gradients of sets that may have regions of the same weights."""
    for shards in sets:
        shards.scatter_gradients()
    for shards in sets:
        shards.let_go()


def _gather(sets: Sequence[ShardSet]) -> None:
    for shards in sets:
        shards.gather()


def _release(sets: Sequence[ShardSet]) -> None:
    for shards in sets:
        shards.release()


def _after_backward(gate: WeightGate, index: int, arguments: Any) -> Any:
    """Call the gate once all gradients of a layer's inputs are computed, since then its weights
    have theirs."""
    waiting = _Countdown(lambda: gate.after(index))
    return tree_map(lambda leaf: _apply(_After, waiting, leaf), arguments)


def _apply(function: Any, what: Any, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.requires_grad or not torch.is_grad_enabled():
        return leaf
    if isinstance(what, _Countdown):
        what.count += 1
    return function.apply(leaf, what)


class _Countdown:
    """A counter that calls a function when as many gradients have arrived as were announced."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.count = 0

    def arrived(self) -> None:
        self.count -= 1
        if self.count == 0:
            self.call()


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, sets: Sequence[ShardSet]) -> Tensor:
        ctx.sets = sets
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _gather(ctx.sets)
        return gradients[0], None


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, waiting: _Countdown) -> Tensor:
        ctx.waiting = waiting
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.waiting.arrived()
        return gradients[0], None
