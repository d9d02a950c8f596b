"""Keep a rank's part of a model, whole weights or rows of them, with their initial values."""

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
from argosy.errors import invalid
from argosy.plan.plan import Plan, Stage
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
from argosy.runtime.processes.ranks import expert_ranks, grid_ranks, replica_ranks, seats_of
from argosy.runtime.processes.world import gather_texts
from argosy.runtime.stages.parameters import Places, Weight
from argosy.runtime.stages.stage import StageProgram
from argosy.runtime.weights.gate import WeightGate
from argosy.runtime.weights.gradients import EarlyRules, Gradients
from argosy.runtime.weights.overlap import Summand, in_buckets
from argosy.runtime.weights.sharding import Shard, ShardSet
from argosy.runtime.weights.summing import Groups, SingleRank, groups_needed, way_of
from argosy.workload.capture.initial import Recording

Proportions = Callable[[int], Sequence[float]]
"""A function from a stage to the proportions in which ZeRO divides rows among its replicas."""


class Divided(NamedTuple):
    """A region whose rows are divided under ZeRO among the ranks that hold it."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    """The number of rows that each rank keeps."""
    region: Region | None
    """The region of the whole weight; None for everything that each of the ranks holds."""

    def rows(self, rank: int) -> tuple[int, int]:
        """Return begin and end of a rank's rows."""
        at = self.ranks.index(rank)
        begin = offsets(self.sizes)[at]
        return begin, begin + self.sizes[at]


@dataclass(frozen=True)
class Keeping:
    """A record of the ranks that hold a weight under a plan, and of their parts. Sums, checkpoints,
    copies and migrations use no other record."""

    held: Mapping[int, tuple[TensorBox, ...]]
    """By rank, the boxes that it computes with."""
    level: int = 0
    """The level of ZeRO; 0 if every rank keeps everything that it computes with."""
    divided: tuple[Divided, ...] = ()
    """The regions whose rows are divided, if the level is not 0."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.held))

    @property
    def is_divided(self) -> bool:
        """Return whether some rank keeps only a part of the weight or of its state."""
        return self.level > 0 or len(set(self.held.values())) > 1

    @cached_property
    def sums(self) -> dict[tuple[int, ...], list[Region]]:
        """Return, by set of ranks, the regions that they all hold and sum the gradients of."""
        regions_by_ranks: dict[tuple[int, ...], list[Region]] = {}
        regions = {rank: [box.region for box in boxes] for rank, boxes in self.held.items()}
        for region, ranks in shared_regions(regions):
            regions_by_ranks.setdefault(ranks, []).append(region)
        return regions_by_ranks

    def sharers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same part as this one."""
        return tuple(peer for peer in self.ranks if self.held[peer] == self.held[rank])

    def own(self, divided: Divided, rank: int) -> tuple[TensorBox, ...]:
        """Return the boxes of the rows that a rank keeps of a divided region."""
        begin, end = divided.rows(rank)
        if divided.region is None:
            return rows_of(self.held[rank], begin, end)
        return rows_of((box_at(divided.region),), begin, end)

    def kept(self, rank: int, *, value: bool) -> tuple[tuple[TensorBox, ...], ...]:
        """Return what a rank keeps of the weight's values, or else of its optimizer's state, as the
        boxes of each tensor."""
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
    """Move this rank's parts of weights to the device, one at a time, and free all others; return
    the weights that are kept.

    ``share`` gives a weight the initial values of its first holder, if they are not recorded.
    """
    kept = []
    for weight in weights:
        boxes = keepings[weight.name].held.get(rank)
        data = weight.installed.detach()
        if boxes is None:
            weight.install(weight.parameter)
            continue
        data = _real(data, weight.name, recording).to(device)
        if keepings[weight.name].level == 3:
            data = _in_own_storage(data)
        if recording is None:
            share(weight, data)
        whole = HeldPart(data, rows(0, weight.shape))
        kept.append(kept_weight(weight, _part_of(whole, boxes)))
    return tuple(kept)


