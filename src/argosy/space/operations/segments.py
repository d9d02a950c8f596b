"""Convert a captured training step into a chain of layers, so that one planner serves programs and
configs.

A *segment* is a run of forward operations, and the backward operations that belong to them
(``workload.part``). Runs are chosen by the bytes that would cross the network if a pipeline stage
ended there. With c_p the bytes that operations before place p make and operations after it read,
and w_p the work before p as a share of all work,

    (1)  segments end at places p with c_p <= c_q for all q with |w_p - w_q| <= 1 / (2 K),
         and c_p <= 1.25 c_q for all q with |w_p - w_q| <= 16 / K

so that there are at most about K of them, and equal blocks of a model become equal segments at any
position. A tensor that skips over segments is counted at every place that it crosses, because
stages forward it. Values that do not depend on the batch cross nowhere: every stage computes them
again.

A segment has, per sample:

    (2)  FLOP       matrix products, convolutions and attention, in the forward and in the backward;
                    the backward of attention counts as twice its forward, as in the layers that the
                    cost model was fitted with
    (3)  kept       storage that its forward makes and a backward reads; views of one tensor count
                    once
    (4)  output     c_p at its end
    (5)  launches   its forward operations that start a kernel and read a weight or an activation,
                    over those of a transformer's block; masks and angles are computed while the
                    device is still busy, and have no backward
    (6)  dropped    by selective recomputation: storage that it keeps and neither passes on nor
                    makes by products with weights; the FLOP of recomputing it are those of
                    attention
    (7)  frozen     parameters without a gradient, in their own format; a segment has a backward if
                    it or one before it trains something
    (8)  moved      memory traffic. The cost model measures it by what fused kernels would keep if
                    all weights were trained: what products and attention read and make in the
                    forward; a copy or an expanded tensor counts as what it repeats. A segment
                    without products moves what it keeps, and no segment moves more than it keeps,
                    unless weights are frozen
    (9)  experts    those of modules that are called as one operation, as many as divide the
                    experts of each

Weights belong to the first segment that reads them; other segments that read them are tied to it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.dtype import Dtype
from argosy.errors import bad_input
from argosy.space.operations.calls import call_of
from argosy.space.operations.flop import flop_of
from argosy.workload.chain import Chain, Frozen, Layer, captured_chain
from argosy.workload.graph import Graph, GraphNode, Phase, Role
from argosy.workload.part import forward_order, part_of_nodes
from argosy.workload.powersgd import summed_elements

FloatArray = NDArray[np.float64]

# A step is cut into at most about this many segments: K in (1). More would slow the search down.
MOST_SEGMENTS = 128
# Number of kernels in the forward of a transformer's block, for which the floors of
# ``cost.compute`` were measured.
BLOCK_LAUNCHES = 20.0
# Moving a byte counts as this many FLOP in the measure of work in (1); they take about equally
# long.
_BYTE_WORK = 100.0
# The first and the last segment have at least this share of all work.
_LEAST_WORK = 1e-4
KEPT_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.convolution.default")
"""Products with weights, whose results selective recomputation keeps."""
# Entries ``flop`` of the table whose operations count as matrix work (2).
_PRODUCTS = ("product", "convolution", "attention", "called")
# FLOP that the backward of attention counts over those of its five products: twice the forward's
# two.
_ATTENTION_BACKWARD = 0.8
_COPIES = frozenset({"aten.clone.default"})
"""Operations that repeat what they read, beside those that expand a dim."""
_VIEWS = frozenset({"view", "permute", "split", "whole"})
"""Families of operations that start no kernel; their results are views or single numbers."""


def chain_of_step(
    graph: Graph, samples: int, dtype: Dtype, *, optimizer: str = "adamw", powersgd: int = 0
) -> Chain:
    """Return the chain of a step that was captured on ``samples`` samples; ``powersgd`` is the rank
    with which gradients are compressed."""
    ahead = forward_order(graph)
    if not ahead:
        raise bad_input("a forward of at least one operation", graph.name, "program")
    step = _Step(graph, ahead)
    ends = step.ends()
    layers = tuple(step.layers(ends, samples, powersgd))
    return captured_chain(graph.name, layers, dtype, optimizer, powersgd)


@dataclass(frozen=True, kw_only=True)
class _SegmentWork:
    """The work that the nodes of each segment do."""

    flop: Mapping[Phase, Sequence[float]]
    launches: Sequence[int]
    attention: Sequence[float]
    """FLOP of attention in the forward."""
    again: Sequence[float]
    """FLOP of the forward that selective recomputation repeats."""


@dataclass(frozen=True, kw_only=True)
class _SegmentExperts:
    """The experts that a segment has and devices can share."""

    count: int
    parameters: int
    idle: int
    """Number of ``parameters`` that one token does not meet."""
    bytes: int
    """Bytes of the inputs of experts, once for every expert that a token is sent to."""


class _Step:
    """A captured step that caches properties of its operations."""

    def __init__(self, graph: Graph, ahead: Sequence[int]) -> None:
        self.graph, self.ahead = graph, ahead
        self.place = {node: at for at, node in enumerate(ahead)}
        """The position of each forward node in their order."""
        calls = [call_of(graph, node) for node in graph.nodes]
        self.is_view = [
            call.entry.get("family") in _VIEWS and not call.entry.get("flop") for call in calls
        ]
        self.is_copy = [
            node.op in _COPIES or call.entry.get("family") == "expand"
            for node, call in zip(graph.nodes, calls, strict=True)
        ]
        self.is_attention = [call.entry.get("flop") == "attention" for call in calls]
        self.flop = [
            flop_of(call) if call.entry.get("flop") in _PRODUCTS else 0.0 for call in calls
        ]
        for index, node in enumerate(graph.nodes):
            if self.is_attention[index] and node.phase is Phase.BACKWARD:
                self.flop[index] *= _ATTENTION_BACKWARD
        self.moved = [
            0.0 if view else _moved_bytes(graph, node)
            for node, view in zip(graph.nodes, self.is_view, strict=True)
        ]
        self.of_batch = _reached(graph, graph.with_role(Role.INPUT))
        self.learned = _reached(graph, graph.parameters)
        self.base = self._bases()

    def _bases(self) -> list[int]:
        """Return for each value the value whose storage it is a view of."""
        base = list(range(len(self.graph.values)))
        for node, is_view in zip(self.graph.nodes, self.is_view, strict=True):
            if is_view and node.inputs:
                for value in node.outputs:
                    if value is not None:
                        base[value] = base[node.inputs[0]]
        return base

    def crossing(self) -> FloatArray:
        """Return c_p for every place p after a forward operation; nothing is read after the
        last."""
        changes = np.zeros(len(self.ahead) + 1)
        for value, maker in self.graph.producer.items():
            if maker in self.place and value in self.of_batch:
                readers = [
                    self.place[reader]
                    for reader in self.graph.consumers[value]
                    if reader in self.place
                ]
                if readers and max(readers) > self.place[maker]:
                    changes[self.place[maker]] += self.graph.values[value].num_bytes
                    changes[max(readers)] -= self.graph.values[value].num_bytes
        return np.cumsum(changes)[:-1]

    def ends(self) -> list[int]:
        """Return, by (1), one past the last forward operation of every segment."""
        crossing = self.crossing()
        work = np.cumsum([self.flop[node] + _BYTE_WORK * self.moved[node] for node in self.ahead])
        work /= max(float(work[-1]), 1e-30)
        inner = (work >= _LEAST_WORK) & (work <= 1 - _LEAST_WORK)
        crossing[~inner] = np.inf
        near, far = (_around(work, width / MOST_SEGMENTS) for width in (0.5, 16.0))
        ends = []
        for place in np.nonzero(inner)[0].tolist():
            (low, high), (first, last) = near[place], far[place]
            here = crossing[place]
            is_first = crossing[low:place].min(initial=np.inf) > crossing[place]
            if (
                is_first
                and here <= crossing[low:high].min()
                and here <= 1.25 * crossing[first:last].min()
            ):
                ends.append(place + 1)
        return [*ends, len(self.ahead)]

    def layers(self, ends: Sequence[int], samples: int, powersgd: int = 0) -> Iterator[Layer]:
        """Yield the layer of each segment, with (2) to (7)."""
        graph, count = self.graph, len(ends)
        lengths = [end - first for first, end in itertools.pairwise((0, *ends))]
        of_forward = np.repeat(np.arange(count), lengths).tolist()
        of_node = part_of_nodes(graph, of_forward)
        work = self._work(of_node, count)
        kept, dropped = self._kept(of_node, count), self._dropped(of_node, count)
        crossing = self.crossing()
        homes = self._homes(of_node)
        trained = {value: parts for value, parts in homes.items() if value in graph.trained}
        own, tied = _weights(trained, count, lambda value: graph.values[value].elements)
        summed, _ = _weights(
            trained, count, lambda value: summed_elements(graph.values[value].shape, powersgd)
        )
        still = {value: parts for value, parts in homes.items() if value not in graph.trained}
        frozen, tied_frozen = self._frozen(still, of_node, count, samples)
        moved = self._moved(of_node, kept)
        bounds = list(itertools.pairwise((0, *ends)))
        names = _names(
            [[graph.nodes[node] for node in self.ahead[first:end]] for first, end in bounds]
        )
        sent = [self._experts(self.ahead[first:end]) for first, end in bounds]
        for part, (first, end) in enumerate(bounds):
            home, number = tied.get(part, (tied_frozen.get(part), 0))
            yield Layer(
                name=names[part],
                kind="segment",
                forward_flop=work.flop[Phase.FORWARD][part] / samples,
                backward_flop=work.flop[Phase.BACKWARD][part] / samples,
                parameters=own[part],
                summed_parameters=summed[part] if powersgd else None,
                activation_bytes=kept[part] / samples,
                moved_bytes=moved[part] / samples,
                attention_flop=work.attention[part] / samples,
                output_bytes=float(crossing[end - 1]) / samples if end < ends[-1] else 0.0,
                selective_bytes=dropped[part] / samples,
                selective_flop=work.again[part] / samples,
                launches=work.launches[part] / BLOCK_LAUNCHES,
                tied_to=home,
                tied_parameters=number,
                operations=(first, end),
                frozen=frozen[part],
                active_parameters=own[part] - sent[part].idle if sent[part].count else None,
                expert_parameters=sent[part].parameters,
                num_experts=sent[part].count,
                routed_bytes=sent[part].bytes / samples,
            )

    def _experts(self, nodes: Sequence[int]) -> _SegmentExperts:
        """Return the experts of a segment that devices can share (9). They have no part in a
        segment whose experts are frozen, or were read by an earlier one."""
        values, calls = self.graph.values, [self.graph.nodes[node] for node in nodes]
        count, parameters, idle, sent = 0, 0, 0, 0
        for node in calls:
            held = [value for value in node.inputs[3:] if value in self.graph.trained]
            if not node.num_experts or any(self._first_reader(v) not in nodes for v in held):
                continue
            tokens, numbers, _ = (values[value] for value in node.inputs[:3])
            elements = sum(values[value].elements for value in held)
            count = math.gcd(count, node.num_experts)
            parameters += elements
            idle += elements - elements * numbers.shape[1] // node.num_experts
            sent += tokens.num_bytes * numbers.shape[1]
        return _SegmentExperts(count=count, parameters=parameters, idle=idle, bytes=sent)

    def _first_reader(self, value: int) -> int:
        return min(self.graph.consumers[value], key=lambda node: self.place.get(node, node))

    def _work(self, of_node: Sequence[int], count: int) -> _SegmentWork:
        """Sum the FLOP and the launches of the nodes of each segment."""
        flop = {phase: [0.0] * count for phase in Phase}
        launches, attention, again = [0] * count, [0.0] * count, [0.0] * count
        for index, (node, part) in enumerate(zip(self.graph.nodes, of_node, strict=True)):
            flop[node.phase][part] += self.flop[index]
            if node.phase is Phase.FORWARD:
                is_learned = not self.learned.isdisjoint(node.inputs)
                launches[part] += not self.is_view[index] and is_learned
                attention[part] += self.flop[index] if self.is_attention[index] else 0.0
                again[part] += self.flop[index] if node.op not in KEPT_PRODUCTS else 0.0
        return _SegmentWork(flop=flop, launches=launches, attention=attention, again=again)

    def _frozen(
        self, homes: Mapping[int, tuple[int, ...]], of_node: Sequence[int], count: int, samples: int
    ) -> tuple[list[Frozen | None], dict[int, int]]:
        """Return the frozen parameters of each segment (7), and for segments that read frozen
        weights of another one the index of that segment."""
        graph = self.graph
        if not any(homes.values()):
            return [None] * count, {}
        numbers, _ = _weights(homes, count, lambda value: graph.values[value].elements)
        sizes, tied = _weights(homes, count, lambda value: graph.values[value].num_bytes)
        first = self._first_backward(of_node)
        all_frozen = [
            Frozen(
                parameters=numbers[part],
                bytes=float(sizes[part]),
                tied_bytes=float(tied[part][1]) if part in tied else 0.0,
                forward_bytes=0.0
                if part >= first
                else self._forward_bytes(of_node, part) / samples,
                has_backward=part >= first,
            )
            for part in range(count)
        ]
        return list(all_frozen), {part: home for part, (home, _) in tied.items()}

    def _forward_bytes(self, of_node: Sequence[int], part: int) -> float:
        """Return the most bytes of its input and results that a segment's operations hold at a
        time, if nothing is kept."""
        own = [node for node in self.ahead if of_node[node] == part]
        begin = self.place[own[0]]
        given = float(self.crossing()[begin - 1]) if begin else 0.0
        last_read = {
            self.base[value]: node for node in own for value in self.graph.nodes[node].inputs
        }
        live: dict[int, int] = {}
        most = 0
        for node in own:
            for value in self.graph.nodes[node].outputs:
                if value is not None and self.base[value] == value:
                    live[value] = self.graph.values[value].num_bytes
            most = max(most, sum(live.values()))
            for value in {self.base[read] for read in self.graph.nodes[node].inputs}:
                if last_read.get(value) == node:
                    live.pop(value, None)
        return given + most

    def _moved(self, of_node: Sequence[int], kept: Sequence[float]) -> list[float]:
        """Return the bytes moved by each segment (8)."""
        moved_bytes = [0.0] * len(kept)
        seen: set[int] = set()
        source = list(self.base)
        for index, node in enumerate(self.graph.nodes):
            if node.inputs and (self.is_copy[index] or self.is_view[index]):
                for value in node.outputs:
                    if value is not None:
                        source[value] = source[node.inputs[0]]
            if node.phase is Phase.FORWARD and self.flop[index]:
                made = (value for value in node.outputs if value is not None)
                for value in (
                    {source[operand] for operand in (*node.inputs, *made)} & self.of_batch
                ) - seen:
                    moved_bytes[of_node[index]] += self.graph.values[value].num_bytes
                    seen.add(value)
        is_trained = self.graph.trained.issuperset(self.graph.parameters)
        return [
            (min(by_products, held) if is_trained else by_products) if by_products else held
            for by_products, held in zip(moved_bytes, kept, strict=True)
        ]

    def _kept(self, of_node: Sequence[int], count: int) -> list[float]:
        """Return for each segment the bytes kept (3); the first segment with a backward keeps what
        segments without one make."""
        kept = [0.0] * count
        first = self._first_backward(of_node)
        for base, maker in self._kept_bases():
            kept[max(of_node[maker], first)] += self.graph.values[base].num_bytes
        return kept

    def _first_backward(self, of_node: Sequence[int]) -> int:
        """Return the first segment with a backward; in a program without frozen weights all have
        one."""
        graph = self.graph
        if graph.trained.issuperset(graph.parameters):
            return 0
        return min(
            (of_node[at] for at, node in enumerate(graph.nodes) if node.phase is Phase.BACKWARD),
            default=0,
        )

    def _dropped(self, of_node: Sequence[int], count: int) -> list[float]:
        """Return for each segment the bytes that selective recomputation drops (6)."""
        dropped = [0.0] * count
        read_by: dict[int, set[int]] = {}
        for value, readers in enumerate(self.graph.consumers):
            read_by.setdefault(self.base[value], set()).update(
                of_node[r] for r in readers if r in self.place
            )
        for base, maker in self._kept_bases():
            leaves = any(part > of_node[maker] for part in read_by.get(base, ()))
            if not leaves and self.graph.nodes[maker].op not in KEPT_PRODUCTS:
                dropped[of_node[maker]] += self.graph.values[base].num_bytes
        return dropped

    def _kept_bases(self) -> Iterator[tuple[int, int]]:
        """Yield storage that the forward makes and a backward reads, with the operation that makes
        it."""
        for base in sorted({self.base[value] for value in self.graph.kept}):
            maker = self.graph.producer.get(base)
            if maker is not None and self.graph.nodes[maker].phase is Phase.FORWARD:
                yield base, maker

    def _homes(self, of_node: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return for each parameter the segments that read it in the forward."""
        graph = self.graph
        return {
            value: tuple(
                sorted({of_node[node] for node in graph.consumers[value] if node in self.place})
            )
            for value in graph.parameters
        }


