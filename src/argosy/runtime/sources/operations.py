"""Make stages from the operations of a model that is not divided into layers.

A given cut assigns a stage to every operation, as ``solve.programs.stagecut.cut_graph`` returns it.
Without one, a model with layers is cut at the ends of layers, so that tensor-parallel groups can
share stages of layers:

    (1)  an operation that runs in a module of layer l belongs to layer l, and to its stage
    (2)  any other operation belongs to the layer of its inputs; none comes before its inputs

A model without layers is cut in proportion to the numbers of layers that the plan gives its stages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from argosy.dtype import Dtype
from argosy.errors import InputError, RunError
from argosy.plan.group_program import GroupProgram
from argosy.plan.plan import Plan
from argosy.runtime.communication.boxes import TensorBox, boxes_of
from argosy.runtime.communication.exchange import GroupExchange
from argosy.runtime.communication.marks import Exchanging, untold
from argosy.runtime.graphs.cut import ADDED, GraphCut, aligned
from argosy.runtime.processes.ranks import (
    Seat,
    devices_by_rank,
    grid_ranks,
    parts_of,
    replica_ranks,
    seats_of,
)
from argosy.runtime.processes.world import gather_texts
from argosy.runtime.sources.expert_sharing import ExpertSharing
from argosy.runtime.sources.recipe import Recipe, autocast_for
from argosy.runtime.sources.sharing import sharings
from argosy.runtime.stages.context_stage import (
    ContextStage,
    SequenceExchange,
    sequence_sharing,
    sequence_states,
)
from argosy.runtime.stages.graph_stage import (
    GraphStage,
    expert_modules_of,
    graph_weights,
    owner,
    segments_with,
)
from argosy.runtime.stages.grid_stage import GridExchanges, GridSharing, GridStage
from argosy.runtime.stages.parameters import Catalogue, Places, Weight, buffer_places
from argosy.runtime.stages.tensor_stage import TensorStage
from argosy.runtime.weights.summing import Groups
from argosy.solve.program_plans import CapturedProgram
from argosy.solve.programs.sequence import sequence_length
from argosy.solve.programs.sequence_segments import with_sequence_parts
from argosy.solve.programs.stagecut import cut_graph
from argosy.space.operations.segments import chain_of_step
from argosy.space.operations.sharding import REPLICATED, State
from argosy.workload.capture.forward import COUNTS, Forward, capture_forward
from argosy.workload.capture.initial import FakeModel, build_fake
from argosy.workload.capture.modules import OpaqueModules
from argosy.workload.capture.trace import Build, capture_fake, num_samples
from argosy.workload.chain import Chain
from argosy.workload.graph import Graph
from argosy.workload.part import forward_order

_DTYPES = {"float16": Dtype.FP16, "bfloat16": Dtype.BF16}
"""Dtypes of a plan by torch's names; any other dtype counts as fp32."""


class Captured(NamedTuple):
    """A model whose forward was captured."""

    plain: Forward
    forward: Forward
    """The forward in the precision of the run."""
    catalogue: Catalogue
    layers: Sequence[nn.Module]
    """The layers of the model if stages end where layers end; otherwise none."""


