"""The rules of sharding: for every operation of a graph, the ways in which a group of devices can
do it.

A ``ShardingRule`` says in which states an operation takes its tensors and in which it leaves its
results, with no communication inside. For an index that a pattern allows to split, cut as (outer,
units):

    (1)  tensors that have the index are sharded along it, the others replicated;
    (2)  results that lack it are partial sums over it (unless the pattern says that they do not
         contain it), and then whatever is added to them must be a partial sum too;
    (3)  a device does its share of the units: FLOP(ratio) = FLOP x ratio.

Besides, every operation has the row in which every device does everything, and one per set of
inputs in which it is linear, partial sums in and partial sums out. An operation that the table does
not know has the first alone.

Which cuts are worth looking at is found by letting the cuts of parameters, of samples and of the
dims that reshapes open flow through the patterns, forwards and backwards, until nothing new
appears.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from argosy.space.operations.calls import Label, is_known, same_ends, shared_calls
from argosy.space.operations.families import Pattern
from argosy.space.operations.matrices import is_matrix
from argosy.space.operations.sharding import (
    PARTIAL,
    REPLICATED,
    Shape,
    State,
    by,
    fits,
    flat_cut,
    from_flat_cut,
    sharded,
)
from argosy.workload.graph import Graph, GraphNode, Role

Cut = tuple[int, int]
"""(outer, units)."""
BY_ROWS = "by rows"
"""The implementation that looks up only the rows of a table which a device holds."""


class CutKind(StrEnum):
    """Which cuts may be chosen."""

    ANY = "any"
    SAMPLES = "samples"
    """The first dim of inputs alone, wherever it can be cut: data parallelism."""
    STORED = "stored"
    """Data parallelism, and parameters stored in shards of their first dim: ZeRO."""
    TENSOR = "tensor"
    """Matrices and tables of weights, and what follows from their cuts, never samples: tensor
    parallelism. A weight that can be cut is stored cut."""


@dataclass(frozen=True, kw_only=True)
class ShardingRule:
    """One way to do an operation without communication."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    units: int = 0
    """A device does its share of so many units of work; 0: every device does all of it."""
    local: str = ""
    """An implementation of its own, where the operation itself does not do on a shard."""

    def by(self, segment: int) -> ShardingRule:
        """The same by the ratios of a segment."""
        inputs, outputs = (
            tuple(by(state, segment) for state in states) for states in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def only_whole(node: GraphNode) -> ShardingRule:
    """The row in which every device does everything."""
    return ShardingRule(
        inputs=(REPLICATED,) * len(node.inputs), outputs=(REPLICATED,) * len(node.outputs)
    )


class StateChoices:
    """The states worth considering per value, and the rows per node, of a graph on a number of
    devices.

    Nodes that do the same to equal tensors are looked at once (``fold``), so that equal layers cost
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
        """``whole``: values that are stored or delivered whole, whatever else could be; ``stored``:
        parameters whose place is given."""
        self.graph, self.num_devices, self.kind = graph, num_devices, kind
        self.whole, self.stored = frozenset(whole), dict(stored or {})
        self._barred = self.whole.intersection(graph.parameters)
        self.ends = [(*node.inputs, *node.outputs) for node in graph.nodes]
        """Per node its operands and results; None for one that nobody reads."""
        self.calls, self.patterns, self.labels = shared_calls(graph, self.ends, fold)
        self.same = [same_ends(ends) for ends in self.ends]
        """Per node which of its ends are one value; None where none are."""
        self._reshapes = [call.entry.get("family") == "view" for call in self.calls]
        self.cut_sets: list[tuple[State, ...]] = [()] * len(graph.values)
        """Per value its cuts; equal ones are one tuple."""
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
        """Whether an exact search is out of reach; a search finds out (``solve.programs.spmd``)."""
        self._seed()
        self._settle()
        if kind is CutKind.STORED:
            self._store_in_shards()

    @property
    def unknown(self) -> tuple[str, ...]:
        """Operations without a rule, which every device does in full."""
        return tuple(sorted({node.op for node in self.graph.nodes if not is_known(node.op)}))

    def consider(self, states: Iterable[tuple[int, State]]) -> None:
        """More cuts, beside those that flow from parameters and samples."""
        for value, state in states:
            self._offer(value, state)
        self._rows.clear()
        self._settle()

    def _settle(self) -> None:
        self._flow()
        self._work_units = frozenset(state.units for cuts in set(self.cut_sets) for state in cuts)

    def _offer(self, value: int | None, state: State) -> bool:
        """Whether a cut of a value is new and possible; then it is taken."""
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

    def _store_in_shards(self) -> None:
        """The first dim of every parameter and of its gradient, for storage only."""
        for parameter, gradient in self.graph.gradients:
            shape = self.graph.values[parameter].shape
            if shape and shape[0] >= self.num_devices:
                for value in (parameter, gradient):
                    if (state := sharded(0, shape[0])) not in self.cut_sets[value]:
                        self._grow(value, state)

    def _seed(self) -> None:
        if self.kind in (CutKind.SAMPLES, CutKind.STORED):
            for index in (*self.graph.with_role(Role.INPUT), *self.graph.with_role(Role.RECEIVED)):
                if self.graph.values[index].shape:
                    self._offer(index, sharded(0, self.graph.values[index].shape[0]))
            return
        for index, value in enumerate(self.graph.values):
            if self.kind is CutKind.TENSOR and not is_matrix(self.graph, index):
                continue
            if value.role is Role.PARAMETER:
                dims = range(min(len(value.shape), 3 if len(value.shape) == 3 else 2))
            elif value.role in (Role.INPUT, Role.RECEIVED) and value.shape:
                dims = range(1 if value.is_floating else len(value.shape))
            else:
                continue
            for dim in dims:
                self._offer(index, sharded(dim, value.shape[dim]))
        for node, call, reshapes in zip(self.graph.nodes, self.calls, self._reshapes, strict=True):
            if reshapes:
                self._offer_opened(node, call.inputs[0], call.outputs[0])

    def _offer_opened(self, node: GraphNode, before: Shape, after: Shape) -> None:
        """The first of the dims into which a reshape opens one: heads out of a width."""
        common = next(
            (d for d, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None
        )
        samples = (
            self.kind is CutKind.TENSOR
            and common == 0
            and self.graph.values[node.inputs[0]].role is Role.RESULT
        )
        if (
            common is not None
            and len(after) > len(before)
            and node.outputs[0] is not None
            and not samples
        ):
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
        """Equal for nodes that do the same to equal tensors with the same cuts."""
        cuts = self.cut_sets
        ends = self.ends[index]
        around = tuple([0 if value is None else id(cuts[value]) for value in ends])
        barred = tuple([value in self._barred for value in ends]) if self._barred else ()
        return id(self.calls[index]), self.same[index], around, barred

    def _flow_through(self, index: int) -> Iterator[tuple[int, State]]:
        """Let the cuts of a node's ends reach its other ends; which ends got which."""
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
                found = from_flat_cut(there, *flat_cut(here, state))
                if found is not None:
                    yield target, found

    def _along(self, label: Label, ends: Sequence[int | None]) -> Iterator[tuple[int, State]]:
        for outer, units in self._label_cuts(label, ends):
            for end, dim, factor in label.places:
                yield end, sharded(dim, units, outer * factor)

    def _label_cuts(self, label: Label, ends: Sequence[int | None]) -> list[Cut]:
        """Cuts of an index that any tensor has and every tensor can have."""
        found: dict[Cut, None] = {}
        for end, dim, factor in label.places:
            value = ends[end]
            assert value is not None
            for state in self.cut_sets[value]:
                if state.dim == dim and state.outer % factor == 0:
                    found[state.outer // factor, state.units] = None
        return [(o, u) for o, u in found if all(size % (o * u) == 0 for size in label.sizes)]

    def rows(self, index: int) -> tuple[ShardingRule, ...]:
        """Every way to do a node; equal nodes get the same tuple."""
        key = self._surroundings(index)
        if key not in self._rows:
            self._rows[key] = self._find_rows(index)
        return self._rows[key]

    def _find_rows(self, index: int) -> tuple[ShardingRule, ...]:
        node, call, pattern = self.graph.nodes[index], self.calls[index], self.patterns[index]
        num_in, num_out = len(call.inputs), len(call.outputs)
        found = [only_whole(node)]
        if self._reshapes[index]:
            found += self._reshape_rows(index)
        for name, label in self.labels[index].items():
            rows = (
                label_row(pattern, name, cut) for cut in self._label_cuts(label, self.ends[index])
            )
            found += [row for row in rows if sums_are_numbers(self.graph, node, row)]
        for chosen in pattern.linear:
            summed = [
                *(node.inputs[place] for place in chosen),
                *(v for v in node.outputs if v is not None),
            ]
            if all(self.graph.values[value].is_floating for value in summed):
                inputs = tuple(
                    PARTIAL if place in chosen else REPLICATED for place in range(num_in)
                )
                found.append(ShardingRule(inputs=inputs, outputs=(PARTIAL,) * num_out))
        allowed = [row for row in found if not row.units or row.units in self._work_units]
        split = [row for row in allowed if row.units or PARTIAL in row.inputs]
        forced = self.kind in (CutKind.SAMPLES, CutKind.STORED) and any(
            row.units for row in allowed
        )
        return tuple(split if forced else allowed)

    def _reshape_rows(self, index: int) -> Iterator[ShardingRule]:
        node, call = self.graph.nodes[index], self.calls[index]
        for state in self.cut_sets[node.inputs[0]]:
            found = from_flat_cut(call.outputs[0], *flat_cut(call.inputs[0], state))
            if found is not None:
                yield ShardingRule(inputs=(state,), outputs=(found,), units=state.units)


def label_row(pattern: Pattern, label: str, cut: Cut) -> ShardingRule:
    """(1) and (2)."""
    outer, units = cut

    def state(place: int, labels: tuple[str, ...]) -> State | None:
        factor = (pattern.stretched or {}).get((place, label), 1)
        return sharded(labels.index(label), units, outer * factor) if label in labels else None

    num_in = len(pattern.inputs)
    outputs = [state(num_in + place, labels) for place, labels in enumerate(pattern.outputs)]
    by_rows = label == pattern.by_rows
    summed = [
        found is None and (label, place) not in pattern.whole for place, found in enumerate(outputs)
    ]
    inputs = [state(place, labels) for place, labels in enumerate(pattern.inputs)]
    added = PARTIAL if any(summed) else REPLICATED
    missing = [added if place in pattern.additive else REPLICATED for place in range(num_in)]
    return ShardingRule(
        inputs=tuple(found or other for found, other in zip(inputs, missing, strict=True)),
        outputs=tuple(
            found or (PARTIAL if partial else REPLICATED)
            for found, partial in zip(outputs, summed, strict=True)
        ),
        units=units,
        local=BY_ROWS if by_rows else "",
    )


def sums_are_numbers(graph: Graph, node: GraphNode, row: ShardingRule) -> bool:
    """A count or a mask is never left as a partial sum."""
    pairs = [
        *zip(node.inputs, row.inputs, strict=True),
        *zip(node.outputs, row.outputs, strict=True),
    ]
    return all(s != PARTIAL or v is None or graph.values[v].is_floating for v, s in pairs)
