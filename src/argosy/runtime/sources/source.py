"""Provide the stages of a plan: ranges of a model's layers, or operations of a captured forward.

A trainer is made from a source, and made again from another one when it migrates (``maker``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn

from argosy.errors import invalid
from argosy.plan.plan import Plan
from argosy.runtime.communication.boxes import TensorBox, boxes_of, rows
from argosy.runtime.communication.marks import Exchanging, untold
from argosy.runtime.processes.ranks import expert_ranks, place_of, seats_of
from argosy.runtime.sources.mixing import check_mixing, undivided
from argosy.runtime.sources.recipe import Recipe, autocast_for
from argosy.runtime.stages.experts import ExpertGroup
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
from argosy.space.operations.sharding import sharded


class StageSource(Protocol):
    """A source that provides the stages of one plan."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return every weight that a stage uses."""

    @property
    def undivided(self) -> tuple[int, ...]:
        """Return the layers that mix samples, which a stage with several replicas must not
        contain."""

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
        sharing = [index for index, stage in enumerate(plan.stages) if stage.expert > 1]
        self.experts = {index: self._find_experts(index) for index in sharing}
        """The modules of experts, by stage that shares them."""

    def _find_experts(self, stage: int) -> tuple[nn.Module, ...]:
        """Return the modules of experts in a stage that shares them; raise an ``InputError`` if
        there are none."""
        experts = self.catalogue.experts.within(self._layers(stage))
        if not experts:
            path = f"stages[{stage}].expert"
            expected = "a module with num_experts, and that many entries in its parameters"
            raise invalid(path, "layers without experts", expected)
        return experts

    @property
    def undivided(self) -> tuple[int, ...]:
        return undivided(self.layers)

    def num_users(self, weight: Weight) -> int:
        own = {id(module) for module, _ in weight.places}
        modules_by_layer = (
            {id(module) for module in layer.modules()} for layer in self._layers(weight.stages[0])
        )
        return sum(not own.isdisjoint(modules) for modules in modules_by_layer)

    def held(self, weight: Weight) -> dict[int, tuple[TensorBox, ...]]:
        """Return the whole weight for every rank of its stages, or each rank's experts."""
        ranks = ranks_holding(weight, self.plan, self.recipe.roster)
        counts = {self.catalogue.experts.count(module) for module, _ in weight.places}
        if counts == {0} or self.experts.keys().isdisjoint(weight.stages):
            return dict.fromkeys(ranks, rows(0, weight.shape))
        if len(weight.stages) > 1 or len(counts) > 1:
            expected = "experts of one layer in one stage, to share them out"
            raise invalid(weight.name, "a weight that is tied", expected)
        stage, cut = weight.stages[0], sharded(0, counts.pop())
        shares = self.plan.stages[stage].expert_shares
        return {
            seat.rank: boxes_of(weight.shape, cut, shares, place_of(self.plan, seat))
            for seat in seats_of(self.plan, self.recipe.roster)[stage]
        }

    def buffers(self, stages: Sequence[int]) -> Places:
        return buffer_places(layer for stage in stages for layer in self._layers(stage))

    def programs(
        self, rank: int, stages: Sequence[int], groups: Groups, exchanging: Exchanging = untold
    ) -> dict[int, LayerStage]:
        self.catalogue.experts.restore()
        for index in stages:
            if index in self.experts:
                self._share_experts(index, rank, groups, exchanging)
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

    def _share_experts(self, index: int, rank: int, groups: Groups, exchanging: Exchanging) -> None:
        roster = self.recipe.roster
        ranks = next(ranks for ranks in expert_ranks(self.plan, index, roster) if rank in ranks)
        place = {
            seat.rank: place_of(self.plan, seat) for seat in seats_of(self.plan, roster)[index]
        }
        group = ExpertGroup(
            shares=self.plan.stages[index].expert_shares,
            places=tuple(place[member] for member in ranks),
            member=ranks.index(rank),
            group=groups[ranks],
            exchanging=exchanging,
        )
        for module in self.experts[index]:
            self.catalogue.experts.share_out(module, group)

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
