"""What a rank keeps of a model, with which values, whole or in rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.cost.regions import Region, shared_regions
from argosy.errors import InputError, Problem
from argosy.plan.plan import Plan
from argosy.runtime.communication.boxes import (
    HeldPart,
    TensorBox,
    box_at,
    held_shape,
    rows,
    rows_of,
)
from argosy.runtime.communication.collectives import offsets, split_by
from argosy.runtime.communication.marks import Exchanging, untold
from argosy.runtime.processes.ranks import expert_ranks, members_of, seats_of
from argosy.runtime.processes.world import gather_texts
from argosy.runtime.stages.parameters import Places, Weight
from argosy.runtime.stages.stage import StageProgram
from argosy.runtime.weights.gradients import Gradients
from argosy.runtime.weights.overlap import Summand, in_buckets
from argosy.runtime.weights.sharding import Shard, ShardSet, WeightGate
from argosy.runtime.weights.summing import Groups, groups_needed, way_of
from argosy.workload.capture.initial import Recording

Proportions = Callable[[int], Sequence[float]]
"""How ZeRO divides the rows of a stage's weights among its replicas."""


class Divided(NamedTuple):
    """Something that ranks hold and keep rows of, under ZeRO."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    """Rows of each."""
    region: Region | None
    """Of the whole weight; None: all that each of the ranks holds."""

    def rows(self, rank: int) -> tuple[int, int]:
        """Begin and end of a rank's rows."""
        at = self.ranks.index(rank)
        begin = offsets(self.sizes)[at]
        return begin, begin + self.sizes[at]


@dataclass(frozen=True)
class Keeping:
    """Where a weight is while a plan is in use: the one account of what ranks hold, for sums,
    checkpoints, copies and moves."""

    held: Mapping[int, tuple[TensorBox, ...]]
    """By rank, what it computes with."""
    level: int = 0
    """Of ZeRO; 0 where every rank keeps all that it computes with."""
    divided: tuple[Divided, ...] = ()
    """What ranks keep rows of, where the level is not 0."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.held))

    @property
    def is_divided(self) -> bool:
        """Whether some rank keeps only a part of the weight or of its state."""
        return self.level > 0 or len(set(self.held.values())) > 1

    @cached_property
    def sums(self) -> dict[tuple[int, ...], list[Region]]:
        """By ranks, what they all hold and sum the gradients of."""
        found: dict[tuple[int, ...], list[Region]] = {}
        regions = {rank: [box.region for box in boxes] for rank, boxes in self.held.items()}
        for region, ranks in shared_regions(regions):
            found.setdefault(ranks, []).append(region)
        return found

    def sharers(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same part as this one."""
        return tuple(other for other in self.ranks if self.held[other] == self.held[rank])

    def own(self, divided: Divided, rank: int) -> tuple[TensorBox, ...]:
        """The rows that a rank keeps of something that is divided."""
        begin, end = divided.rows(rank)
        if divided.region is None:
            return rows_of(self.held[rank], begin, end)
        return rows_of((box_at(divided.region),), begin, end)

    def kept(self, rank: int, *, value: bool) -> tuple[tuple[TensorBox, ...], ...]:
        """What a rank keeps of the weight's values, or else of its optimizer's state: the boxes of
        each tensor."""
        if self.level == 0 or (value and self.level < 3):
            return (self.held[rank],)
        return tuple(self.own(divided, rank) for divided in self.divided if rank in divided.ranks)


def keep_own(
    weights: Sequence[Weight],
    keepings: Mapping[str, Keeping],
    rank: int,
    device: torch.device,
    recording: Recording | None,
    share: Callable[[Weight, Tensor], None],
) -> tuple[Weight, ...]:
    """Bring this rank's parts of weights to the device, one at a time, and let all else go; those
    kept.

    ``share`` gives a weight the values that its other holders begin with, where they are not
    recorded.
    """
    kept = []
    for weight in weights:
        boxes = keepings[weight.name].held.get(rank)
        data = weight.installed.detach()
        if boxes is None:
            weight.install(weight.parameter)
            continue
        data = _real(data, weight.name, recording).to(device)
        if recording is None:
            share(weight, data)
        whole = HeldPart(data, rows(0, weight.shape))
        kept.append(kept_weight(weight, _part_of(whole, boxes)))
    return tuple(kept)


