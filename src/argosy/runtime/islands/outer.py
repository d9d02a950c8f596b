"""Hold the shared parameters of all islands and their optimizer on the lead of every island.

Leads start from the same values and apply the same means, so that their copies stay equal bit by
bit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from argosy.plan.islands import OuterOptimizer


@dataclass(kw_only=True)
class OuterState:
    """The shared parameters and momentum, which follow equations (3) and (4) of ``plan.islands``,
    fragment by fragment."""

    optimizer: OuterOptimizer
    theta: list[Tensor]
    """Shared parameters, one vector per fragment."""
    momentum: list[Tensor] = field(default_factory=list)
    exchanges: int = 0
    """Exchanges done so far, over all fragments."""
    step: int = 0
    """The step after which the last exchange began."""
    next_step: int = 0
    """The step after which the next exchange begins."""
    sync_every: int = 1

    def __post_init__(self) -> None:
        if not self.momentum:
            self.momentum = [torch.zeros_like(vector) for vector in self.theta]

    def apply(self, fragment: int, delta: Tensor) -> None:
        """Move one fragment by the mean difference between shared parameters and islands' own."""
        rule = self.optimizer
        theta, momentum = self.theta[fragment], self.momentum[fragment]
        if rule.momentum:
            momentum.mul_(rule.momentum).add_(delta)
            delta = delta + rule.momentum * momentum if rule.nesterov else momentum
        theta.sub_(delta, alpha=rule.learning_rate)

    def vectors(self) -> list[Tensor]:
        """Return all vectors that another island needs in order to catch up."""
        return [*self.theta, *self.momentum]

    def digest(self) -> str:
        """Return a hash of the shared parameters."""
        hashed = hashlib.sha256()
        for vector in self.theta:
            hashed.update(vector.numpy().tobytes())
        return hashed.hexdigest()

    def counters(self) -> dict[str, int]:
        names = ("exchanges", "step", "next_step", "sync_every")
        return {name: getattr(self, name) for name in names}

    def take_counters(self, counters: dict[str, int]) -> None:
        for name in self.counters():
            setattr(self, name, int(counters[name]))
