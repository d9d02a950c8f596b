"""Finish gradients after the last backward of a step: sum them over all ranks that hold the weight,
compute their norm, and clip them.

With g the gradient of the whole batch's mean loss, each weight counted once:

    (1)  g of a weight   = sum over the ranks that hold it (replicas of its stage, and of others if
                           it is tied)
    (2)  norm            = sqrt(sum of squares of all g), each element counted on one rank
    (3)  clipped         = g min(1, limit / norm)
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from argosy.runtime.communication.ledger import MOST_BUCKETS
from argosy.runtime.stages.parameters import Weight
from argosy.runtime.weights.overlap import EarlyBuckets, GradientEvents, GradientSum, Summand
from argosy.runtime.weights.powersgd import FactoredSum
from argosy.runtime.weights.sharding import ShardSet, finish_scatters, gather_all
from argosy.runtime.weights.summing import Way, is_on_device


class EarlyRules(NamedTuple):
    """Rules that decide which sums begin during the last backward on a GPU."""

    inside_layers: Collection[tuple[int, ...]] = ()
    """The sets of ranks that exchange tensors inside layers."""
    alone: Collection[int] = ()
    """The stages whose replicas compute alone, with all weights."""


NO_RULES = EarlyRules()


class Gradients:
    """The weights that a rank holds, grouped by the ranks that share them."""

    def __init__(
        self,
        weights: Sequence[Weight],
        shared: Sequence[tuple[Way | None, tuple[int, ...], Sequence[Summand]]],
        shards: Sequence[ShardSet],
        rank: int,
        *,
        powersgd: int = 0,
        early: EarlyRules = NO_RULES,
    ) -> None:
        """Group the weights; ``powersgd`` is the rank of the matrices as which gradients are
        summed, 0 to sum them unchanged."""
        self.weights = weights
        """The weights of which this rank updates all that it holds."""
        self.shared = shared
        """For these weights, in groups: how the holders sum, their ranks, and the weights; a group
        may be this rank alone."""
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
                on_device = way if is_on_device(way) else None
                is_early = (
                    on_device is not None
                    and not shards
                    and ranks not in early.inside_layers
                    and _is_of_one_stage(summands)
                )
                self.sums.append(
                    GradientSum(way, summands, self.filled, on_device=on_device, is_early=is_early)
                )
        self.scattered = [shard_set for shard_set in shards if shard_set.level == 1]
        """The sets whose gradients are scattered once per step."""
        self.under_way: deque[ShardSet] = deque()
        """The sets whose scatters have begun early."""
        alone = [shard_set for shard_set in self.scattered if shard_set.stage in early.alone]
        self.orders = list(_scattered_early(alone, self.under_way))

    @property
    def factored(self) -> list[FactoredSum]:
        """Return the sums by PowerSGD, which keep errors from step to step."""
        return [gradient_sum for gradient_sum in self.sums if isinstance(gradient_sum, FactoredSum)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer updates."""
        whole = [weight.parameter for weight in self.weights]
        own = [shard.own for shards in self.shards for shard in shards.shards]
        return [parameter for parameter in (*whole, *own) if parameter.requires_grad]

    def reduce(self) -> None:
        """Sum gradients over their holders by (1)."""
        # Gradients of higher levels have been sent after every backward.
        finish_scatters(self.scattered)
        self.under_way.clear()
        for order in self.orders:
            order.reset()
        for gradient_sum in self.sums:
            gradient_sum.finish()
        self.filled.clear()

    def close(self) -> None:
        """Release the weights, since another plan has other sums."""
        for order in (*self.sums, *self.orders):
            order.close()

    def events(self, added: Callable[[int], None]) -> GradientEvents:
        """Return the functions that an executor calls as gradients add up."""
        return GradientEvents(
            added=added, before_last=self.before_last_backward, after_last=self.after_last_backward
        )

    def before_last_backward(self, stage: int) -> None:
        """Prepare sums for the last backward of a stage in this step."""
        for order in (*self.sums, *self.orders):
            order.before_last_backward(stage)

    def after_last_backward(self, stage: int) -> None:
        """Begin sums of a stage whose gradients of this step have all been added up."""
        for order in (*self.sums, *self.orders):
            order.after_last_backward(stage)

    def square_sum(self, device: torch.device) -> Tensor:
        """Return this rank's part of the square of (2)."""
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
        """Multiply all gradients by a factor, to clip them (3) or to undo the scale of the loss."""
        gradients = [
            parameter.grad for parameter in self.parameters() if parameter.grad is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def after_update(self) -> None:
        """Gather the rows that other ranks have updated."""
        gather_all([shards for shards in self.shards if shards.level < 3])

    def clear(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None


def _is_of_one_stage(summands: Sequence[Summand]) -> bool:
    """Return whether the whole weights of one stage are summed."""
    is_whole = all(summand.regions is None for summand in summands)
    return is_whole and len(summands[0].weight.stages) == 1


def _scattered_early(
    sets: Sequence[ShardSet], under_way: deque[ShardSet]
) -> Iterator[EarlyBuckets]:
    """Yield the orders, by stage, in which a GPU begins to scatter gradients of ZeRO 1 during the
    last backward."""
    by_stage: dict[int, list[ShardSet]] = {}
    for shards in sets:
        if is_on_device(shards.way):
            by_stage.setdefault(shards.stage, []).append(shards)
    for stage, own in by_stage.items():
        last_first = own[::-1]
        weights = [[shard.summand.parameter for shard in shards.shards] for shards in last_first]
        begins = [functools.partial(_begin_scatter, shards, under_way) for shards in last_first]
        yield EarlyBuckets(stage, weights, begins, is_early=True)


def _begin_scatter(shards: ShardSet, under_way: deque[ShardSet]) -> None:
    """Begin a scatter after the oldest one that is under way was added up, if there are
    ``MOST_BUCKETS``, because each needs two vectors.

    Only the device waits for it. All members of a stage begin their scatters in one order, so each
    of them has begun the oldest one before it waits for another.
    """
    if len(under_way) == MOST_BUCKETS:
        under_way.popleft().end_scatter()
    shards.begin_scatter()
    under_way.append(shards)