def _part_of(whole: HeldPart, boxes: tuple[TensorBox, ...]) -> HeldPart:
    if boxes == whole.boxes:
        return whole
    part = HeldPart.empty(boxes, dtype=whole.tensor.dtype, device=whole.tensor.device)
    part.take(whole)
    return part


def kept_weight(weight: Weight, part: HeldPart) -> Weight:
    """A weight of which this rank holds a part from now on."""
    parameter = nn.Parameter(part.tensor, requires_grad=weight.parameter.requires_grad)
    weight.install(parameter)
    is_whole = part.boxes == rows(0, weight.shape)
    boxes = None if is_whole else part.boxes
    return replace(
        weight, parameter=parameter, boxes=boxes, whole=None if is_whole else weight.shape
    )


def share_buffers(
    stages: Sequence[Places], plan: Plan, roster: Sequence[str], device: torch.device
) -> None:
    """Everyone who holds a buffer starts from that of the first who does. ``stages``: where each
    has its own."""
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
        suggestion = (
            "build it under argosy.workload.capture.initial.Recording and pass that as recording"
        )
        problem = Problem(
            path=name, found="a weight on the meta device", expected="values", suggestion=suggestion
        )
        raise InputError([problem])
    return recording.materialise([tensor])[0]


def initial_values(
    keepings: Mapping[str, Keeping], groups: Groups
) -> Callable[[Weight, Tensor], None]:
    """Everyone who holds a weight starts from the values of the first who does."""

    def share(weight: Weight, data: Tensor) -> None:
        ranks = keepings[weight.name].ranks
        if ranks in groups:
            dist.broadcast(data, ranks[0], group=groups[ranks])

    return share


def keeping(
    weight: Weight,
    held: Mapping[int, tuple[TensorBox, ...]],
    num_users: Callable[[Weight], int],
    plan: Plan,
    parts: Mapping[int, float],
) -> Keeping:
    """By ZeRO in rows, unless it is frozen, tied across stages, or from level 2 on shared by layers
    of one stage, or whole on every member of a tensor-parallel group. ``num_users``: of its stage's
    layers; ``held``: by rank; ``parts``: in which proportions ranks divide rows."""
    stage = plan.stages[weight.stages[0]]
    whole = Keeping(held)
    num_layers = num_users(weight) if stage.zero > 1 else 0
    is_divided = weight.parameter.dim() > 0 and weight.parameter.requires_grad
    zero = plan.zero_of(weight.stages, num_layers) if is_divided else 0
    has_groups = not stage.parts_are_alone
    is_cut = len(set(held.values())) > 1
    if not zero or stage.num_holders == 1 or (has_groups and not is_cut):
        return whole
    found: list[tuple[tuple[int, ...], Region | None, int]] = []
    for ranks, regions in sorted(whole.sums.items()):
        if ranks == whole.sharers(ranks[0]):
            found.append((ranks, None, held_shape(held[ranks[0]])[0]))
        else:
            found += [(ranks, region, int(region[0][1] - region[0][0])) for region in regions]
    divided = [
        Divided(ranks, tuple(split_by(count, [parts[rank] for rank in ranks])), region)
        for ranks, region, count in found
    ]
    return Keeping(held, zero, tuple(divided))


def groups_of(
    weights: Sequence[Weight], keepings: Mapping[str, Keeping], plan: Plan, roster: Sequence[str]
) -> list[tuple[int, ...]]:
    """Every set of ranks that shares or sums something."""
    found = [seats_in_group(plan, stage, roster) for stage in range(len(plan.stages))]
    found += [expert_ranks(plan, stage, roster) for stage in range(len(plan.stages))]
    sets = [ranks for groups in found for ranks in groups]
    for weight in weights:
        sets.append(keepings[weight.name].ranks)
        for ranks in keepings[weight.name].sums:
            sets += groups_needed(ranks, weight.stages, plan, roster)
    return sets


