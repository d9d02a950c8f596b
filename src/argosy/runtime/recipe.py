"""What a trainer is made from, kept so that it can be made again under another plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from argosy.dtype import Dtype
from argosy.plan.plan import Plan
from argosy.runtime.optimizing import OptimizerFactory
from argosy.runtime.ranks import seats_of
from argosy.runtime.stage import LayerStage, LossFunction

AUTOCAST = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}
"""What products run in where weights are float32."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model whose weights are elsewhere where this rank does not hold them, and what to do with it."""

    model: nn.Module
    layers: tuple[nn.Module, ...]
    loss_fn: LossFunction
    optimizer_factory: OptimizerFactory
    device: torch.device
    roster: tuple[str, ...]
    """Devices by rank, for as long as the run lasts."""
    seed: int = 0
    """Of dropout's masks."""

    def stages_of(self, plan: Plan, rank: int) -> list[int]:
        """The stages that a rank has a seat in."""
        return [seat.stage for stage in seats_of(plan, self.roster) for seat in stage if seat.rank == rank]

    def layers_of(self, plan: Plan, stages: Iterable[int]) -> list[nn.Module]:
        return [layer for i in stages for layer in self.layers[plan.stages[i].first : plan.stages[i].end]]

    def programs(self, plan: Plan, rank: int, autocast: torch.dtype | None) -> dict[int, LayerStage]:
        return {index: self._program(plan, index, autocast) for index in self.stages_of(plan, rank)}

    def _program(self, plan: Plan, index: int, autocast: torch.dtype | None) -> LayerStage:
        stage = plan.stages[index]
        return LayerStage(
            self.model,
            self.layers,
            self.loss_fn,
            first=stage.first,
            end=stage.end,
            recompute=stage.recompute,
            autocast=autocast,
            device=self.device,
            seed=self.seed,
        )


def autocast_for(plan: Plan, weights: Iterable[nn.Parameter]) -> torch.dtype | None:
    """The dtype of a stage's products: the plan's, where its weights are float32."""
    single = all(weight.dtype is torch.float32 for weight in weights if weight.is_floating_point())
    return AUTOCAST.get(plan.model.dtype) if single else None