class GraphSource:
    """A source of stages that are made of operations."""

    def __init__(
        self, recipe: Recipe, captured: Captured, plan: Plan, cut: Sequence[int] | None
    ) -> None:
        self.recipe, self.plan, self.forward = recipe, plan, captured.forward
        forward, plain, self.layers = captured.forward, captured.plain, captured.layers
        planned = plan.operation_layers if cut == plan.cut else None
        layer_of = None if planned is None else aligned(forward, planned, plain)
        if cut is None and self.layers:
            layer_of = by_layers(forward, recipe.model, self.layers)
            stage_of = [
                at for at, stage in enumerate(plan.stages) for _ in range(stage.first, stage.end)
            ]
            stages = tuple(stage_of[layer] for layer in layer_of)
        else:
            stages = aligned(
                forward, cut if cut is not None else agreed_cut(plain, plan, recipe.device), plain
            )
        self.cut = GraphCut(forward, stages, len(plan.stages), layer_of)
        self.cut.check_divided(
            [len(stage.replicas) for stage in plan.stages], plan.num_micro_batches
        )
        self.weights = graph_weights(captured.catalogue, self.cut)
        self.experts = ExpertSharing(
            plan,
            recipe.roster,
            captured.catalogue.experts,
            expert_modules_of(self.cut, recipe.model),
        )
        self.shared = sharings(plan, self.cut, recipe.roster)
        """By stage and replica, how its tensor-parallel group shares it."""
        self.sequences = {
            (index, at): sequence_sharing(self.cut, plan, index, replica, recipe.roster)
            for index, stage in enumerate(plan.stages)
            for at, replica in enumerate(stage.replicas if stage.context > 1 else ())
            if (index, at) not in self.shared
        }
        """By stage and replica that divides the sequence over single devices, how it does."""

    @property
    def undivided(self) -> tuple[int, ...]:
        """Return all layers if the program mixes samples anywhere, else none."""
        return tuple(range(self.plan.stages[-1].end)) if mixes_samples(self.forward) else ()

    @property
    def shares_operations(self) -> bool:
        return bool(self.shared or self.sequences)

    def check_agreed(self) -> None:
        """Raise a ``RunError`` if ranks, each on its own, found different programs for a stage.
        Every rank calls this."""
        programs = []
        for (index, at), sharing in self.shared.items():
            samples = self.plan.stages[index].replicas[at].samples
            programs.append(
                str([sharing.stored, [str(row) for row in sharing.steps(samples).rows]])
            )
        digest = hashlib.sha256("\n".join(programs).encode()).hexdigest()
        digests = gather_texts(digest, self.recipe.device)
        if len(set(digests)) > 1:
            other = next(at for at, text in enumerate(digests) if text != digests[0])
            raise RunError(
                f"ranks 0 and {other} found different programs for the same stages; "
                "install the same packages on all hosts"
            )

    def stored(self, weight: Weight, stage: int, replica: int = 0) -> State:
        """Return how the group of a stage's replica shares a weight."""
        sharing = self.shared.get((stage, replica))
        if sharing is None:
            return REPLICATED
        values = self.cut.graph.values
        return next(
            (state for value, state in sharing.stored.items() if values[value].name == weight.name),
            REPLICATED,
        )

    def held(self, weight: Weight) -> dict[int, tuple[TensorBox, ...]]:
        experts = self.experts.held(weight)
        if experts is not None:
            return experts
        boxes: dict[int, tuple[TensorBox, ...]] = {}
        seats = seats_of(self.plan, self.recipe.roster)
        for seat in (seat for stage in weight.stages for seat in seats[stage]):
            state = self.stored(weight, seat.stage, seat.replica)
            ratios = self.shared[seat.stage, seat.replica].ratios if state.is_sharded else ()
            boxes[seat.rank] = boxes_of(weight.shape, state, ratios, self._column(seat))
        return boxes

    def _column(self, seat: Seat) -> int:
        """Return a seat's index in its tensor-parallel group."""
        stage = self.plan.stages[seat.stage]
        replica = stage.replicas[seat.replica]
        parts = parts_of(self.plan, stage, replica, self.recipe.roster)
        return next(
            part.index(member) for part in parts for member in part if member[0] == seat.rank
        )

    def num_users(self, weight: Weight) -> int:
        """Return the number of segments of its stage that read a weight."""
        return len(segments_with(self.cut, self.cut.segments[weight.stages[0]], weight))

    def buffers(self, stages: Sequence[int]) -> Places:
        """Return the places of buffers that operations read and, if stages end with layers, of all
        buffers of the layers."""
        names = [
            self.cut.graph.values[value].name
            for index in stages
            for value in self.cut.parts[index].buffers
        ]
        places = [owner(self.recipe.model, name) for name in names]
        ranges = ((self.plan.stages[index].first, self.plan.stages[index].end) for index in stages)
        places += buffer_places(layer for first, end in ranges for layer in self.layers[first:end])
        return list({(id(module), name): (module, name) for module, name in places}.values())

    def programs(
        self, rank: int, stages: Sequence[int], groups: Groups, exchanging: Exchanging = untold
    ) -> dict[int, GraphStage]:
        self.experts.install(rank, stages, groups, exchanging)
        programs = {index: self._program(index, rank, groups, exchanging) for index in stages}
        autocast = autocast_for(self.plan.model.dtype, self.recipe.model.parameters())
        for program in programs.values():
            program.autocast = autocast
        return programs

    def _program(self, index: int, rank: int, groups: Groups, exchanging: Exchanging) -> GraphStage:
        recipe = self.recipe
        settings: Any = {
            "recompute": self.plan.stages[index].recompute,
            "device": recipe.device,
            "seed": recipe.seed,
        }
        replicas = enumerate(replica_ranks(self.plan, index, recipe.roster))
        at, ranks = next((at, ranks) for at, ranks in replicas if rank in ranks)
        sharing, sequence = self.shared.get((index, at)), self.sequences.get((index, at))
        if sharing is None and sequence is None:
            compiled = recipe.is_compiled
            return GraphStage(self.cut, index, recipe.model, is_compiled=compiled, **settings)
        if isinstance(sharing, GridSharing):
            lines = grid_ranks(self.plan, index, recipe.roster)
            row, column = (groups[line] for line in lines if rank in line)
            exchanges = GridExchanges(
                GroupExchange(sharing.ratios, row, exchanging),
                SequenceExchange(sharing.sequence.parts, column, exchanging),
            )
            return GridStage(sharing, exchanges, recipe.model, **settings)
        if sequence is not None:
            exchange = SequenceExchange(sequence.parts, groups[ranks], exchanging)
            return ContextStage(sequence, exchange, recipe.model, **settings)
        assert sharing is not None
        own = GroupExchange(sharing.ratios, groups[ranks], exchanging)
        return TensorStage(sharing, own, recipe.model, **settings)


