"""List, for every operation of a graph, the ways in which a group of devices can shard it.

A ``ShardingRule`` states in which states an operation takes its tensors and in which it leaves its
results, without communication inside. For an index that a pattern allows to split, cut as (outer,
units):

    (1)  tensors that have the index are sharded along it, the others replicated;
    (2)  results that lack it are partial sums over it (unless the pattern states that they do not
         contain it), and then everything that is added to them must be a partial sum too;
    (3)  a device does its share of the units: FLOP(ratio) = FLOP x ratio.

In addition, every operation has the row in which every device does everything, and one per set of
inputs in which it is linear, with partial sums as inputs and outputs. An operation that is not in
the table has only the first.

The cuts worth considering are found by propagating the cuts of parameters, of samples and of the
dims that reshapes open through the patterns, forwards and backwards, until nothing new appears.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from argosy.space.operations.calls import Label, is_known, same_ends, shared_calls
from argosy.space.operations.families import Pattern
from argosy.space.operations.matrices import is_matrix
from argosy.space.operations.sharding import (
    PARTIAL,
    REPLICATED,
    Shape,
    State,
    fits,
    flat_cut,
    from_flat_cut,
    sharded,
)
from argosy.workload.graph import MODULE, Graph, GraphNode, Role, references

Cut = tuple[int, int]
"""(outer, units) of a cut, as ``sharding`` defines them."""


class CutKind(StrEnum):
    """A kind of cuts that a search is restricted to."""

    ANY = "any"
    """Weights, samples and what reshapes open."""
    TENSOR = "tensor"
    """Matrices and tables of weights, and the cuts that follow from theirs, never samples: tensor
    parallelism. A weight that can be cut is stored cut."""
    SEQUENCE = "sequence"
    """Those of tensor parallelism, and positions of a sequence between products: sequence
    parallelism."""


@dataclass(frozen=True, kw_only=True)
class ShardingRule:
    """A way to do an operation, without communication unless ``local`` names an implementation that
    exchanges something itself."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    units: int = 0
    """A device does its share of this many units of work; 0: every device does all of it."""
    local: str = ""
    """The name of a special implementation, if the operation itself is not correct on a shard."""

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def only_whole(node: GraphNode) -> ShardingRule:
    """Return the row in which every device does everything."""
    return ShardingRule(
        inputs=(REPLICATED,) * len(node.inputs), outputs=(REPLICATED,) * len(node.outputs)
    )


