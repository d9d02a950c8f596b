"""What a trainer is made from, kept so that it can be made again under another plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from argosy.dtype import Dtype
from argosy.plan.plan import Plan
from argosy.runtime.processes.ranks import seats_of
from argosy.runtime.sources.optimizing import OptimizerFactory
from argosy.runtime.stages.stage import LossFunction

AUTOCAST = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}
"""What products run in where weights are float32."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model whose weights are elsewhere where this rank does not hold them, and what to do with
    it."""

    model: nn.Module
    loss_fn: LossFunction
    optimizer_factory: OptimizerFactory
    device: torch.device
    roster: tuple[str, ...]
    """Devices by rank, for as long as the run lasts."""
    seed: int = 0
    """Of dropout's masks."""
    is_compiled: bool = False
    """Whether stages are compiled."""

    def stages_of(self, plan: Plan, rank: int) -> list[int]:
        """The stages that a rank has a seat in."""
        return [
            seat.stage
            for stage in seats_of(plan, self.roster)
            for seat in stage
            if seat.rank == rank
        ]


def autocast_for(dtype: Dtype, weights: Iterable[nn.Parameter]) -> torch.dtype | None:
    """What products run in under a plan of this dtype: in it, if the weights are float32; else as
    the weights are."""
    single = all(weight.dtype is torch.float32 for weight in weights if weight.is_floating_point())
    return AUTOCAST.get(dtype) if single else None