def by_layers(forward: Forward, model: nn.Module, layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return the layer of every operation by (1) and (2)."""
    names = {id(module): name for name, module in model.named_modules()}
    layer_of: dict[str, int] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if names.get(id(module)):
                layer_of.setdefault(names[id(module)], index)
    layer_of_node: list[int] = []
    for node in forward.graph.nodes:
        makers = [
            forward.graph.producer[value]
            for value in node.inputs
            if value in forward.graph.producer
        ]
        before = max((layer_of_node[maker] for maker in makers), default=0)
        path = node.module
        while path and path not in layer_of:
            path = path.rpartition(".")[0]
        layer_of_node.append(max(before, layer_of.get(path, 0)))
    return tuple(layer_of_node)


def forward_of(fake: FakeModel, autocast: torch.dtype | None = None) -> Forward:
    """Capture the forward of a program that was built without values."""
    device = torch.device("cpu")
    return capture_forward(
        fake.model,
        fake.loss,
        fake.batch,
        device=device,
        recording=fake.recording,
        autocast=autocast,
        opaque=fake.opaque,
    )


def capture_program(
    build: Build, *, name: str = "program", dtype: Dtype | None = None, powersgd: int = 0
) -> CapturedProgram:
    """Return the step of ``build() -> (model, loss_fn, batch)`` as ``find_plan`` takes it; nothing
    has values.

    ``dtype`` is the number format of matrix products, by default that of the largest parameter. A
    batch of one sample is captured with two, because libraries omit operations for one row, and the
    runtime needs those for any number of rows.
    """
    fake = replace(build_fake(build), opaque=OpaqueModules())
    forward, samples = forward_of(fake), num_samples(fake)
    captured = max(samples, COUNTS[0])
    size = None if captured == samples else captured
    graph = capture_fake(fake, name=name, samples=size)
    chain = chain_of_step(graph, captured, dtype or _own_dtype(graph), powersgd=powersgd)
    return CapturedProgram(
        graph=graph,
        chain=_with_sequence_parts(chain, forward, graph, captured),
        samples=samples,
        captured=captured,
        mixes=mixes_samples(forward),
        divides=lambda plan: divides(forward, plan),
        programs=lambda plan: group_programs(fake, plan),
    )


def _with_sequence_parts(chain: Chain, forward: Forward, graph: Graph, captured: int) -> Chain:
    """Return the chain of a step with the parts into which a run can cut its sequences; unchanged
    if it has none that can be cut."""
    try:
        length = sequence_length(forward.graph)
    except InputError:
        return chain
    cut = GraphCut(forward, [0] * len(forward.graph.nodes), 1)
    states = sequence_states(cut, length, captured, captured)
    ends = [(layer.operations or (0, 0)) for layer in chain.layers]
    layers = [at for at, (first, end) in enumerate(ends) for _ in range(first, end)]
    kept = set()
    step = (graph.nodes[node] for node in forward_order(graph))
    own = (node for node in forward.graph.nodes if node.op not in ADDED)
    for node, twin in zip(step, own, strict=True):
        pairs = zip(node.outputs, twin.outputs, strict=False)
        kept |= {here for there, here in pairs if there in graph.kept and here is not None}
    return with_sequence_parts(chain, states, aligned(forward, layers), kept, captured)


def _own_dtype(graph: Graph) -> Dtype:
    """Return the number format of the largest parameter."""
    largest = max(graph.parameters, key=lambda value: graph.values[value].elements, default=None)
    return (
        _DTYPES.get(graph.values[largest].dtype, Dtype.FP32) if largest is not None else Dtype.FP32
    )


def divides(forward: Forward, plan: Plan) -> bool:
    """Return whether the replicas and micro-batches of a plan of operations can divide the samples
    of a program."""
    if plan.cut is None:
        return True
    replicas = [len(stage.replicas) for stage in plan.stages]
    try:
        GraphCut(forward, aligned(forward, plan.cut), len(replicas)).check_divided(
            replicas, plan.num_micro_batches
        )
    except InputError:
        return False
    return True


def group_programs(fake: FakeModel, plan: Plan) -> tuple[GroupProgram, ...]:
    """Return the programs of the tensor-parallel groups of a plan for a captured model, which the
    runtime executes as they are."""
    if plan.cut is None or not any(
        replica.width > 1 for stage in plan.stages for replica in stage.replicas
    ):
        return ()
    plain = forward = forward_of(fake)
    if (autocast := autocast_for(plan.model.dtype, fake.model.parameters())) is not None:
        forward = forward_of(fake, autocast)
    layers = aligned(forward, plan.operation_layers or (), plain)
    cut = GraphCut(forward, aligned(forward, plan.cut, plain), len(plan.stages), layers)
    programs: dict[tuple[int, tuple[float, ...], int], GroupProgram] = {}
    for (index, at), sharing in sharings(
        replace(plan, programs=()), cut, devices_by_rank(plan)
    ).items():
        samples = plan.stages[index].replicas[at].samples
        if isinstance(sharing, GridSharing):
            continue
        if (index, sharing.ratios, samples) not in programs:
            programs[index, sharing.ratios, samples] = sharing.record(samples)
    return tuple(programs.values())


def mixes_samples(forward: Forward) -> str | None:
    """Return why a program can only run on all samples of a batch at once; None if it can run on
    parts of them."""
    try:
        GraphCut(forward, [0] * len(forward.graph.nodes), 1).check_divided([1], 2)
    except InputError as error:
        return str(error)
    return None


def agreed_cut(forward: Forward, plan: Plan, device: torch.device) -> tuple[int, ...]:
    """Return rank 0's cut in proportion to the plan's layers on every rank, since a solver with a
    time limit may find different cuts."""
    if len(plan.stages) == 1:
        return (0,) * sum(node.op not in ADDED for node in forward.graph.nodes)
    text = ""
    if dist.get_rank() == 0:
        total = plan.stages[-1].end
        shares = [(stage.end - stage.first) / total for stage in plan.stages]
        stages = cut_graph(forward.graph, shares).stages
        kept = [
            at for at, node in zip(stages, forward.graph.nodes, strict=True) if node.op not in ADDED
        ]
        text = json.dumps(kept)
    return tuple(json.loads(gather_texts(text, device)[0]))
