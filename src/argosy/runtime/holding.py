"""What a rank keeps of a model, with which values, whole or in rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.errors import InputError, Problem
from argosy.plan.plan import Plan
from argosy.runtime.boxes import Box
from argosy.runtime.collectives import split_by
from argosy.runtime.gradients import Gradients
from argosy.runtime.measure import Exchanging, untold
from argosy.runtime.overlap import in_buckets
from argosy.runtime.parameters import Places, Weight, holders, ranks_holding
from argosy.runtime.ranks import members_of, seats_of
from argosy.runtime.sharding import ShardSet, WeightGate
from argosy.runtime.stage import StageProgram
from argosy.runtime.summing import Groups, groups_needed, way_of
from argosy.runtime.world import gather_texts
from argosy.space.sharding import local_shape
from argosy.workload.capture.initial import Recording

Proportions = Callable[[int], Sequence[float]]
"""How ZeRO divides the rows of a stage's weights among its replicas."""
Kept = tuple[tuple[Box, ...], Callable[[Tensor], Tensor]]
"""Where the part of a weight lies that a rank keeps, and what takes it out of the whole."""
"""Modules that hold buffers, and their names in them."""
_Holders = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks that hold some weights, and the stages that use them."""


def keep_own(
    weights: Sequence[Weight],
    stages: Sequence[int],
    device: torch.device,
    recording: Recording | None,
    share: Callable[[Weight, Tensor], None],
    part: Callable[[Weight], Kept | None],
) -> tuple[Weight, ...]:
    """Bring the weights of ``stages`` to the device, one at a time, and let all others go; those kept.

    ``share`` gives a weight the values that its other holders begin with, where they are not recorded; ``part`` says
    where the part lies that this rank keeps of a weight, and takes it, where that is not all of it.
    """
    kept = []
    for weight in weights:
        mine = not set(stages).isdisjoint(weight.stages)
        data = _real(weight.parameter.detach(), weight.name, recording) if mine else weight.parameter.detach()
        data = data.to(device if mine else "meta")
        boxes = None
        if mine and recording is None:
            share(weight, data)
        if mine and (own := part(weight)) is not None:
            boxes, take = own
            data = take(data).clone()
        parameter = nn.Parameter(data, requires_grad=weight.parameter.requires_grad)
        for module, name in weight.places:
            module._parameters[name] = parameter
        if mine:
            whole = None if boxes is None else tuple(weight.parameter.shape)
            kept.append(replace(weight, parameter=parameter, boxes=boxes, whole=whole))
    return tuple(kept)


def whole(weight: Weight) -> Kept | None:
    """Every rank keeps all of its weights."""
    del weight
    return None


def share_buffers(stages: Sequence[Places], plan: Plan, roster: Sequence[str], device: torch.device) -> None:
    """Everyone who holds a buffer starts from that of the first who does. ``stages``: where each has its own."""
    found: dict[int, tuple[Tensor, list[tuple[nn.Module, str]], set[int]]] = {}
    for places, seats in zip(stages, seats_of(plan, roster), strict=True):
        for module, name in places:
            buffer = module._buffers[name]
            if buffer is not None and not buffer.is_meta and buffer.numel():
                _, held_at, ranks = found.setdefault(id(buffer), (buffer, [], set()))
                held_at.append((module, name))
                ranks.update(seat.rank for seat in seats)
    where = device if dist.get_backend() == "nccl" else torch.device("cpu")
    copies = [buffer.detach().to(where, copy=True).contiguous() for buffer, _, _ in found.values()]
    digest = hashlib.sha256(b"".join(_as_bytes(copy).cpu().numpy().tobytes() for copy in copies))
    if len(set(gather_texts(digest.hexdigest(), device))) == 1:
        return
    for copy, (_, held_at, ranks) in zip(copies, found.values(), strict=True):
        dist.broadcast(_as_bytes(copy), min(ranks))
        for module, name in held_at:
            module._buffers[name] = copy


def _as_bytes(content: Tensor) -> Tensor:
    """Of any dtype: backends do not carry all of them."""
    return content.view(-1).view(torch.uint8)


def keep_buffers(places: Places, device: torch.device, recording: Recording | None) -> None:
    """Bring buffers to the device."""
    for module, name in places:
        buffer = module._buffers[name]
        if buffer is not None:
            module._buffers[name] = _real(buffer, name, recording).to(device)


def _real(tensor: Tensor, name: str, recording: Recording | None) -> Tensor:
    if not tensor.is_meta:
        return tensor
    if recording is None:
        suggestion = "build it under argosy.workload.capture.initial.Recording and pass that as recording"
        problem = Problem(path=name, found="a weight on the meta device", expected="values", suggestion=suggestion)
        raise InputError([problem])
    return recording.materialise([tensor])[0]


def initial_values(plan: Plan, roster: Sequence[str], groups: Groups) -> Callable[[Weight, Tensor], None]:
    """Everyone who holds a weight starts from the values of the first who does."""

    def share(weight: Weight, data: Tensor) -> None:
        ranks = ranks_holding(weight, plan, roster)
        if ranks in groups:
            dist.broadcast(data, ranks[0], group=groups[ranks])

    return share


class Keeping(NamedTuple):
    """How the ranks that hold a weight keep it."""

    ranks: tuple[int, ...]
    level: int
    """Of ZeRO; 0 where every one of them keeps all of it."""
    sizes: tuple[int, ...]
    """Rows that each keeps, where the level is not 0."""


def keeping(
    weight: Weight,
    num_users: Callable[[Weight], int],
    plan: Plan,
    roster: Sequence[str],
    proportions: Proportions | None,
    rank: int,
) -> Keeping:
    """By ZeRO in rows, unless it is frozen, tied across stages, or from level 2 on shared by layers of one stage, or
    whole on every member of a tensor-parallel group. ``num_users``: of its stage's layers; ``rank``: whose part of it,
    where it is cut."""
    each = holders(weight, plan, roster)
    ranks = next((found for found in each if rank in found), each[0])
    stage = plan.stages[weight.stages[0]]
    num_layers = num_users(weight) if stage.zero > 1 else 0
    is_divided = len(ranks) > 1 and weight.parameter.dim() > 0 and weight.parameter.requires_grad
    zero = plan.zero_of(weight.stages, num_layers) if is_divided else 0
    if not zero or (stage.replicas[0].width > 1 and not weight.cut.is_sharded):
        return Keeping(ranks, 0, ())
    parts = [1.0] * len(ranks) if proportions is None else proportions(weight.stages[0])
    ratios = [share for _, share in members_of(plan, stage.replicas[0], roster)]
    rows = local_shape(weight.shape, weight.cut, ratios, each.index(ranks))[0]
    return Keeping(ranks, zero, tuple(split_by(rows, parts)))


def groups_of(weights: Sequence[Weight], plan: Plan, roster: Sequence[str]) -> list[tuple[int, ...]]:
    """Every set of ranks that shares or sums something."""
    found = [seats_in_group(plan, stage, roster) for stage in range(len(plan.stages))]
    sets = [ranks for groups in found for ranks in groups]
    for weight in weights:
        sets.append(ranks_holding(weight, plan, roster))
        for ranks in holders(weight, plan, roster):
            sets += groups_needed(ranks, weight.stages, plan, roster)
    return sets


def seats_in_group(plan: Plan, stage: int, roster: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks of each tensor-parallel group of a stage."""
    return [tuple(rank for rank, _ in members_of(plan, r, roster)) for r in plan.stages[stage].replicas]


