"""Determine which segments of a captured step a tensor-parallel group can share, and what it sends
for it.

A group shares the forward of the step by the cheapest program among the cuts of weights and of
positions between them (``tensor_program``), as the runtime does for every stage. In that program, a
segment has

    (1)  width      the most devices among which it leaves hardly any of its work and weights, or of
                    the model's, whole
    (2)  reduced    bytes of the all-reduces of what it makes; a gather, or a scatter, is half of
                    one. The backward of a collective is one of the same size, so a backward sends
                    as much as a forward
    (3)  stream     kept bytes that every device has whole

as the mean over segments that do the same, so that equal segments stay equal. A stage sends its
results on whole; the collectives that gather them at its end are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from argosy.cost.group import DeviceGroup, GroupCollective
from argosy.errors import InfeasibleError
from argosy.solve.programs.placement import Pricing, exchanged_bytes
from argosy.solve.programs.spmd import Program, find_program, tensor_program
from argosy.space.operations.calls import call_of
from argosy.space.operations.flop import flop_of
from argosy.space.operations.rules import CutKind
from argosy.space.operations.sharding import REPLICATED
from argosy.workload.chain import Chain
from argosy.workload.graph import Graph, GraphNode
from argosy.workload.part import forward_order, renamed

# Maximum share of a segment's FLOP that every device of a group may do whole.
_WHOLE_WORK = 0.02
# Maximum share of a segment's weights that every device may hold whole.
_WHOLE_WEIGHTS = 0.02
# Work and weights below this share of the model's may be whole in any segment, such as masks.
_LITTLE = 1e-3
_ALL_REDUCES = {
    GroupCollective.ALL_REDUCE: 1.0,
    GroupCollective.ALL_GATHER: 0.5,
    GroupCollective.REDUCE_SCATTER: 0.5,
}
"""The cost of each collective as a share of an all-reduce."""
# Speeds of the group for which the program is chosen (FLOP/s, bytes/s, bytes/s, seconds); the
# search decides by the real ones which plans have groups.
_FLOPS, _MEMORY_BANDWIDTH, _BANDWIDTH, _LATENCY = 2e14, 2e12, 2e11, 5e-6


@dataclass(frozen=True, kw_only=True)
class _Share:
    """The way in which groups share a segment; bytes are those of the captured batch."""

    width: int = 1
    reduced: float = 0.0
    stream: float = 0.0


def with_tensor_groups(chain: Chain, graph: Graph, samples: int, widest: int) -> Chain:
    """Return the chain of a step on ``samples`` samples, with segments that state how groups of up
    to ``widest`` devices share them."""
    forward, width = _Forward(chain, graph), 2
    shares = [_Share()] * len(chain.layers)
    while width <= widest:
        try:
            new = forward.shares(width)
        except InfeasibleError:
            break
        shares = [
            now if now and before.width == width // 2 else before
            for before, now in zip(shares, new, strict=True)
        ]
        width *= 2
    layers = tuple(
        replace(
            layer,
            max_tensor_width=share.width,
            reduced_bytes=share.reduced / samples,
            stream_bytes=min(share.stream / samples, layer.activation_bytes),
        )
        for layer, share in zip(chain.layers, shares, strict=True)
    )
    return replace(chain, layers=layers)


def group_ratios(graph: Graph, group: DeviceGroup) -> tuple[float, ...]:
    """Ratios at which a group shares the forward of a step fastest."""
    return find_program(forward_graph(graph), Pricing(group=group), kind=CutKind.TENSOR).ratios


def forward_graph(graph: Graph) -> Graph:
    """Return the forward of a step alone."""
    nodes = tuple(graph.nodes[node] for node in forward_order(graph))
    made = {value for node in nodes for value in node.outputs}
    return Graph(
        name=graph.name,
        values=graph.values,
        nodes=nodes,
        loss=graph.loss,
        gradients=(),
        updates=tuple((value, after) for value, after in graph.updates if after in made),
        constants=graph.constants,
        own_gradients=graph.own_gradients,
    )


class _Forward:
    """The forward of a step, whose operations are assigned to segments."""

    def __init__(self, chain: Chain, graph: Graph) -> None:
        self.graph = forward_graph(graph)
        self.bounds = [layer.operations or (0, 0) for layer in chain.layers]
        self.kept = [value for value in graph.kept if value in self.graph.producer]
        self.segment = [
            at for at, (first, end) in enumerate(self.bounds) for _ in range(first, end)
        ]
        """Segment of each operation."""
        self.looks = [_look(self.graph, self.graph.nodes[first:end]) for first, end in self.bounds]
        self.flop = [flop_of(call_of(self.graph, node)) for node in self.graph.nodes]
        """FLOP of each operation."""
        self.few, self.little = _LITTLE * chain.parameters, _LITTLE * sum(self.flop)

    def shares(self, width: int) -> list[_Share | None]:
        """Return how groups of this width share each segment, (1) to (3); None for a segment that
        they do not divide."""
        program = self._program(width)
        is_divided, reduced, stream = (
            self._divided(program),
            self._reduced(program),
            self._stream(program),
        )
        by_look: dict[object, list[int]] = {}
        for at, look in enumerate(self.looks):
            by_look.setdefault(look, []).append(at)
        shares: list[_Share | None] = [None] * len(self.bounds)
        for segments in by_look.values():
            share = _Share(
                width=width,
                reduced=fmean(reduced[at] for at in segments),
                stream=fmean(stream[at] for at in segments),
            )
            for at in segments:
                shares[at] = share if all(is_divided[member] for member in segments) else None
        return shares

    def _program(self, width: int) -> Program:
        group = DeviceGroup(
            names=tuple(f"member {at}" for at in range(width)),
            flops=(_FLOPS,) * width,
            memory_bandwidths=(_MEMORY_BANDWIDTH,) * width,
            bandwidth=_BANDWIDTH,
            latency=_LATENCY,
        )
        changed = {value for value, _ in self.graph.updates}
        return tensor_program(self.graph, Pricing(group=group), group.even, whole=changed)

    def _readers(self, value: int) -> set[int]:
        """Return the segments that read a value."""
        return {self.segment[node] for node in self.graph.consumers[value]}

    def _divided(self, program: Program) -> list[bool]:
        """Return for each segment whether hardly any work and weights are whole on every device."""
        work, weights = [[0.0, 0.0] for _ in self.bounds], [[0.0, 0.0] for _ in self.bounds]
        for at, flop, row in zip(self.segment, self.flop, program.rows, strict=True):
            work[at][not row.units] += flop
        for value in self.graph.parameters:
            for at in self._readers(value):
                is_whole = program.deliveries[value].stored == REPLICATED
                weights[at][is_whole] += self.graph.values[value].elements
        return [
            undone <= max(self.little, _WHOLE_WORK * (done + undone))
            and whole <= max(self.few, _WHOLE_WEIGHTS * (cut + whole))
            for (done, undone), (cut, whole) in zip(work, weights, strict=True)
        ]

    def _reduced(self, program: Program) -> list[float]:
        """Return the bytes of all-reduces (2), by the segment that makes a value, or first reads
        it."""
        reduced = [0.0] * len(self.bounds)
        for move in program.moves:
            if move.step.kind is not GroupCollective.SLICE:
                node = self.graph.producer.get(
                    move.value, min(self.graph.consumers[move.value], default=0)
                )
                share = _ALL_REDUCES.get(move.step.kind, 0.5 / len(program.group))
                reduced[self.segment[node]] += share * self.graph.values[move.value].num_bytes
        for node, row in enumerate(program.rows):
            reduced[self.segment[node]] += exchanged_bytes(self.graph, node, row)
        return reduced

    def _stream(self, program: Program) -> list[float]:
        """Return for each segment the kept bytes that every device has whole (3)."""
        stream = [0.0] * len(self.bounds)
        for value in self.kept:
            node = self.graph.producer[value]
            state = program.rows[node].outputs[self.graph.nodes[node].outputs.index(value)]
            stream[self.segment[node]] += (
                0.0 if state.is_sharded else self.graph.values[value].num_bytes
            )
        return stream


def _look(graph: Graph, nodes: Sequence[GraphNode]) -> object:
    """Return a key that is equal for operations that do the same to values of the same sort."""
    number: dict[int, int] = {}

    def name(value: int) -> int:
        return number.setdefault(value, len(number))

    calls = tuple(
        (
            node.op,
            tuple(renamed(argument, name) for argument in node.arguments),
            tuple((key, renamed(argument, name)) for key, argument in node.keywords),
            tuple(None if value is None else name(value) for value in node.outputs),
        )
        for node in nodes
    )
    values = (graph.values[value] for value in number)
    return calls, tuple((value.role, value.shape, value.dtype) for value in values)
