"""Describe how the devices of a plan share modules of experts, for stages of layers and of
operations.

Holders of experts are the tensor-parallel groups of all parts of all replicas, or single devices.
Consecutive holders hold all experts together, and the devices of a holder divide its experts. A
stage whose experts are on one holder, and whose groups have one device, shares none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from argosy.errors import invalid
from argosy.plan.plan import Plan
from argosy.runtime.communication.boxes import TensorBox, rows
from argosy.runtime.communication.marks import Exchanging
from argosy.runtime.processes.ranks import expert_ranks, expert_seats, holders_of
from argosy.runtime.stages.experts import ExpertGroup, ExpertModules, experts_at
from argosy.runtime.stages.parameters import Weight
from argosy.runtime.weights.summing import Groups
from argosy.space.operations.sharding import unit_counts
from argosy.units import counted


class ExpertSharing:
    """A record that lists the modules of experts which devices of a plan share."""

    def __init__(
        self,
        plan: Plan,
        roster: Sequence[str],
        experts: ExpertModules,
        modules: Mapping[int, Sequence[nn.Module]],
    ) -> None:
        """Check the experts of a plan; ``modules`` lists the modules of experts by stage."""
        self.plan, self.roster, self.experts = plan, roster, experts
        self.modules: dict[int, tuple[nn.Module, ...]] = {}
        """The modules that devices share, by stage."""
        for index, stage in enumerate(plan.stages):
            if stage.expert == 1 and stage.parts_are_alone:
                continue
            own = tuple(modules.get(index, ()))
            if stage.expert > 1 and not own:
                expected = "a module with num_experts, and that many entries in its parameters"
                raise invalid(f"stages[{index}].expert", "layers without experts", expected)
            if own:
                self._check(index, own)
                self.modules[index] = own

    def _check(self, index: int, modules: Sequence[nn.Module]) -> None:
        """Raise an ``InputError`` unless holders form groups that have all experts, holders have
        equally many devices, and each of these has an expert."""
        stage = self.plan.stages[index]
        widths = [len(members) for members in holders_of(self.plan, index, self.roster)]
        if len(widths) % stage.expert:
            actual, expected = str(stage.expert), f"a divisor of {counted(len(widths), 'holder')}"
            raise invalid(f"stages[{index}].expert", actual, expected)
        for at in range(0, len(widths), stage.expert):
            if len(set(widths[at : at + stage.expert])) > 1:
                expected = "tensor-parallel groups of one width, to share experts"
                raise invalid(f"stages[{index}].replicas", "several widths", expected)
        for module in modules:
            count = self.experts.count(module)
            is_divided = count >= stage.expert
            fewest = min(unit_counts(count, stage.expert_shares)) if is_divided else 0
            if fewest < max(widths):
                actual = f"{counted(fewest, 'expert')} of {count} on a holder"
                expected = f"{max(widths)} at least, one for each device of the holder"
                raise invalid(f"stages[{index}].expert", actual, expected)

    def held(self, weight: Weight) -> dict[int, tuple[TensorBox, ...]] | None:
        """Return each rank's experts, by rank; None if the weight is not one of experts that
        devices share."""
        counts = {self.experts.count(module) for module, _ in weight.places}
        shared = {id(module) for stage in weight.stages for module in self.modules.get(stage, ())}
        if shared.isdisjoint(id(module) for module, _ in weight.places):
            return None
        if len(weight.stages) > 1 or len(counts) > 1:
            expected = "experts of one layer in one stage, to share them out"
            raise invalid(weight.name, "a weight that is tied", expected)
        (stage,), (count,) = weight.stages, counts
        boxes = {}
        for rank, seat in expert_seats(self.plan, stage, self.roster).items():
            own = experts_at(count, self.plan.stages[stage].expert_shares, seat)
            boxes[rank] = rows(own.start, (len(own), *weight.shape[1:]))
        return boxes

    def install(
        self, rank: int, stages: Sequence[int], groups: Groups, exchanging: Exchanging
    ) -> None:
        """Make the modules of a rank's stages send tokens to the devices that hold their experts;
        restore all others."""
        self.experts.restore()
        for index in stages:
            for module in self.modules.get(index, ()):
                self.experts.share_out(module, self._group(index, rank, groups, exchanging))

    def _group(self, index: int, rank: int, groups: Groups, exchanging: Exchanging) -> ExpertGroup:
        columns = expert_ranks(self.plan, index, self.roster) or [(rank,)]
        ranks = next(column for column in columns if rank in column)
        seats = expert_seats(self.plan, index, self.roster)
        return ExpertGroup(
            shares=self.plan.stages[index].expert_shares,
            seats=tuple(seats[member] for member in ranks),
            member=ranks.index(rank),
            group=groups.get(ranks),
            exchanging=exchanging,
        )