class Division:
    """Which weights of a rank are held whole, and which in rows."""

    def __init__(
        self,
        weights: Sequence[Weight],
        keepings: Mapping[str, Keeping],
        programs: Mapping[int, StageProgram],
        plan: Plan,
        groups: Groups,
        rank: int,
        roster: Sequence[str],
        rows: Mapping[str, Tensor] | None = None,
        exchanging: Exchanging = untold,
    ) -> None:
        """``rows``: those of this rank, for weights of level 3 that are not in memory whole."""
        self.gates: dict[int, WeightGate] = {}
        whole: dict[_Holders, list[Weight]] = {}
        parted: dict[int, list[Weight]] = {}
        for weight in weights:
            if keepings[weight.name].level:
                parted.setdefault(weight.stages[0], []).append(weight)
            else:
                whole.setdefault((keepings[weight.name].ranks, weight.stages), []).append(weight)
        shards: list[ShardSet] = []
        for stage, candidates in sorted(parted.items()):
            keep = keepings[candidates[0].name]
            way = way_of(keep.ranks, (stage,), plan, groups, rank, roster)
            assert way is not None
            shard_set = partial(
                ShardSet,
                level=keep.level,
                way=way,
                member=keep.ranks.index(rank),
                sizes={weight.name: keepings[weight.name].sizes for weight in candidates},
                rows=rows or {},
                exchanging=exchanging,
            )
            shards += self._shard(stage, candidates, programs[stage], shard_set)
        shared = [
            (way_of(ranks, stages, plan, groups, rank, roster), ranks[0], held)
            for (ranks, stages), held in sorted(whole.items())
        ]
        self.gradients = Gradients(shared, shards, rank)

    def _shard(
        self,
        stage: int,
        weights: list[Weight],
        program: StageProgram,
        shard_set: partial[ShardSet],
    ) -> list[ShardSet]:
        """As many as there are buckets of gradients, or from level 2 on one per layer."""
        if shard_set.keywords["level"] == 1:
            return [shard_set(bucket) for bucket in in_buckets(weights, lambda weight: weight.parameter)]
        sets: list[ShardSet | None] = []
        for at in range(program.num_layers):
            own = [weight for weight in weights if at in program.users(weight)]
            sets.append(shard_set(own) if own else None)
        self.gates[stage] = program.gate = WeightGate(sets)
        return [shards for shards in sets if shards is not None]