def seats_in_group(plan: Plan, stage: int, roster: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks of each tensor-parallel group of a stage."""
    return [
        tuple(rank for rank, _ in members_of(plan, r, roster)) for r in plan.stages[stage].replicas
    ]


class WeightDivision:
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
        rows: Mapping[str, Sequence[Tensor]] | None = None,
        exchanging: Exchanging = untold,
    ) -> None:
        """``rows``: those of this rank, for weights of level 3 that are not in memory whole."""
        self.gates: dict[int, WeightGate] = {}
        self.keepings, self.rank = keepings, rank
        self.plan, self.groups, self.roster, self.exchanging = plan, groups, roster, exchanging
        whole = [weight for weight in weights if not keepings[weight.name].level]
        parted = self._parted(
            [weight for weight in weights if keepings[weight.name].level], rows or {}
        )
        shards: list[ShardSet] = []
        for stage, by_ranks in sorted(parted.items()):
            shards += self._shard(stage, by_ranks, programs[stage])
        for shard_set in shards:  # all are made: a weight may be in several
            shard_set.release()
        shared = [
            (way_of(ranks, stages, plan, groups, rank, roster), ranks, held)
            for (ranks, stages), held in sorted(self._summed(whole).items())
        ]
        self.gradients = Gradients(whole, shared, shards, rank, powersgd=plan.model.powersgd)

    def _summed(
        self, weights: Sequence[Weight]
    ) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[Summand]]:
        """By the ranks that hold some weights, and the stages that use them."""
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Summand]] = {}
        for weight in weights:
            keep = self.keepings[weight.name]
            for ranks, regions in keep.sums.items():
                if self.rank in ranks:
                    part = None if ranks == keep.sharers(self.rank) else regions
                    found.setdefault((ranks, weight.stages), []).append(Summand(weight, part))
        return found

    def _parted(
        self, weights: Sequence[Weight], rows: Mapping[str, Sequence[Tensor]]
    ) -> dict[int, dict[tuple[int, ...], list[Shard]]]:
        """By stage, and the ranks that divide the rows of some weights."""
        found: dict[int, dict[tuple[int, ...], list[Shard]]] = {}
        for weight in weights:
            keep = self.keepings[weight.name]
            mine = [divided for divided in keep.divided if self.rank in divided.ranks]
            given = rows.get(weight.name, (None,) * len(mine))
            for divided, own_rows in zip(mine, given, strict=True):
                shard = Shard(
                    Summand(weight, None if divided.region is None else [divided.region]),
                    divided.ranks.index(self.rank),
                    divided.sizes,
                    keep.own(divided, self.rank),
                    level=keep.level,
                    rows=own_rows,
                )
                found.setdefault(weight.stages[0], {}).setdefault(divided.ranks, []).append(shard)
        return found

    def _shard(
        self, stage: int, by_ranks: Mapping[tuple[int, ...], Sequence[Shard]], program: StageProgram
    ) -> list[ShardSet]:
        """As many as there are buckets of gradients, or from level 2 on one per layer, for the same
        ranks."""
        found: list[ShardSet] = []
        layers: list[list[ShardSet]] = [[] for _ in range(program.num_layers)]
        for ranks, candidates in sorted(by_ranks.items()):
            level = self.keepings[candidates[0].weight.name].level
            way = way_of(ranks, (stage,), self.plan, self.groups, self.rank, self.roster)
            assert way is not None, "a group is open for all ranks that divide rows"
            shard_set = partial(ShardSet, level=level, way=way, exchanging=self.exchanging)
            if level == 1:
                found += [shard_set(bucket) for bucket in in_buckets(candidates, Shard.size)]
                continue
            for at, sets in enumerate(layers):
                own = [shard for shard in candidates if at in program.users(shard.weight)]
                sets += [shard_set(own)] if own else []
        if any(layers):
            self.gates[stage] = program.gate = WeightGate(layers)
        return found + [shard_set for sets in layers for shard_set in sets]