def _in_own_storage(data: Tensor) -> Tensor:
    """Return a tensor whose storage can be freed and allocated again without touching others.

    Weights that were read from a file may be views of its memory map, which has a fixed size.
    """
    storage = data.untyped_storage()
    is_alone = storage.nbytes() == data.numel() * data.element_size()
    return data if is_alone and storage.resizable() else data.clone()


def _part_of(whole: HeldPart, boxes: tuple[TensorBox, ...]) -> HeldPart:
    if boxes == whole.boxes:
        return whole
    part = HeldPart.empty(boxes, dtype=whole.tensor.dtype, device=whole.tensor.device)
    part.take(whole)
    return part


def kept_weight(weight: Weight, part: HeldPart) -> Weight:
    """Install a part of a weight as the parameter that this rank holds, and return the weight."""
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
    """Give every holder of a buffer the values of its first holder. ``stages`` lists the places of
    each stage's buffers."""
    buffers: dict[int, tuple[Tensor, list[tuple[nn.Module, str]], set[int]]] = {}
    for places, seats in zip(stages, seats_of(plan, roster), strict=True):
        for module, name in places:
            buffer = module._buffers[name]
            if buffer is not None and not buffer.is_meta and buffer.numel():
                _, held_at, ranks = buffers.setdefault(id(buffer), (buffer, [], set()))
                held_at.append((module, name))
                ranks.update(seat.rank for seat in seats)
    where = device if dist.get_backend() == "nccl" else torch.device("cpu")
    copies = [
        buffer.detach().to(where, copy=True).contiguous() for buffer, _, _ in buffers.values()
    ]
    digest = hashlib.sha256(b"".join(_as_bytes(copy).cpu().numpy().tobytes() for copy in copies))
    if len(set(gather_texts(digest.hexdigest(), device))) == 1:
        return
    for copy, (_, held_at, ranks) in zip(copies, buffers.values(), strict=True):
        dist.broadcast(_as_bytes(copy), min(ranks))
        for module, name in held_at:
            module._buffers[name] = copy


def _as_bytes(content: Tensor) -> Tensor:
    """Return a tensor of any dtype as bytes, since backends do not support all dtypes."""
    return content.view(-1).view(torch.uint8)


def keep_buffers(places: Places, device: torch.device, recording: Recording | None) -> None:
    """Move buffers to the device."""
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
        raise invalid(name, "a weight on the meta device", "values", suggestion=suggestion)
    return recording.materialise([tensor])[0]


def initial_values(
    keepings: Mapping[str, Keeping], groups: Groups
) -> Callable[[Weight, Tensor], None]:
    """Return a function that gives every holder of a weight the values of its first holder."""

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
    """Return how ranks keep a weight.

    ZeRO divides it in rows, unless it is frozen, tied across stages, replicated in a
    tensor-parallel group, or, from level 2 on, shared by layers of one stage. ``num_users`` returns
    the number of its stage's layers that use it, ``held`` gives boxes by rank, and ``parts`` the
    proportions in which ranks divide rows.
    """
    stage = plan.stages[weight.stages[0]]
    whole = Keeping(held)
    num_layers = num_users(weight) if stage.zero > 1 else 0
    is_divided = weight.parameter.dim() > 0 and weight.parameter.requires_grad
    zero = plan.zero_of(weight.stages, num_layers) if is_divided else 0
    has_groups = not stage.parts_are_alone
    is_cut = len(set(held.values())) > 1
    if not zero or stage.num_holders == 1 or (has_groups and not is_cut):
        return whole
    pieces: list[tuple[tuple[int, ...], Region | None, int]] = []
    for ranks, regions in sorted(whole.sums.items()):
        if ranks == whole.sharers(ranks[0]):
            pieces.append((ranks, None, held_shape(held[ranks[0]])[0]))
        else:
            pieces += [(ranks, region, int(region[0][1] - region[0][0])) for region in regions]
    divided = [
        Divided(ranks, tuple(split_by(count, [parts[rank] for rank in ranks])), region)
        for ranks, region, count in pieces
    ]
    return Keeping(held, zero, tuple(divided))


