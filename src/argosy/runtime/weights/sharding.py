"""ZeRO: replicas of a stage that each keep only some rows of the optimizer state, the gradients,
the weights.

Of a weight with R rows (its first dim), member i of the n replicas keeps R_i rows, in proportion to
the replicas' weights and never losing one; the R_i may differ and may be 0. Several weights travel
as one vector, in the widest of their dtypes: all that member 0 keeps, then all that member 1 keeps,
...

    (1)  level 1: the sum of the gradients is scattered once per step, in buckets; after the update
         rows are gathered
    (2)  level 2: it is scattered after every layer's backward, so that whole gradients never add up
    (3)  level 3: weights are gathered before a layer's forward and backward and let go after
    (4)  whether a member has a gradient of a weight may differ between members (an expert that none
         of its samples went to), so nobody decides by its own: all scatter as often, from the last
         layer to the first, and how many members have one travels along; where none has, an
         optimizer finds none

Updates must be element by element (SGD, Adam and their kin): an optimizer sees rows as parameters
of their own.
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
    """One member's rows of one weight, or of a region of it."""

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
        """``sizes``: rows that each member keeps; ``boxes``: where this one's lie; ``rows``: this
        one's, of a weight of level 3 that is not in memory whole."""
        self.summand, self.weight, self.member, self.boxes = summand, summand.weight, member, boxes
        self.sizes = list(sizes)
        if rows is None:
            begin = offsets(self.sizes)[member]
            part = summand.of(summand.parameter.detach())[0]
            rows = part[begin : begin + self.sizes[member]]
            rows = rows.clone() if level == 3 else rows
        self.own = nn.Parameter(rows, requires_grad=summand.parameter.requires_grad)
        """What the optimizer updates: a view of the weight, or at level 3 a tensor of its own."""
        self.row_shape = tuple(rows.shape[1:])

    def size(self) -> tuple[int, torch.dtype]:
        """Elements of all members, and their dtype."""
        return self.summand.size()

    def elements(self, member: int) -> int:
        return self.sizes[member] * math.prod(self.row_shape)

    def rows(self, tensor: Tensor, member: int) -> Tensor:
        """A member's rows of what this rank holds; a view."""
        begin = offsets(self.sizes)[member]
        return self.summand.of(tensor)[0][begin : begin + self.sizes[member]]


class ShardSet:
    """Weights whose rows travel together."""

    def __init__(
        self, shards: Sequence[Shard], level: int, way: Way, exchanging: Exchanging = untold
    ) -> None:
        self.shards, self.level, self.way, self.exchanging = shards, level, way, exchanging
        members = len(shards[0].sizes)
        self.sizes = [sum(shard.elements(at) for shard in shards) for at in range(members)]
        self.present = True
        """Whether the whole weights are in memory; they are let go once all shards are made."""

    def _pack(self, tensors: Sequence[Tensor], known: Tensor) -> Tensor:
        """Whole tensors as one vector, member by member, each part with which of them are ``known``
        here."""
        pieces = []
        for at in range(len(self.sizes)):
            for shard, tensor in zip(self.shards, tensors, strict=True):
                pieces.append(shard.rows(tensor, at).reshape(-1))
            pieces.append(known)
        return torch.cat(pieces)

    def scatter_gradients(self) -> None:
        """(4): add the members' gradients up, each member its own rows; whole gradients are let go,
        those of weights of which others add up other regions by ``let_go``."""
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
        """The whole gradients as one vector; they are let go before what others send is there."""
        parameters = [shard.weight.parameter for shard in self.shards]
        whole = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        known = whole[0].new_tensor([float(p.grad is not None) for p in parameters])
        self.let_go(all_of_them=False)
        return self._pack(whole, known)

    def let_go(self, *, all_of_them: bool = True) -> None:
        """Let whole gradients go: of weights that this set has all of, or of all."""
        for shard in self.shards:
            if all_of_them or shard.summand.regions is None:
                shard.weight.parameter.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Bring every member's rows into the whole weights."""
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
                # .data, because autograd keeps the weight from the forward and must not take this
                # for a change
                rows = shard.rows(shard.weight.parameter.data, member)
                rows.copy_(whole[at : at + count].view_as(rows))
                at += count

    def release(self) -> None:
        """Level 3: let the whole weights go."""
        if self.level == 3 and self.present:
            self.present = False
            for shard in self.shards:
                shard.weight.parameter.data.untyped_storage().resize_(0)


class WeightGate:
    """(2) to (4): what happens around the layers of a stage."""

    def __init__(self, sets: Sequence[Sequence[ShardSet]]) -> None:
        self.sets = sets
        """By layer of the stage; several if tensor-parallel groups of the stage share weights
        differently."""
        self.scatters = True
        """Whether gradients leave after each layer's backward; not while weight gradients are put
        off."""
        self.left = len(sets)
        """Layers whose gradients have not left in this backward: those before this one."""

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
        """At the end of a backward: what no layer's input gradient has triggered."""
        self._scatter(0)
        self.left = len(self.sets)
        for sets in self.sets:
            _release(sets)

    def after(self, index: int) -> None:
        """A layer has its gradients, and so have all behind it."""
        if self.scatters:
            self._scatter(index)
        _release(self.sets[index])

    def _scatter(self, first: int) -> None:
        """(4), down to a layer."""
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
    """Once all gradients of a layer's inputs are there, its weights have theirs."""
    waiting = _Countdown(lambda: gate.after(index))
    return tree_map(lambda leaf: _apply(_After, waiting, leaf), arguments)


def _apply(function: Any, what: Any, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.requires_grad or not torch.is_grad_enabled():
        return leaf
    if isinstance(what, _Countdown):
        what.count += 1
    return function.apply(leaf, what)


class _Countdown:
    """Calls when as many gradients have come as were announced."""

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
