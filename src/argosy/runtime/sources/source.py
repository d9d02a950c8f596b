"""Provide the stages of a plan: ranges of a model's layers, or operations of a captured forward.

A trainer is made from a source, and made again from another one when it migrates (``maker``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn

from argosy.errors import invalid
from argosy.plan.plan import Plan
from argosy.runtime.communication.boxes import TensorBox, rows
from argosy.runtime.communication.marks import Exchanging, untold
from argosy.runtime.processes.ranks import seats_of
from argosy.runtime.sources.expert_sharing import ExpertSharing
from argosy.runtime.sources.mixing import check_mixing, undivided
from argosy.runtime.sources.recipe import Recipe, autocast_for
from argosy.runtime.stages.parameters import (
    Catalogue,
    Places,
    Weight,
    buffer_places,
    ranks_holding,
    weights_of,
)
from argosy.runtime.stages.stage import LayerStage, StageProgram
from argosy.runtime.weights.holding import Keeping, Proportions, keeping
from argosy.runtime.weights.summing import Groups


class StageSource(Protocol):
    """A source that provides the stages of one plan."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return every weight that a stage uses."""

    @property
    def undivided(self) -> tuple[int, ...]:
        """Return the layers that mix samples, which a stage with several replicas must not
        contain."""

    @property
    def shares_operations(self) -> bool:
        """Return whether devices share operations: in groups, or by parts of a sequence."""

    def num_users(self, weight: Weight) -> int:
        """Return how many layers of its stage use a weight."""

    def held(self, weight: Weight) -> dict[int, tuple[TensorBox, ...]]:
        """Return, by rank, the part of a weight that it computes with; ranks without a part are
        absent."""

    def buffers(self, stages: Sequence[int]) -> Places:
        """Return the modules that hold buffers of given stages, with the buffers' names."""

    def programs(
        self, rank: int, stages: Sequence[int], groups: Groups, exchanging: Exchanging = untold
    ) -> Mapping[int, StageProgram]:
        """Return the programs that a rank runs for given stages."""


class LayerSource:
    """A source of stages that are ranges of a model's layers."""

    def __init__(
        self, recipe: Recipe, catalogue: Catalogue, layers: Sequence[nn.Module], plan: Plan
    ) -> None:
        covered = plan.stages[-1].end
        if covered != len(layers):
            expected = f"{len(layers)}, the model's layers"
            raise invalid("plan.stages", f"{covered} layers", expected)
        check_mixing(layers, plan)
        self.recipe, self.layers, self.plan = recipe, tuple(layers), plan
        self.catalogue = catalogue
        self.weights = weights_of(catalogue, layers, plan)
        modules = {
            index: catalogue.experts.within(self._layers(index))
            for index in range(len(plan.stages))
        }
        self.experts = ExpertSharing(plan, recipe.roster, catalogue.experts, modules)

    @property
    def undivided(self) -> tuple[int, ...]:
        return undivided(self.layers)

    @property
    def shares_operations(self) -> bool:
        return False

    def num_users(self, weight: Weight) -> int:
        own = {id(module) for module, _ in weight.places}
        modules_by_layer = (
            {id(module) for module in layer.modules()} for layer in self._layers(weight.stages[0])
        )
        return sum(not own.isdisjoint(modules) for modules in modules_by_layer)

    def held(self, weight: Weight) -> dict[int, tuple[TensorBox, ...]]:
        """Return the whole weight for every rank of its stages, or each rank's experts."""
        experts = self.experts.held(weight)
        ranks = ranks_holding(weight, self.plan, self.recipe.roster)
        return dict.fromkeys(ranks, rows(0, weight.shape)) if experts is None else experts

    def buffers(self, stages: Sequence[int]) -> Places:
        return buffer_places(layer for stage in stages for layer in self._layers(stage))

    def programs(
        self, rank: int, stages: Sequence[int], groups: Groups, exchanging: Exchanging = untold
    ) -> dict[int, LayerStage]:
        self.experts.install(rank, stages, groups, exchanging)
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


def keepings_of(
    source: StageSource, plan: Plan, roster: Sequence[str], proportions: Proportions | None = None
) -> dict[str, Keeping]:
    """Return how ranks keep every weight, by its name."""
    parts: list[dict[int, float]] = []
    for stage, seats in enumerate(seats_of(plan, roster)):
        given = None if proportions is None else proportions(stage)
        parts.append({seat.rank: 1.0 if given is None else given[seat.replica] for seat in seats})
    return {
        weight.name: keeping(
            weight, source.held(weight), source.num_users, plan, parts[weight.stages[0]]
        )
        for weight in source.weights
    }