def _around(work: FloatArray, width: float) -> list[tuple[int, int]]:
    """Return for each place the places that are at most this share of the work away."""
    lows = np.searchsorted(work, work - width)
    highs = np.searchsorted(work, work + width, side="right")
    return list(zip(lows.tolist(), highs.tolist(), strict=True))


def _moved_bytes(graph: Graph, node: GraphNode) -> float:
    """Return the bytes that an operation reads and writes."""
    made = (value for value in node.outputs if value is not None)
    return float(sum(graph.values[value].num_bytes for value in (*node.inputs, *made)))


def _reached(graph: Graph, given: Iterable[int]) -> frozenset[int]:
    """Return the values that depend on given ones."""
    dependent = set(given)
    for node in graph.nodes:
        if not dependent.isdisjoint(node.inputs):
            dependent.update(value for value in node.outputs if value is not None)
    return frozenset(dependent)


def _weights(
    homes: Mapping[int, tuple[int, ...]], count: int, size: Callable[[int], int]
) -> tuple[list[int], dict[int, tuple[int, int]]]:
    """Return the size of each segment's own weights; and for segments that read weights of another
    one, that segment and the size of these weights."""
    own, shared = [0] * count, dict[tuple[int, int], int]()
    for value, parts in homes.items():
        if parts:
            own[parts[0]] += size(value)
            for part in parts[1:]:
                shared[part, parts[0]] = shared.get((part, parts[0]), 0) + size(value)
    tied: dict[int, tuple[int, int]] = {}
    for (part, home), number in sorted(shared.items()):
        if part not in tied or number > tied[part][1]:  # a layer can be tied to only one other
            tied[part] = (home, number)
    return own, tied


def _names(segments: Sequence[Sequence[GraphNode]]) -> list[str]:
    """Return the module that the operations of a segment have in common; parts of one module are
    numbered."""
    modules = [_module(nodes) for nodes in segments]
    totals, seen = Counter(modules), Counter[str]()
    names = []
    for name in modules:
        seen[name] += 1
        names.append(name if totals[name] == 1 else f"{name}:{seen[name]}")
    return names


def _module(nodes: Sequence[GraphNode]) -> str:
    paths = [node.module.split(".") for node in nodes if node.module]
    if not paths:
        return "step"
    common = [
        names[0]
        for names in itertools.takewhile(
            lambda names: len(set(names)) == 1, zip(*paths, strict=False)
        )
    ]
    return ".".join(common) or paths[len(paths) // 2][0]
