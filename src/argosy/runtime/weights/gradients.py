"""Gradients after the last backward of a step: summed over everyone who holds the weight, measured,
clipped.

With g the gradient of the whole batch's mean loss, each weight counted once:

    (1)  g of a weight   = sum over the ranks that hold it (replicas of its stage, and of others where it is tied)
    (2)  norm            = sqrt(sum of squares of all g), each element counted on one rank
    (3)  clipped         = g min(1, limit / norm)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from argosy.runtime.stages.parameters import Weight
from argosy.runtime.weights.overlap import GradientEvents, GradientSum, Summand
from argosy.runtime.weights.powersgd import FactoredSum
from argosy.runtime.weights.sharding import ShardSet, scatter_all
from argosy.runtime.weights.summing import Way, is_on_device


class Gradients:
    """The weights of a rank, by who else holds them."""

    def __init__(
        self,
        weights: Sequence[Weight],
        shared: Sequence[tuple[Way | None, tuple[int, ...], Sequence[Summand]]],
        shards: Sequence[ShardSet],
        rank: int,
        *,
        powersgd: int = 0,
    ) -> None:
        """``powersgd``: rank of the matrices as which gradients are summed; 0: as they are."""
        self.weights = weights
        """Those of which this rank updates all that it holds."""
        self.shared = shared
        """(how holders sum, who they are, of which weights) for these, by several ranks or this one
        alone."""
        self.shards = shards
        self.rank = rank
        self.filled: set[Tensor] = set()
        self.sums: list[GradientSum | FactoredSum] = []
        for way, ranks, summands in shared:
            if way is not None and powersgd:
                assert all(summand.regions is None for summand in summands), (
                    "plans with PowerSGD divide no matrix"
                )
                held = [summand.weight for summand in summands]
                self.sums.append(FactoredSum(way, held, powersgd, ranks.index(rank), len(ranks)))
            elif way is not None:
                is_early = not shards and self._is_early(way, summands)
                self.sums.append(GradientSum(way, summands, self.filled, is_early=is_early))

    @property
    def factored(self) -> list[FactoredSum]:
        """The sums by PowerSGD, which keep errors from step to step."""
        return [gradient_sum for gradient_sum in self.sums if isinstance(gradient_sum, FactoredSum)]

    def _is_early(self, way: Way, summands: Sequence[Summand]) -> bool:
        return len(summands[0].weight.stages) == 1 and is_on_device(way)

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates."""
        whole = [weight.parameter for weight in self.weights]
        return [
            p
            for p in (*whole, *(shard.own for s in self.shards for shard in s.shards))
            if p.requires_grad
        ]

    def reduce(self) -> None:
        """(1)."""
        scatter_all(
            [shards for shards in self.shards if shards.level == 1]
        )  # others leave after every backward
        for gradient_sum in self.sums:
            gradient_sum.finish()
        self.filled.clear()

    def close(self) -> None:
        """Let go of the weights: another plan has other sums."""
        for gradient_sum in self.sums:
            gradient_sum.close()

    def events(self, added: Callable[[int], None]) -> GradientEvents:
        """What an executor calls as gradients add up."""
        return GradientEvents(
            added=added, before_last=self.before_last_backward, after_last=self.after_last_backward
        )

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
        counted = [
            summand
            for _, ranks, summands in self.shared
            if ranks[0] == self.rank
            for summand in summands
        ]
        known = [summand for summand in counted if summand.parameter.grad is not None]
        own: list[Tensor | None] = [
            gradient for summand in known for gradient in summand.gradients()
        ]
        own += [shard.own.grad for shards in self.shards for shard in shards.shards]
        norm = nn.utils.get_total_norm(
            [gradient for gradient in own if gradient is not None and gradient.numel()]
        )
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