def groups_of(
    weights: Sequence[Weight], keepings: Mapping[str, Keeping], plan: Plan, roster: Sequence[str]
) -> list[tuple[int, ...]]:
    """Return every set of ranks that shares or sums something."""
    sets = _groups_inside_layers(plan, roster)
    for weight in weights:
        sets.append(keepings[weight.name].ranks)
        for ranks in keepings[weight.name].sums:
            sets += groups_needed(ranks, weight.stages, plan, roster)
    return sets


def _groups_inside_layers(plan: Plan, roster: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the sets of ranks that exchange tensors inside the layers of a stage."""
    stages = range(len(plan.stages))
    groups = [replica_ranks(plan, stage, roster) for stage in stages]
    groups += [expert_ranks(plan, stage, roster) for stage in stages]
    groups += [grid_ranks(plan, stage, roster) for stage in stages]
    return [ranks for stage_groups in groups for ranks in stage_groups]


def _is_alone(stage: Stage) -> bool:
    return stage.expert == 1 and all(replica.width == 1 for replica in stage.replicas)


class WeightDivision:
    """A division of a rank's weights into those that are held whole and those held in rows."""

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
        """Divide the weights. ``rows`` holds this rank's rows of weights of level 3 that are not in
        memory whole."""
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
        for shard_set in shards:  # released after all are made, since a weight may be in several
            shard_set.release()
        shared = [
            (way_of(ranks, stages, plan, groups, rank, roster), ranks, held)
            for (ranks, stages), held in sorted(self._summed(whole).items())
        ]
        self.gradients = Gradients(
            whole,
            shared,
            shards,
            rank,
            powersgd=plan.model.powersgd,
            early=EarlyRules(
                _groups_inside_layers(plan, roster),
                [index for index, stage in enumerate(plan.stages) if _is_alone(stage)],
            ),
        )

    def _summed(
        self, weights: Sequence[Weight]
    ) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[Summand]]:
        """Return the weights to sum, by the ranks that hold them and the stages that use them."""
        summands: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Summand]] = {}
        for weight in weights:
            keep = self.keepings[weight.name]
            for ranks, regions in keep.sums.items():
                if self.rank in ranks:
                    part = None if ranks == keep.sharers(self.rank) else regions
                    summands.setdefault((ranks, weight.stages), []).append(Summand(weight, part))
        return summands

    def _parted(
        self, weights: Sequence[Weight], rows: Mapping[str, Sequence[Tensor]]
    ) -> dict[int, dict[tuple[int, ...], list[Shard]]]:
        """Return shards by stage and by the ranks that divide the rows."""
        shards: dict[int, dict[tuple[int, ...], list[Shard]]] = {}
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
                shards.setdefault(weight.stages[0], {}).setdefault(divided.ranks, []).append(shard)
        return shards

    def _shard(
        self, stage: int, by_ranks: Mapping[tuple[int, ...], Sequence[Shard]], program: StageProgram
    ) -> list[ShardSet]:
        """Return the shard sets of a stage: one per bucket of gradients, or from level 2 on one per
        layer, for each set of ranks."""
        shard_sets: list[ShardSet] = []
        layers: list[list[ShardSet]] = [[] for _ in range(program.num_layers)]
        for ranks, candidates in sorted(by_ranks.items()):
            level = self.keepings[candidates[0].weight.name].level
            way = way_of(ranks, (stage,), self.plan, self.groups, self.rank, self.roster)
            if way is None:  # one rank has this part alone, as it may have some of the experts
                way = SingleRank()
            shard_set = partial(ShardSet, level=level, way=way, exchanging=self.exchanging)
            if level == 1:
                shard_sets += [shard_set(bucket) for bucket in in_buckets(candidates, Shard.size)]
                continue
            for at, sets in enumerate(layers):
                own = [shard for shard in candidates if at in program.users(shard.weight)]
                sets += [shard_set(own)] if own else []
        if any(layers):
            self.gates[stage] = program.gate = WeightGate(layers)
        return shard_sets + [shard_set for sets in layers for shard_set in sets]
