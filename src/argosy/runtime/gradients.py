"""Gradients after the last backward of a step: summed over everyone who holds the weight, measured, clipped.

With g the gradient of the whole batch's mean loss, each weight counted once:

    (1)  g of a weight   = sum over the ranks that hold it (replicas of its stage, and of others where it is tied)
    (2)  norm            = sqrt(sum of squares of all g), each element counted on one rank
    (3)  clipped         = g min(1, limit / norm)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from argosy.runtime.ledger import BUCKET_BYTES, MOST_BUCKETS
from argosy.runtime.parameters import Weight
from argosy.runtime.sharding import ShardSet
from argosy.runtime.summing import Way

_Thing = TypeVar("_Thing")


class Gradients:
    """The weights of a rank, by who else holds them."""

    def __init__(
        self,
        shared: Sequence[tuple[Way | None, int, Sequence[Weight]]],
        shards: Sequence[ShardSet],
        rank: int,
    ) -> None:
        self.shared = shared
        """(how holders sum, the first of them, weights) for what is held whole, by several ranks or this one alone."""
        self.shards = shards
        self.rank = rank

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates."""
        whole = [weight.parameter for _, _, weights in self.shared for weight in weights]
        return [p for p in (*whole, *(shard.own for s in self.shards for shard in s.shards)) if p.requires_grad]

    def reduce(self) -> None:
        """(1)."""
        for shards in self.shards:
            if shards.level == 1:  # the others leave after every backward
                shards.scatter_gradients()
        for way, _, weights in self.shared:
            if way is not None:
                _sum(way, [weight.parameter for weight in weights if weight.parameter.requires_grad])

    def square_sum(self, device: torch.device) -> Tensor:
        """This rank's part of (2), squared."""
        own = [w.parameter.grad for _, first, weights in self.shared if first == self.rank for w in weights]
        own += [shard.own.grad for shards in self.shards for shard in shards.shards]
        norm = nn.utils.get_total_norm([gradient for gradient in own if gradient is not None and gradient.numel()])
        return norm.double().square().to(device)

    def scale(self, factor: Tensor | float) -> None:
        """(3), and the way back from a scaled loss."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def after_update(self) -> None:
        """Rows that others have updated."""
        for shards in self.shards:
            if shards.level < 3:
                shards.gather()

    def clear(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None


def _sum(way: Way, parameters: list[nn.Parameter]) -> None:
    """Sum the gradients of ``parameters`` over their holders, in buckets that are under way together.

    One that no holder has stays away: an optimizer lets such a weight be, and would not one whose gradient is zero.
    """
    if not parameters:
        return
    known = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    finish_known = way.begin(known)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    under_way: deque[tuple[list[Tensor], Tensor, Callable[[], object]]] = deque()

    def finish_oldest() -> None:
        bucket, flat, finish = under_way.popleft()
        finish()
        for gradient, total in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(total)

    for bucket in in_buckets([p.grad for p in parameters if p.grad is not None], lambda gradient: gradient):
        if len(under_way) == MOST_BUCKETS:
            finish_oldest()
        flat = _flatten_dense_tensors(bucket)
        under_way.append((bucket, flat, way.begin(flat)))
    while under_way:
        finish_oldest()
    finish_known()
    for parameter, holders in zip(parameters, known.tolist(), strict=True):
        if not holders:
            parameter.grad = None


def in_buckets(things: Sequence[_Thing], tensor_of: Callable[[_Thing], Tensor]) -> list[list[_Thing]]:
    """Things whose tensors have one dtype, in order, up to ``BUCKET_BYTES`` together."""
    buckets: list[list[_Thing]] = []
    space, dtype = 0, None
    for thing in things:
        tensor = tensor_of(thing)
        size = tensor.numel() * tensor.element_size()
        if size > space or tensor.dtype != dtype:
            buckets.append([])
            space, dtype = BUCKET_BYTES, tensor.dtype
        buckets[-1].append(thing)
        space -= size
    return buckets
