"""A model as operations: what ``parallelize`` needs of one that is not cut into layers.

A cut that is given decides: the stage of every operation, as ``solve.stagecut.cut_graph`` has it. Without one, a model
with layers is cut where they end, which is how stages of layers get to be shared by tensor-parallel groups:

    (1)  an operation that runs in a module of layer l belongs to layer l, and to its stage
    (2)  any other goes with what it reads; none comes before what it reads

and one without layers in proportion to the numbers of layers that the plan gives its stages.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from argosy.cluster.file import cluster_from_content
from argosy.cost.group import device_group
from argosy.errors import InputError, Problem, RunError
from argosy.plan.plan import Plan
from argosy.runtime.boxes import boxes_of
from argosy.runtime.exchange import Exchange
from argosy.runtime.graphcut import ADDED, GraphCut, aligned
from argosy.runtime.graphstage import GraphStage, graph_weights, owner, segments_with
from argosy.runtime.holding import Kept, seats_in_group
from argosy.runtime.measure import Exchanging, untold
from argosy.runtime.parameters import Places, Weight
from argosy.runtime.ranks import members_of, seats_of
from argosy.runtime.recipe import autocast_for
from argosy.runtime.shards import take
from argosy.runtime.stage import LossFunction
from argosy.runtime.summing import Groups
from argosy.runtime.tensorstage import Sharing, TensorStage
from argosy.runtime.world import gather_texts
from argosy.solve.stagecut import cut_graph
from argosy.space.sharding import REPLICATED, Segments, State
from argosy.workload.capture.forward import Forward, capture_forward
from argosy.workload.capture.initial import FakeModel, Recording


class GraphSource:
    """Stages made of operations."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        plan: Plan,
        device: torch.device,
        roster: Sequence[str],
        *,
        seed: int,
        cut: Sequence[int] | None,
        layers: Sequence[nn.Module] = (),
        recording: Recording | None = None,
        is_compiled: bool = False,
    ) -> None:
        self.is_compiled = is_compiled
        self.model, self.device, self.roster, self.seed = model, device, roster, seed
        self.layers = layers
        given: dict[str, Any] = {"device": device, "recording": recording, "name": plan.model.name}
        self.forward = self.plain = capture_forward(model, loss_fn, batch, **given)
        autocast = autocast_for(plan.model.dtype, model.parameters())
        if autocast is not None:
            self.forward = capture_forward(model, loss_fn, batch, autocast=autocast, **given)
        self._take_up(plan, cut)

    def _take_up(self, plan: Plan, cut: Sequence[int] | None) -> None:
        """Cut the forward into the stages of a plan."""
        self.plan, forward, plain = plan, self.forward, self.plain
        planned = plan.operation_layers if cut == plan.cut else None
        layer_of = None if planned is None else aligned(forward, planned, plain)
        if cut is None and self.layers:
            layer_of = by_layers(forward, self.model, self.layers)
            stage_of = [at for at, stage in enumerate(plan.stages) for _ in range(stage.first, stage.end)]
            stages = tuple(stage_of[layer] for layer in layer_of)
        else:
            stages = aligned(forward, cut if cut is not None else agreed_cut(plain, plan, self.device), plain)
        self.cut = GraphCut(forward, stages, len(plan.stages), layer_of)
        self.cut.check_divided([len(stage.replicas) for stage in plan.stages], plan.num_micro_batches)
        weights = graph_weights(self.model, self.cut)
        self.shared = self._shared({weight.name for weight in weights if len(weight.stages) > 1})
        """Per stage of tensor-parallel groups, how they share it."""
        self.weights = tuple(replace(weight, cut=self._stored(weight)) for weight in weights)

    @property
    def undivided(self) -> tuple[int, ...]:
        """All layers, if the program mixes samples anywhere."""
        return tuple(range(self.plan.stages[-1].end)) if mixes_samples(self.forward) else ()

    def under(self, plan: Plan) -> GraphSource:
        """The same forward under another plan for it."""
        if plan.model.content != self.plan.model.content:
            raise InputError([Problem(path="plan.model", found=plan.model.name, expected="the program that runs")])
        if self.plan.cut is None and not self.layers:
            raise InputError([Problem(path="trainer", found="a cut of its own", expected="a plan that has its cut")])
        other = copy.copy(self)
        other._take_up(plan, plan.cut)
        return other

    def _shared(self, tied: set[str]) -> dict[int, Sharing]:
        values = self.cut.graph.values
        whole = frozenset(value for part in self.cut.parts for value in part.weights if values[value].name in tied)
        whole |= {value for value, _ in self.cut.graph.updates}
        found = {}
        for index, stage in enumerate(self.plan.stages):
            if stage.replicas[0].width > 1:
                members = members_of(self.plan, stage.replicas[0], self.roster)
                names = [self.roster[rank] for rank, _ in members]
                cluster = cluster_from_content(self.plan.cluster.content)
                found[index] = Sharing(
                    self.cut,
                    index,
                    device_group(cluster, names, self.plan.model.dtype),
                    tuple(share for _, share in members),
                    max(replica.samples for replica in stage.replicas),
                    self.plan.global_batch,
                    whole,
                )
        return found

    def check_agreed(self) -> None:
        """A ``RunError`` where ranks, each by itself, found different programs for a stage. Every rank calls this."""
        programs = []
        for index, sharing in self.shared.items():
            for samples in sorted({replica.samples for replica in self.plan.stages[index].replicas}):
                programs.append(str([sharing.stored, [str(row) for row in sharing.program(samples).rows]]))
        digest = hashlib.sha256("\n".join(programs).encode()).hexdigest()
        others = gather_texts(digest, self.device)
        if len(set(others)) > 1:
            odd = next(rank for rank, other in enumerate(others) if other != others[0])
            raise RunError(f"ranks 0 and {odd} found different programs for the same stages; are their packages alike?")

    def _stored(self, weight: Weight) -> State:
        """How groups share a weight."""
        sharing = self.shared.get(weight.stages[0])
        if sharing is None or len(weight.stages) > 1:
            return REPLICATED
        values = self.cut.graph.values
        return next((state for value, state in sharing.stored.items() if values[value].name == weight.name), REPLICATED)

    def part(self, rank: int) -> Callable[[Weight], Kept | None]:
        """Which part of a weight a rank keeps."""
        seats = [seat for stage in seats_of(self.plan, self.roster) for seat in stage if seat.rank == rank]
        member = {seat.stage: seat.member for seat in seats}

        def part(weight: Weight) -> Kept | None:
            if not weight.cut.is_sharded:
                return None
            stage = weight.stages[0]
            ratios = self.shared[stage].ratios
            boxes = boxes_of(weight.shape, weight.cut, ratios, member[stage])
            return boxes, lambda whole: take(whole, weight.cut, ratios, member[stage])

        return part

    def num_users(self, weight: Weight) -> int:
        """Segments of its stage that read a weight."""
        return len(segments_with(self.cut, self.cut.segments[weight.stages[0]], weight))

    def buffers(self, stages: Sequence[int]) -> Places:
        names = [self.cut.graph.values[value].name for index in stages for value in self.cut.parts[index].buffers]
        return [owner(self.model, name) for name in names]

    def programs(
        self, rank: int, stages: Sequence[int], groups: Groups, exchanging: Exchanging = untold
    ) -> dict[int, GraphStage]:
        return {index: self._program(index, rank, groups, exchanging) for index in stages}

    def _program(self, index: int, rank: int, groups: Groups, exchanging: Exchanging) -> GraphStage:
        recompute = self.plan.stages[index].recompute
        if index not in self.shared:
            return GraphStage(
                self.cut,
                index,
                self.model,
                recompute=recompute,
                device=self.device,
                seed=self.seed,
                is_compiled=self.is_compiled,
            )
        sharing = self.shared[index]
        ranks = next(ranks for ranks in seats_in_group(self.plan, index, self.roster) if rank in ranks)
        exchange = Exchange(Segments((sharing.ratios,)), groups[ranks], exchanging)
        return TensorStage(sharing, exchange, self.model, recompute=recompute, device=self.device, seed=self.seed)