class StateChoices:
    """A table of the states worth considering per value, and of the rows per node, that a graph has
    on a number of devices.

    Nodes that do the same to equal tensors are analysed once (``fold``), so that equal layers cost
    little.
    """

    def __init__(
        self,
        graph: Graph,
        num_devices: int,
        *,
        kind: CutKind = CutKind.ANY,
        whole: Iterable[int] = (),
        stored: Mapping[int, State] | None = None,
        fold: bool = True,
    ) -> None:
        """Compute the cuts of all values.

        ``whole`` lists values that must be stored or delivered whole; ``stored`` gives parameters
        whose state is fixed.
        """
        self.graph, self.num_devices, self.kind = graph, num_devices, kind
        self.whole, self.stored = (
            frozenset(whole),
            {**(stored or {}), **called_weights(graph, num_devices)},
        )
        self.gathered: frozenset[int] | None = None
        """The parameters that may be gathered; None: all."""
        self._barred = self.whole.intersection(graph.parameters)
        self.ends = [(*node.inputs, *node.outputs) for node in graph.nodes]
        """For each node its operands and results; None for a result without readers."""
        self.calls, self.patterns, self.labels = shared_calls(graph, self.ends, fold)
        self.same = [same_ends(ends) for ends in self.ends]
        """For each node which of its ends are one value; None if all differ."""
        self._reshapes = [call.entry.get("family") == "view" for call in self.calls]
        self.cut_sets: list[tuple[State, ...]] = [()] * len(graph.values)
        """For each value its cuts; equal sets are one tuple."""
        self._grown: dict[tuple[int, State], tuple[State, ...]] = {}
        self._interned: dict[tuple[State, ...], tuple[State, ...]] = (
            {(): self.cut_sets[0]} if graph.values else {}
        )
        self._around: list[dict[int, None]] = [dict.fromkeys(nodes) for nodes in graph.consumers]
        for value, node in graph.producer.items():
            self._around[value][node] = None
        self._todo: OrderedDict[int, None] = OrderedDict()
        self._flowed: dict[object, tuple[tuple[int, State], ...]] = {}
        self._rows: dict[object, tuple[ShardingRule, ...]] = {}
        self.tangled = False
        """Whether an exact search would take too long; ``solve.programs.spmd`` determines this."""
        self._seed()
        self._settle()

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the operations without a rule, which every device does in full."""
        return tuple(sorted({node.op for node in self.graph.nodes if not is_known(node.op)}))

    def consider(self, states: Iterable[tuple[int | None, State]]) -> None:
        """Add cuts to those that propagate from parameters and samples."""
        for value, state in states:
            self._offer(value, state)
        self._rows.clear()
        self._settle()

    def _settle(self) -> None:
        self._flow()
        self._work_units = frozenset(state.units for cuts in set(self.cut_sets) for state in cuts)

    def _offer(self, value: int | None, state: State) -> bool:
        """Add a cut to a value if it is new and possible; return whether it was added."""
        if (
            value is None
            or self.num_devices == 1
            or state in self.cut_sets[value]
            or state.units < self.num_devices
        ):
            return False
        if value in self._barred or not fits(self.graph.values[value].shape, state):
            return False
        self._grow(value, state)
        self._todo.update(self._around[value])
        return True

    def _grow(self, value: int, state: State) -> None:
        cuts = self.cut_sets[value]
        key = (id(cuts), state)
        if key not in self._grown:
            more = (*cuts, state)
            self._grown[key] = self._interned.setdefault(more, more)
        self.cut_sets[value] = self._grown[key]

    def _seed(self) -> None:
        for index, state in self.stored.items():
            if state.is_sharded:
                self._offer(index, state)
        for index, value in enumerate(self.graph.values):
            if self.kind is not CutKind.ANY and not is_matrix(self.graph, index):
                continue
            if value.role is Role.PARAMETER:
                dims = range(min(len(value.shape), 3 if len(value.shape) == 3 else 2))
            elif value.role is Role.INPUT and value.shape:
                dims = range(1 if value.is_floating else len(value.shape))
            else:
                continue
            for dim in dims:
                self._offer(index, sharded(dim, value.shape[dim]))
        for node, call, reshapes in zip(self.graph.nodes, self.calls, self._reshapes, strict=True):
            if reshapes:
                self._offer_opened(node, call.inputs[0], call.outputs[0])

    def _offer_opened(self, node: GraphNode, before: Shape, after: Shape) -> None:
        """Offer the first of the dims into which a reshape divides one, such as heads out of a
        width; of samples and positions none, or the positions."""
        common = next(
            (d for d, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None
        )
        if common is None or len(after) <= len(before) or node.outputs[0] is None:
            return
        is_result = self.graph.values[node.inputs[0]].role is Role.RESULT
        if self.kind is not CutKind.ANY and common == 0 and is_result:
            if self.kind is CutKind.TENSOR:
                return
            common = 1
        self._offer(node.outputs[0], sharded(common, after[common]))

    def _flow(self) -> None:
        while self._todo:
            index, _ = self._todo.popitem(last=False)
            ends, key = self.ends[index], self._surroundings(index)
            if key not in self._flowed:
                self._flowed[key] = tuple(self._flow_through(index))
                continue
            for end, state in self._flowed[key]:
                value = ends[end]
                assert value is not None
                self._grow(value, state)
                self._todo.update(self._around[value])

    def _surroundings(self, index: int) -> object:
        """Return a key that is equal for nodes that do the same to equal tensors with the same
        cuts."""
        cuts = self.cut_sets
        ends = self.ends[index]
        around = tuple([0 if value is None else id(cuts[value]) for value in ends])
        barred = tuple([value in self._barred for value in ends]) if self._barred else ()
        return id(self.calls[index]), self.same[index], around, barred

    def _flow_through(self, index: int) -> Iterator[tuple[int, State]]:
        """Propagate the cuts of a node's ends to its other ends; yield each end that got a cut, and
        the cut."""
        ends = self.ends[index]
        if self._reshapes[index]:
            offers = self._reshaped(index)
        else:
            offers = (
                offer for label in self.labels[index].values() for offer in self._along(label, ends)
            )
        for end, state in offers:
            if self._offer(ends[end], state):
                yield end, state

    def _reshaped(self, index: int) -> Iterator[tuple[int, State]]:
        node, call = self.graph.nodes[index], self.calls[index]
        (before, after), (left, right) = (
            (call.inputs[0], call.outputs[0]),
            (node.inputs[0], node.outputs[0]),
        )
        assert right is not None
        for source, target, here, there in ((left, 1, before, after), (right, 0, after, before)):
            for state in self.cut_sets[source]:
                mapped = from_flat_cut(there, *flat_cut(here, state))
                if mapped is not None:
                    yield target, mapped

    def _along(self, label: Label, ends: Sequence[int | None]) -> Iterator[tuple[int, State]]:
        for outer, units in self._label_cuts(label, ends):
            for end, dim, factor in label.places:
                yield end, sharded(dim, units, outer * factor)

    def _label_cuts(self, label: Label, ends: Sequence[int | None]) -> list[Cut]:
        """Return the cuts of an index that some tensor has and every tensor can have."""
        cuts: dict[Cut, None] = {}
        for end, dim, factor in label.places:
            value = ends[end]
            assert value is not None
            for state in self.cut_sets[value]:
                if state.dim == dim and state.outer % factor == 0:
                    cuts[state.outer // factor, state.units] = None
        return [(o, u) for o, u in cuts if all(size % (o * u) == 0 for size in label.sizes)]

    def rows(self, index: int) -> tuple[ShardingRule, ...]:
        """Return every way to do a node; equal nodes get the same tuple."""
        key = self._surroundings(index)
        if key not in self._rows:
            self._rows[key] = self._find_rows(index)
        return self._rows[key]

    def _find_rows(self, index: int) -> tuple[ShardingRule, ...]:
        node, call, pattern = self.graph.nodes[index], self.calls[index], self.patterns[index]
        num_in, num_out = len(call.inputs), len(call.outputs)
        candidates = [only_whole(node)]
        if self._reshapes[index]:
            candidates += self._reshape_rows(index)
        for name, label in self.labels[index].items():
            cuts = self._label_cuts(label, self.ends[index])
            if name in pattern.local:
                cuts = [(outer, units) for outer, units in cuts if outer == 1]
            rows = (label_row(pattern, name, cut) for cut in cuts)
            candidates += [row for row in rows if sums_are_numbers(self.graph, node, row)]
        for chosen in pattern.linear:
            summed = [
                *(node.inputs[place] for place in chosen),
                *(v for v in node.outputs if v is not None),
            ]
            if all(self.graph.values[value].is_floating for value in summed):
                inputs = tuple(
                    PARTIAL if place in chosen else REPLICATED for place in range(num_in)
                )
                candidates.append(ShardingRule(inputs=inputs, outputs=(PARTIAL,) * num_out))
        if node.op == MODULE:
            candidates = [row for row in candidates if self._has_weights(node, row)]
        return tuple(row for row in candidates if not row.units or row.units in self._work_units)

    def _has_weights(self, node: GraphNode, row: ShardingRule) -> bool:
        """Return whether a row leaves weights where they are stored, because a module reads
        them."""
        ends = zip(node.inputs, row.inputs, strict=True)
        return all(self.stored.get(value, state) == state for value, state in ends)

    def _reshape_rows(self, index: int) -> Iterator[ShardingRule]:
        node, call = self.graph.nodes[index], self.calls[index]
        for state in self.cut_sets[node.inputs[0]]:
            mapped = from_flat_cut(call.outputs[0], *flat_cut(call.inputs[0], state))
            if mapped is not None:
                yield ShardingRule(inputs=(state,), outputs=(mapped,), units=state.units)


def called_weights(graph: Graph, num_devices: int) -> dict[int, State]:
    """Return the states of the weights of modules that are called as one operation: members of a
    group divide whole experts, and hold other modules whole."""
    states = {}
    for node in graph.nodes:
        if node.op == MODULE:
            for value in references(node.arguments[1]):
                size = graph.values[value].shape[0] if node.num_experts else 0
                is_divided = graph.values[value].role is Role.PARAMETER and size >= num_devices
                states[value] = sharded(0, size) if is_divided else REPLICATED
    return states


def label_row(pattern: Pattern, label: str, cut: Cut) -> ShardingRule:
    """Return the rule that splits an operation along a label by (1) and (2)."""
    outer, units = cut

    def state(place: int, labels: tuple[str, ...]) -> State | None:
        factor = (pattern.stretched or {}).get((place, label), 1)
        return sharded(labels.index(label), units, outer * factor) if label in labels else None

    num_in = len(pattern.inputs)
    outputs = [state(num_in + place, labels) for place, labels in enumerate(pattern.outputs)]
    summed = [
        split is None and (label, place) not in pattern.whole for place, split in enumerate(outputs)
    ]
    inputs = [state(place, labels) for place, labels in enumerate(pattern.inputs)]
    added = PARTIAL if any(summed) else REPLICATED
    missing = [added if place in pattern.additive else REPLICATED for place in range(num_in)]
    return ShardingRule(
        inputs=tuple(split or default for split, default in zip(inputs, missing, strict=True)),
        outputs=tuple(
            split or (PARTIAL if partial else REPLICATED)
            for split, partial in zip(outputs, summed, strict=True)
        ),
        units=units,
        local=pattern.local.get(label, ""),
    )


def sums_are_numbers(graph: Graph, node: GraphNode, row: ShardingRule) -> bool:
    """Return whether only floating-point values are left as partial sums: a count or a mask never
    is."""
    pairs = [
        *zip(node.inputs, row.inputs, strict=True),
        *zip(node.outputs, row.outputs, strict=True),
    ]
    return all(s != PARTIAL or v is None or graph.values[v].is_floating for v, s in pairs)
