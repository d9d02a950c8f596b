"""What a rank keeps of a model, with which values, whole or in rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.errors import InputError, Problem
from argosy.plan.plan import Plan
from argosy.runtime.gradients import Gradients
from argosy.runtime.initialise import Recording
from argosy.runtime.parameters import Weight, ranks_holding
from argosy.runtime.sharding import ShardSet, WeightGate
from argosy.runtime.stage import LayerStage
from argosy.runtime.summing import Groups, Way, way_of

Proportions = Callable[[int], Sequence[float]]
"""How ZeRO divides the rows of a stage's weights among its replicas."""
_Holders = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks that hold some weights, and the stages that use them."""


def keep_own(
    weights: Sequence[Weight],
    layers: Sequence[nn.Module],
    plan: Plan,
    stages: Sequence[int],
    device: torch.device,
    recording: Recording | None,
) -> tuple[Weight, ...]:
    """Bring the weights and buffers of ``stages`` to the device, one at a time, and let all others go; those kept."""
    kept = []
    for weight in weights:
        mine = not set(stages).isdisjoint(weight.stages)
        data = _real(weight.parameter.detach(), weight.name, recording) if mine else weight.parameter.detach()
        parameter = nn.Parameter(data.to(device if mine else "meta"), requires_grad=weight.parameter.requires_grad)
        for module, name in weight.places:
            module._parameters[name] = parameter
        if mine:
            kept.append(replace(weight, parameter=parameter))
    for index in stages:
        for layer in layers[plan.stages[index].first : plan.stages[index].end]:
            _keep_buffers(layer, device, recording)
    return tuple(kept)


def _keep_buffers(layer: nn.Module, device: torch.device, recording: Recording | None) -> None:
    for module in layer.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _real(buffer, name, recording).to(device)


def _real(tensor: Tensor, name: str, recording: Recording | None) -> Tensor:
    if not tensor.is_meta:
        return tensor
    if recording is None:
        suggestion = "build it under argosy.runtime.initialise.Recording and pass that as recording"
        problem = Problem(path=name, found="a weight on the meta device", expected="values", suggestion=suggestion)
        raise InputError([problem])
    return recording.materialise([tensor])[0]


def share_initial_values(weights: Sequence[Weight], plan: Plan, groups: Groups) -> None:
    """Everyone who holds a weight starts from the values of the first who does."""
    for weight in weights:
        ranks = ranks_holding(weight, plan)
        if ranks in groups:
            dist.broadcast(weight.parameter.data, ranks[0], group=groups[ranks])


class Division:
    """Which weights of a rank are held whole, and which in rows."""

    def __init__(
        self,
        weights: Sequence[Weight],
        programs: Mapping[int, LayerStage],
        plan: Plan,
        groups: Groups,
        rank: int,
        proportions: Proportions | None,
    ) -> None:
        self.plan, self.groups, self.rank = plan, groups, rank
        self.proportions = proportions or _evenly(plan)
        self.gates: dict[int, WeightGate] = {}
        whole: dict[_Holders, list[Weight]] = {}
        parted: dict[int, list[Weight]] = {}
        for weight in weights:
            ranks = ranks_holding(weight, plan)
            divisible = len(weight.stages) == 1 and len(ranks) > 1 and weight.parameter.dim() > 0
            if divisible and plan.stages[weight.stages[0]].zero > 0:
                parted.setdefault(weight.stages[0], []).append(weight)
            else:
                whole.setdefault((ranks, weight.stages), []).append(weight)
        shards: list[ShardSet] = []
        for stage, candidates in sorted(parted.items()):
            shards += self._shard(stage, candidates, programs[stage], whole)
        shared = [(self._way(held), ranks[0], held) for (ranks, _), held in sorted(whole.items())]
        self.gradients = Gradients(shared, shards, rank)

    def _way(self, weights: Sequence[Weight]) -> Way | None:
        ranks = ranks_holding(weights[0], self.plan)
        return way_of(ranks, weights[0].stages, self.plan, self.groups, self.rank)

    def _shard(
        self, stage: int, weights: list[Weight], program: LayerStage, whole: dict[_Holders, list[Weight]]
    ) -> list[ShardSet]:
        """One set for the stage, or from level 2 on one per layer; what several layers share is held whole."""
        level, ranks = self.plan.stages[stage].zero, ranks_holding(weights[0], self.plan)
        way, member, proportions = self._way(weights), ranks.index(self.rank), self.proportions(stage)
        assert way is not None
        if level == 1:
            return [ShardSet(weights, level, way, member, proportions)]
        users = [[at for at, layer in enumerate(program.layers) if _uses(layer, weight)] for weight in weights]
        sets: list[ShardSet | None] = []
        for at in range(len(program.layers)):
            own = [weight for weight, used in zip(weights, users, strict=True) if used == [at]]
            sets.append(ShardSet(own, level, way, member, proportions) if own else None)
        common = [weight for weight, used in zip(weights, users, strict=True) if len(used) > 1]
        if common:
            whole.setdefault((ranks, (stage,)), []).extend(common)
        self.gates[stage] = program.gate = WeightGate(sets)
        return [shards for shards in sets if shards is not None]


def _evenly(plan: Plan) -> Proportions:
    return lambda stage: [1.0] * len(plan.stages[stage].replicas)


def _uses(layer: nn.Module, weight: Weight) -> bool:
    modules = {id(module) for module in layer.modules()}
    return any(id(module) in modules for module, _ in weight.places)
