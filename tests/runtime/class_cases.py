"""What ranks do in the tests of losses over classes that devices divide."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.runtime.communication.exchange import GroupExchange
from argosy.runtime.graphs.classes import HeldRows, normalised, picked_losses
from argosy.space.operations.sharding import sharded, unit_counts


class Problem(NamedTuple):
    """Logits and targets, and how torch's loss is called."""

    shape: tuple[int, ...]
    """Of the logits: classes are in dim 1, or in dim 0 if there is no other."""
    dtype: torch.dtype = torch.float64
    summed: bool = True
    is_weighted: bool = False
    ignored: float = 0.0
    """Share of the targets that do not count."""

    @property
    def dim(self) -> int:
        return min(1, len(self.shape) - 1)

    def drawn(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logits, targets and the weights of classes."""
        draw = torch.Generator().manual_seed(len(self.shape))
        count = self.shape[self.dim]
        places = self.shape[:1] * self.dim + self.shape[2:]
        x = 4 * torch.randn(self.shape, dtype=torch.float64, generator=draw)
        targets = torch.randint(0, count, places, generator=draw)
        dropped = torch.rand(places, generator=draw) < self.ignored
        weights = torch.rand(count, dtype=torch.float64, generator=draw) + 0.1
        targets = targets.masked_fill(dropped, -100)
        return x.to(self.dtype), targets, weights.to(self.dtype) if self.is_weighted else None


def gradient_of(losses: Tensor) -> Tensor:
    """Return the gradient of the losses that the rest of a program would give: other ones for each
    position."""
    return torch.linspace(0.5, 1.5, max(losses.numel(), 1), dtype=losses.dtype).view(losses.shape)


def divided(problem: Problem, ratios: tuple[float, ...]) -> dict[str, Any]:
    """On every rank: return the losses, the counted weight, and the gradient of its own logits."""
    rank, dim = dist.get_rank(), problem.dim
    x, targets, weights = problem.drawn()
    exchange, count = GroupExchange(ratios), x.shape[dim]
    counts = unit_counts(count, ratios)
    first = sum(counts[:rank])
    own = exchange.take(x, sharded(dim, count)).clone().requires_grad_()
    logarithms = normalised(exchange, own, dim)
    reduction = 2 if problem.summed else 0
    rows = HeldRows(first, counts[rank], count)
    losses, counted = picked_losses(rows, logarithms, targets, weights, reduction, -100)
    losses.backward(gradient_of(losses))
    whole = losses.detach().clone()
    dist.all_reduce(whole)
    return {"losses": whole, "counted": counted, "first": first, "gradient": own.grad}
