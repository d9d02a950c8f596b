"""Where the stages of a plan come from: ranges of a model's layers, or operations of a captured forward.

A trainer is made from a source, and made again from the same source under another plan when it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import nn

from argosy.errors import InputError, Problem
from argosy.plan.plan import Plan
from argosy.runtime.holding import Kept, whole
from argosy.runtime.measure import Exchanging, untold
from argosy.runtime.mixing import check_mixing, undivided
from argosy.runtime.parameters import Places, Weight, buffer_places, weights_of
from argosy.runtime.recipe import Recipe, autocast_for
from argosy.runtime.stage import LayerStage, StageProgram
from argosy.runtime.summing import Groups


class StageSource(Protocol):
    """The stages of one plan."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every weight that a stage uses."""

    @property
    def undivided(self) -> tuple[int, ...]:
        """Layers that mix samples, which no stage with several replicas may have."""

    def under(self, plan: Plan) -> StageSource:
        """The same under another plan; an ``InputError`` if that cannot be."""

    def num_users(self, weight: Weight) -> int:
        """How many layers of its stage use a weight."""

    def part(self, rank: int) -> Callable[[Weight], Kept | None]:
        """Which part of a weight a rank keeps, if tensor-parallel groups share it."""

    def buffers(self, stages: Sequence[int]) -> Places:
        """The modules that hold buffers of some stages, and their names in them."""

    def programs(
        self, rank: int, stages: Sequence[int], groups: Groups, exchanging: Exchanging = untold
    ) -> Mapping[int, StageProgram]:
        """What a rank runs of some stages."""


class LayerSource:
    """Stages that are ranges of a model's layers."""

    def __init__(self, recipe: Recipe, layers: Sequence[nn.Module], plan: Plan) -> None:
        covered = plan.stages[-1].end
        if covered != len(layers):
            expected = f"{len(layers)}, the model's layers"
            raise InputError([Problem(path="plan.stages", found=f"{covered} layers", expected=expected)])
        check_mixing(layers, plan)
        self.recipe, self.layers, self.plan = recipe, tuple(layers), plan

    @property
    def weights(self) -> tuple[Weight, ...]:
        return weights_of(self.recipe.model, self.layers, self.plan)

    @property
    def undivided(self) -> tuple[int, ...]:
        return undivided(self.layers)

    def under(self, plan: Plan) -> LayerSource:
        return LayerSource(self.recipe, self.layers, plan)

    def num_users(self, weight: Weight) -> int:
        own = {id(module) for module, _ in weight.places}
        each = ({id(module) for module in layer.modules()} for layer in self._layers(weight.stages[0]))
        return sum(not own.isdisjoint(modules) for modules in each)

    def part(self, rank: int) -> Callable[[Weight], Kept | None]:
        del rank
        return whole

    def buffers(self, stages: Sequence[int]) -> Places:
        return buffer_places(layer for stage in stages for layer in self._layers(stage))

    def programs(
        self, rank: int, stages: Sequence[int], groups: Groups, exchanging: Exchanging = untold
    ) -> dict[int, LayerStage]:
        del rank, groups, exchanging  # a stage of layers is one device's own
        autocast = autocast_for(self.plan.model.dtype, self.recipe.model.parameters())
        return {
            index: LayerStage(
                self.recipe.model,
                self.layers,
                self.recipe.loss_fn,
                first=self.plan.stages[index].first,
                end=self.plan.stages[index].end,
                recompute=self.plan.stages[index].recompute,
                autocast=autocast,
                device=self.recipe.device,
                seed=self.recipe.seed,
                is_compiled=self.recipe.is_compiled,
            )
            for index in stages
        }

    def _layers(self, stage: int) -> tuple[nn.Module, ...]:
        return self.layers[self.plan.stages[stage].first : self.plan.stages[stage].end]
