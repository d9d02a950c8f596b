"""Keep what a trainer is made from, so that it can be made again under another plan."""

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
"""The dtype of matrix products by the dtype of a plan, if weights are float32."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model that a run trains, with its functions; weights of other ranks have no values."""

    model: nn.Module
    loss_fn: LossFunction
    optimizer_factory: OptimizerFactory
    device: torch.device
    roster: tuple[str, ...]
    """Devices by rank, for the whole run."""
    seed: int = 0
    """The seed of dropout's masks."""
    is_compiled: bool = False
    """True if stages are compiled."""

    def stages_of(self, plan: Plan, rank: int) -> list[int]:
        """Return the stages that a rank has a seat in."""
        return [
            seat.stage
            for stage in seats_of(plan, self.roster)
            for seat in stage
            if seat.rank == rank
        ]


def autocast_for(dtype: Dtype, weights: Iterable[nn.Parameter]) -> torch.dtype | None:
    """Return the dtype of matrix products under a plan: the plan's dtype if the weights are
    float32, else None, which leaves the dtype of the weights."""
    single = all(weight.dtype is torch.float32 for weight in weights if weight.is_floating_point())
    return AUTOCAST.get(dtype) if single else None
