"""Where the stages of a plan come from: ranges of a model's layers, or operations of a captured forward.

A trainer is made from a source, and made again from another one when it moves (``maker``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn

from argosy.errors import InputError, Problem
from argosy.plan.plan import Plan
from argosy.runtime.boxes import Box, rows
from argosy.runtime.holding import Keeping, Proportions, keeping
from argosy.runtime.measure import Exchanging, untold
from argosy.runtime.mixing import check_mixing, undivided
from argosy.runtime.parameters import Catalogue, Places, Weight, buffer_places, ranks_holding, weights_of
from argosy.runtime.ranks import seats_of
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

    def num_users(self, weight: Weight) -> int:
        """How many layers of its stage use a weight."""

    def held(self, weight: Weight) -> dict[int, tuple[Box, ...]]:
        """By rank, the part of a weight that it computes with; no other rank has any."""

    def buffers(self, stages: Sequence[int]) -> Places:
        """The modules that hold buffers of some stages, and their names in them."""

    def programs(
        self, rank: int, stages: Sequence[int], groups: Groups, exchanging: Exchanging = untold
    ) -> Mapping[int, StageProgram]:
        """What a rank runs of some stages."""


class LayerSource:
    """Stages that are ranges of a model's layers."""

    def __init__(self, recipe: Recipe, catalogue: Catalogue, layers: Sequence[nn.Module], plan: Plan) -> None:
        covered = plan.stages[-1].end
        if covered != len(layers):
            expected = f"{len(layers)}, the model's layers"
            raise InputError([Problem(path="plan.stages", found=f"{covered} layers", expected=expected)])
        check_mixing(layers, plan)
        self.recipe, self.layers, self.plan = recipe, tuple(layers), plan
        self.weights = weights_of(catalogue, layers, plan)

    @property
    def undivided(self) -> tuple[int, ...]:
        return undivided(self.layers)

    def num_users(self, weight: Weight) -> int:
        own = {id(module) for module, _ in weight.places}
        each = ({id(module) for module in layer.modules()} for layer in self._layers(weight.stages[0]))
        return sum(not own.isdisjoint(modules) for modules in each)

    def held(self, weight: Weight) -> dict[int, tuple[Box, ...]]:
        return dict.fromkeys(ranks_holding(weight, self.plan, self.recipe.roster), rows(0, weight.shape))

    def buffers(self, stages: Sequence[int]) -> Places:
        return buffer_places(layer for stage in stages for layer in self._layers(stage))

    def programs(
        self, rank: int, stages: Sequence[int], groups: Groups, exchanging: Exchanging = untold
    ) -> dict[int, LayerStage]:
        del rank, groups, exchanging  # a stage of layers is one device's own
        autocast = autocast_for(self.plan, self.recipe.model.parameters())
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


def keepings_of(
    source: StageSource, plan: Plan, roster: Sequence[str], proportions: Proportions | None = None
) -> dict[str, Keeping]:
    """How ranks keep every weight, by its name."""
    parts: list[dict[int, float]] = []
    for stage, seats in enumerate(seats_of(plan, roster)):
        given = None if proportions is None else proportions(stage)
        parts.append({seat.rank: 1.0 if given is None else given[seat.replica] for seat in seats})
    return {
        weight.name: keeping(weight, source.held(weight), source.num_users, plan, parts[weight.stages[0]])
        for weight in source.weights
    }
