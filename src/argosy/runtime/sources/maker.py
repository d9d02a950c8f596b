"""Make the stages of any plan for one model, from the model that a trainer was begun with.

Stages are ranges of the model's layers if it has layers, no cut is given and no tensor-parallel
group shares a stage; otherwise they are made of operations. The forward is captured when a plan
first needs it. That may be long after ranks have freed values and kept only parts: a capture needs
shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from argosy.errors import impossible, invalid
from argosy.plan.plan import Plan
from argosy.runtime.sources.operations import Captured, GraphSource
from argosy.runtime.sources.recipe import Recipe, autocast_for
from argosy.runtime.sources.source import LayerSource, StageSource
from argosy.runtime.stages.layers import find_layers, has_layers
from argosy.runtime.stages.parameters import Catalogue
from argosy.workload.capture.forward import Forward, capture_forward
from argosy.workload.capture.initial import Recording


class StageMaker:
    """An object that makes the stages of plans."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        batch: Any,
        cut: Sequence[int] | None,
        recording: Recording | None,
    ) -> None:
        self.recipe, self.batch, self.cut, self.recording = recipe, batch, cut, recording
        self.model_content = plan.model.content
        self.has_own_cut = cut is not None and cut != plan.cut
        """True if the stages of the first plan were given separately from it."""
        is_layered = cut is None and has_layers(recipe.model)
        self.layers: tuple[nn.Module, ...] = find_layers(recipe.model) if is_layered else ()
        self.catalogue = Catalogue(recipe.model, self.layers)
        self.captures: dict[torch.dtype | None, Forward] = {}
        """Captured forwards by the dtype of matrix products."""

    def moved(self, plan: Plan) -> StageSource:
        """Return the stages of another plan; raise an ``InputError`` if the model cannot be trained
        by it. Every rank calls this."""
        if plan.model.content != self.model_content:
            raise invalid("plan.model", plan.model.name, "the program that runs")
        if self.has_own_cut:
            reason = "the trainer was made with a cut that is not the plan's"
            raise impossible("move to another plan", reason, "the cut of the plan")
        return self.source(plan, plan.cut)

    def source(self, plan: Plan, cut: Sequence[int] | None) -> StageSource:
        """Return the stages of a plan. Every rank calls this."""
        if cut is None and self.layers:
            layer_source = LayerSource(self.recipe, self.catalogue, self.layers, plan)
            if all(replica.width == 1 for stage in plan.stages for replica in stage.replicas):
                return layer_source
        plain = self._forward(plan, None)
        forward = self._forward(
            plan, autocast_for(plan.model.dtype, self.recipe.model.parameters())
        )
        captured = Captured(plain, forward, self.catalogue, self.layers)
        source = GraphSource(self.recipe, captured, plan, cut)
        source.check_agreed()
        return source

    def _forward(self, plan: Plan, autocast: torch.dtype | None) -> Forward:
        if autocast not in self.captures:
            self.captures[autocast] = self._captured(plan, autocast)
        return self.captures[autocast]

    def captured_now(self, plan: Plan) -> Forward:
        """Capture the forward in the present mode of the model, in the precision of a plan."""
        return self._captured(plan, autocast_for(plan.model.dtype, self.recipe.model.parameters()))

    def _captured(self, plan: Plan, autocast: torch.dtype | None) -> Forward:
        recipe = self.recipe
        with self.catalogue.without_values():
            return capture_forward(
                recipe.model,
                recipe.loss_fn,
                self.batch,
                device=recipe.device,
                autocast=autocast,
                recording=self.recording,
                name=plan.model.name,
            )
