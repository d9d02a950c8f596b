"""Gradients after the last backward of a step: summed over everyone who holds the weight, measured, clipped.

With g the gradient of the whole batch's mean loss, each weight counted once:

    (1)  g of a weight   = sum over the ranks that hold it (replicas of its stage, and of others where it is tied)
    (2)  norm            = sqrt(sum of squares of all g), each element counted on one rank
    (3)  clipped         = g min(1, limit / norm)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from argosy.runtime.overlap import GradientEvents, GradientSum
from argosy.runtime.parameters import Weight
from argosy.runtime.sharding import ShardSet
from argosy.runtime.summing import Way, is_on_device


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
        self.sums = [
            GradientSum(way, weights, is_early=not shards and len(weights[0].stages) == 1 and is_on_device(way))
            for way, _, weights in shared
            if way is not None
        ]

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates."""
        whole = [weight.parameter for _, _, weights in self.shared for weight in weights]
        return [p for p in (*whole, *(shard.own for s in self.shards for shard in s.shards)) if p.requires_grad]

    def reduce(self) -> None:
        """(1)."""
        for shards in self.shards:
            if shards.level == 1:  # the others leave after every backward
                shards.scatter_gradients()
        for gradient_sum in self.sums:
            gradient_sum.finish()

    def close(self) -> None:
        """Let go of the weights: another plan has other sums."""
        for gradient_sum in self.sums:
            gradient_sum.close()

    def events(self, added: Callable[[int], None]) -> GradientEvents:
        """What an executor calls as gradients add up."""
        return GradientEvents(added=added, before_last=self.before_last_backward, after_last=self.after_last_backward)

    def before_last_backward(self, stage: int) -> None:
        """The last backward of a stage in this step is about to begin."""
        for gradient_sum in self.sums:
            gradient_sum.before_last_backward(stage)

    def after_last_backward(self, stage: int) -> None:
        """All gradients of a stage in this step have been added up."""
        for gradient_sum in self.sums:
            gradient_sum.after_last_backward(stage)

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