def by_layers(forward: Forward, model: nn.Module, layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """(1), (2): the layer of every operation."""
    names = {id(module): name for name, module in model.named_modules()}
    layer_of: dict[str, int] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if names.get(id(module)):
                layer_of.setdefault(names[id(module)], index)
    found: list[int] = []
    for node in forward.graph.nodes:
        makers = [forward.graph.producer[value] for value in node.inputs if value in forward.graph.producer]
        before = max((found[maker] for maker in makers), default=0)
        path = node.module
        while path and path not in layer_of:
            path = path.rpartition(".")[0]
        found.append(max(before, layer_of.get(path, 0)))
    return tuple(found)


def forward_of(fake: FakeModel) -> Forward:
    """The forward of a program that was built without values."""
    return capture_forward(fake.model, fake.loss, fake.batch, device=torch.device("cpu"), recording=fake.recording)


def divides(forward: Forward, plan: Plan) -> bool:
    """Whether the replicas and micro-batches of a plan of operations can divide the samples of a program."""
    if plan.cut is None:
        return True
    replicas = [len(stage.replicas) for stage in plan.stages]
    try:
        GraphCut(forward, aligned(forward, plan.cut), len(replicas)).check_divided(replicas, plan.num_micro_batches)
    except InputError:
        return False
    return True


def mixes_samples(forward: Forward) -> str | None:
    """Why a program can only run on all samples of a batch at once; None if it can run on parts of them."""
    try:
        GraphCut(forward, [0] * len(forward.graph.nodes), 1).check_divided([1], 2)
    except InputError as error:
        return str(error)
    return None


def agreed_cut(forward: Forward, plan: Plan, device: torch.device) -> tuple[int, ...]:
    """Rank 0's cut in proportion to the plan's layers, on every rank: a solver with a time limit may find others."""
    if len(plan.stages) == 1:
        return (0,) * sum(node.op not in ADDED for node in forward.graph.nodes)
    text = ""
    if dist.get_rank() == 0:
        total = plan.stages[-1].end
        shares = [(stage.end - stage.first) / total for stage in plan.stages]
        stages = cut_graph(forward.graph, shares).stages
        kept = [at for at, node in zip(stages, forward.graph.nodes, strict=True) if node.op not in ADDED]
        text = json.dumps(kept)
    return tuple(json.loads(gather_texts(text, device)[0]))
