"""Gather weights before the layers of a stage that need them (ZeRO 3), ahead of time, and scatter
gradients after their backwards (ZeRO 2 and 3).

With s_i the bytes of layer i's weights and S the largest of them:

    (1)  when layer i begins, the gathers of the layers that follow it begin too, in the order in
         which they are needed, as long as their bytes are at most S together; they run while layer
         i computes
    (2)  the order goes on from the end of an action to the next action, if that is of this stage
    (3)  a layer that is needed again next, as the last one is by a forward and then its backward,
         stays; its bytes count in (1)
    (4)  in a backward, weights are freed before gradients are scattered
    (5)  gradients of layer i travel while the next layer computes, and are added up when that has
         its own, if ``cost.scatter`` finds room for them; gathers begin only in what room is left

So a stage holds at most 2 S of weights in a forward, and in a backward no more than
``cost.memory``, (8), counts. All members of a stage take the same decisions, since these depend on
sizes and schedule alone; so they begin their gathers and scatters in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from argosy.cost.memory import times_whole
from argosy.cost.scatter import travel_beside
from argosy.runtime.weights.sharding import ShardSet, begin_scatters, settle_all
from argosy.schedule import ActionKind


class WeightGate:
    """A gate that gathers and scatters around the layers of a stage."""

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
        self.gathered = [at for at, own in enumerate(sets) if own and own[0].level == 3]
        """The layers whose weights are gathered."""
        self.num_bytes = [sum(shards.num_bytes for shards in own) for own in sets]
        self.largest = max((self.num_bytes[at] for at in self.gathered), default=0)
        shards = list(itertools.chain.from_iterable(sets))
        level = max((one.level for one in shards), default=0)
        holders = max((len(one.sizes) for one in shards), default=1)
        self.beside = travel_beside(self.num_bytes, level, holders)
        """By layer, whether its gradients travel while the next layer computes (5)."""
        self.room = times_whole(level, holders, backward=True) * max(self.num_bytes, default=0)
        """The bytes that a backward may hold of whole weights and gradients."""
        self.travelling: int | None = None
        """The layer whose gradients are on their way."""
        self.following: ActionKind | None = None
        """The action after the current one, if both are of this stage."""
        self.kept: int | None = None
        """The layer that stays by (3)."""

    def run(self, index: int, layer: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        if not self.sets[index]:
            return layer(*arguments, **keywords)
        arguments, keywords = _after_backward(self, index, (arguments, keywords))
        self.open(index, ActionKind.FORWARD)
        result = layer(*arguments, **keywords)
        self._release(index)
        if index not in self.gathered:
            return result
        return tree_map(lambda leaf: _apply(_Before, (self, index), leaf), result)

    def open(self, index: int, kind: ActionKind) -> None:
        """Gather a layer's weights, and begin the gathers of those that follow by (1) to (3)."""
        if index not in self.gathered:
            return
        for shards in self.sets[index]:
            shards.gather()
        self.kept = None
        order = list(self._order(index, kind))
        room = self._room_ahead(index, order[0] if order else None, kind)
        for position, later in enumerate(order):
            room -= self.num_bytes[later]
            if later == index and position == 0:
                self.kept = index
            elif room < 0 or later == index:
                break
            else:
                for shards in self.sets[later]:
                    shards.begin_gather()

    def _room_ahead(self, index: int, following: int | None, kind: ActionKind) -> float:
        """Return the bytes of gathers that may run while a layer computes, by (1) and (5)."""
        held = 2 * self.num_bytes[self.travelling] if self.travelling is not None else 0
        if kind is ActionKind.FORWARD:
            return min(self.largest, self.room - held - self.num_bytes[index])
        room = min(self.largest, self.room - held - 2 * self.num_bytes[index])
        if self.beside[index] and following is not None:
            later = self.num_bytes[following]
            room = min(room, self.room - 2 * self.num_bytes[index] - later)
        return room

    def _order(self, index: int, kind: ActionKind) -> Iterator[int]:
        """Yield the layers that are needed after a layer, in order, by (2)."""
        layers = self._layers(kind)
        yield from layers[layers.index(index) + 1 :]
        if self.following is not None:
            yield from self._layers(self.following)

    def _layers(self, kind: ActionKind) -> list[int]:
        return self.gathered if kind is ActionKind.FORWARD else self.gathered[::-1]

    def close(self, index: int) -> None:
        """Handle that a layer has its gradients; all layers behind it have theirs, too."""
        self._release(index)
        if self.scatters:
            self._scatter(index)

    def finish(self) -> None:
        """Scatter and free, at the end of a backward, what no layer's input gradient has
        triggered."""
        for index in range(len(self.sets)):
            self._release(index)
        self._scatter(0)
        self.left = len(self.sets)
        if self.following is not ActionKind.FORWARD:
            self._add_up()
        if self.following is None:  # an update may come next, and change what was gathered
            settle_all(list(itertools.chain.from_iterable(self.sets)))
            self.discard()

    def discard(self) -> None:
        """Drop gathers that were begun for layers which then did not run."""
        for shards in itertools.chain.from_iterable(self.sets):
            shards.discard()

    def _release(self, index: int) -> None:
        for shards in self.sets[index] if index != self.kept else ():
            shards.release()

    def _scatter(self, first: int) -> None:
        """Scatter the gradients of all remaining layers down to ``first``
        (``sharding``, (4))."""
        for index in reversed(range(first, self.left)):
            if not self.sets[index]:
                continue
            self._add_up()
            begin_scatters(self.sets[index])
            self.travelling = index
            if not self.beside[index]:
                self._add_up()
        self.left = min(self.left, first)

    def _add_up(self) -> None:
        """Wait for the gradients that are on their way, and add them up."""
        if self.travelling is not None:
            for shards in self.sets[self.travelling]:
                shards.end_scatter()
            self.travelling = None


def _after_backward(gate: WeightGate, index: int, arguments: Any) -> Any:
    """Call the gate once all gradients of a layer's inputs are computed, since then its weights
    have theirs."""
    waiting = _Countdown(lambda: gate.close(index))
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
    def forward(ctx: Any, leaf: Tensor, place: tuple[WeightGate, int]) -> Tensor:
        ctx.place = place
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate, index = ctx.place
        gate.open(index, ActionKind.BACKWARD)
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
