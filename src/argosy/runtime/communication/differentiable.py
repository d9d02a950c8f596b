"""Run collectives that torch differentiates, for a forward whose devices share every tensor.

A gradient is in the state that is dual to its tensor's:

    tensor           gradient
    (1)  sharded     sharded equally
    (2)  whole       a partial sum: the devices' parts add up to it
    (3)  partial     whole

With (1) to (3) the backward of an operation on one device's parts, as torch derives it, is that
device's part of the backward of the whole operation, for every row of ``space.operations.rules``.
Between states, the backward of a collective is

    (4)  all-gather      reduce-scatter          (5)  reduce-scatter  all-gather
    (6)  all-reduce      all-reduce              (7)  all-to-all      all-to-all, reversed

and that of a slice pads with zeros. All devices of a group run the same calls in the same order, in
the backward too: a device without a part of a value must still keep the value in its graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from argosy.cost.group import CollectiveMethod, GroupCollective
from argosy.runtime.communication.collectives import GatherBy
from argosy.runtime.communication.exchange import GATHERS, GroupExchange
from argosy.space.operations.delivery import Conversion
from argosy.space.operations.sharding import PARTIAL, REPLICATED, State


def converted(
    exchange: GroupExchange,
    part: Tensor,
    shape: tuple[int, ...],
    step: Conversion,
    way: CollectiveMethod,
) -> Tensor:
    """Convert a tensor of a whole shape from one state to another by a collective; ``taken`` does
    it for slices."""
    if not part.is_floating_point():
        with exchange.exchanging():
            return exchange.convert(part, shape, step, way)
    gathers = step.kind is GroupCollective.ALL_GATHER
    done = Conversion(step.kind, step.before, REPLICATED) if gathers else step
    result: Tensor = _Converted.apply(part, exchange, shape, done, way)
    return taken(exchange, result, step.after) if gathers else result


def taken(exchange: GroupExchange, whole: Tensor, state: State) -> Tensor:
    """Return this device's part of a whole tensor."""
    if state == PARTIAL:
        return _OnFirst.apply(whole, exchange.rank == 0)
    return exchange.take(whole, state)


class _Converted(torch.autograd.Function):
    """A collective whose backward is given by (4) to (7)."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        exchange: GroupExchange,
        shape: tuple[int, ...],
        step: Conversion,
        way: CollectiveMethod,
    ) -> Tensor:
        ctx.exchange, ctx.shape, ctx.step, ctx.way = exchange, shape, step, way
        with exchange.exchanging():
            return exchange.convert(part, shape, step, way)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with ctx.exchange.exchanging():
            return (
                _backward(ctx.exchange, gradients[0], ctx.shape, ctx.step, ctx.way),
                None,
                None,
                None,
                None,
            )


def _backward(
    exchange: GroupExchange,
    gradient: Tensor,
    shape: tuple[int, ...],
    step: Conversion,
    way: CollectiveMethod,
) -> Tensor:
    match step.kind:
        case GroupCollective.ALL_REDUCE:
            return exchange.all_reduce(gradient)
        case GroupCollective.REDUCE_SCATTER:
            return exchange.all_gather(
                gradient, shape, step.after, GATHERS.get(way, GatherBy.ALL_TO_ALL)
            )
        case GroupCollective.ALL_GATHER:
            return exchange.reduce_scatter(gradient, step.before)
    return exchange.all_to_all(gradient, shape, step.after, step.before)


class _OnFirst(torch.autograd.Function):
    """A function that makes a partial sum of a whole tensor: the first device has it, the others
    have zeros."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, is_first: bool) -> Tensor:
        ctx.is_first = is_first
        return whole.clone() if is_first else torch.zeros_like(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] if ctx.is_first else torch.zeros_like(gradients[0]), None
