"""The rules of sharding: for every operation of a graph, the ways in which a group of devices can do it.

A ``Row`` says in which states an operation takes its tensors and in which it leaves its results, with no
communication inside. For an index that a pattern allows to split, cut as (outer, units):

    (1)  tensors that have the index are sharded along it, the others replicated;
    (2)  results that lack it are partial sums over it (unless the pattern says that they do not contain it), and then
         whatever is added to them must be a partial sum too;
    (3)  a device does its share of the units: FLOP(ratio) = FLOP x ratio.

Besides, every operation has the row in which every device does everything, and one per set of inputs in which it is
linear, partial sums in and partial sums out. An operation that the table does not know has the first alone.

Which cuts are worth looking at is found by letting the cuts of parameters, of samples and of the dims that reshapes
open flow through the patterns, forwards and backwards, until nothing new appears.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

from argosy.space.families import FAMILIES, Call, Pattern, whole
from argosy.space.matrices import is_matrix
from argosy.space.sharding import (
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
from argosy.workload.graph import Argument, Graph, Node, Ref, Role

Cut = tuple[int, int]
"""(outer, units)."""
BY_ROWS = "by rows"
"""The implementation that looks up only the rows of a table which a device holds."""


class Kind(StrEnum):
    """Which cuts may be chosen."""

    ANY = "any"
    SAMPLES = "samples"
    """The first dim of inputs alone, wherever it can be cut: data parallelism."""
    STORED = "stored"
    """Data parallelism, and parameters stored in shards of their first dim: ZeRO."""
    TENSOR = "tensor"
    """Matrices and tables of weights, and what follows from their cuts, never samples: tensor parallelism. A weight
    that can be cut is stored cut."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to do an operation without communication."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    units: int = 0
    """A device does its share of so many units of work; 0: every device does all of it."""
    local: str = ""
    """An implementation of its own, where the operation itself does not do on a shard."""

    def by(self, segment: int) -> Row:
        """The same by the ratios of a segment."""
        inputs, outputs = (tuple(by(state, segment) for state in states) for states in (self.inputs, self.outputs))
        return replace(self, inputs=inputs, outputs=outputs)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


@cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """The data file: an entry per operation."""
    text = files("argosy.data").joinpath("sharding.toml").read_text(encoding="utf-8")
    return {op: entry for section in tomllib.loads(text).values() for op, entry in section.items()}


def is_known(op: str) -> bool:
    return op in table()


def call_of(graph: Graph, node: Node) -> Call:
    """A node with shapes; an output that nobody reads has the shape of the first one that somebody does."""
    shown = [None if value is None else graph.values[value].shape for value in node.outputs]
    some = next(shape for shape in shown if shape is not None)
    return Call(
        node=node,
        inputs=tuple(graph.values[value].shape for value in node.inputs),
        outputs=tuple(some if shape is None else shape for shape in shown),
        entry=table().get(node.op, {}),
    )


def pattern_of(call: Call) -> Pattern:
    """The labels of an operation; for a reshape those of nothing, because it is mapped by ``from_flat_cut``."""
    entry = call.entry
    if not entry or entry.get("family") == "view":
        found = whole(call)
    elif "labels" in entry:
        found = _parsed(entry["labels"])
    else:
        found = FAMILIES[entry["family"]](call)
    count = len(call.inputs)
    linear = entry.get("linear", ())
    sets = [range(count)] if linear == "all" else [s for s in linear if max(s) < count]
    inexact = any(e.startswith("c:") for e in entry.get("whole", ()))
    return Pattern(
        inputs=found.inputs,
        outputs=found.outputs,
        linear=tuple(frozenset(s) for s in sets),
        additive=frozenset(entry.get("additive", ())),
        whole=frozenset((e.split(":")[0], int(e.split(":")[1])) for e in entry["whole"]) if inexact else frozenset(),
        stretched=found.stretched,
        by_rows=found.by_rows,
    )


@cache
def _parsed(text: str) -> Pattern:
    left, right = text.split("->")

    def side(part: str) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple("" if letter == "." else letter for letter in word) for word in part.split(","))

    return Pattern(inputs=side(left), outputs=side(right))


@dataclass(frozen=True, kw_only=True)
class Label:
    """An index of a node."""

    places: tuple[tuple[int, int, int], ...]
    """(value, dim, factor): the tensors that have it; results that nobody reads apart."""
    sizes: tuple[int, ...]


class Choices:
    """The states worth considering per value, and the rows per node, of a graph on a number of devices."""

    def __init__(
        self,
        graph: Graph,
        num_devices: int,
        *,
        kind: Kind = Kind.ANY,
        whole: Iterable[int] = (),
        stored: Mapping[int, State] | None = None,
    ) -> None:
        """``whole``: values that are stored or delivered whole, whatever else could be; ``stored``: parameters whose
        place is given."""
        self.graph, self.num_devices, self.kind = graph, num_devices, kind
        self.whole, self.stored = frozenset(whole), dict(stored or {})
        self.calls, self.patterns = _shared_calls(graph)
        self.labels = [
            _occurrences(node, call, pattern)
            for node, call, pattern in zip(graph.nodes, self.calls, self.patterns, strict=True)
        ]
        self._reshapes = [call.entry.get("family") == "view" for call in self.calls]
        self.cuts: list[dict[State, None]] = [{} for _ in graph.values]
        self._around: list[list[int]] = [list(nodes) for nodes in graph.consumers]
        for value, node in graph.producer.items():
            self._around[value].append(node)
        self._todo: dict[int, None] = {}
        self._rows: dict[object, tuple[Row, ...]] = {}
        self.tangled = 0
        """How many values a search must leave alone; it finds out (``solve.spmd``)."""
        self._seed()
        self._settle()
        if kind is Kind.STORED:
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
        self._work_units = frozenset(state.units for cuts in self.cuts for state in cuts)
        self._intern_cuts()

    def _intern_cuts(self) -> None:
        known: dict[tuple[State, ...], tuple[State, ...]] = {}
        found = (tuple(cuts) for cuts in self.cuts)
        self.cut_sets = [known.setdefault(cuts, cuts) for cuts in found]
        """Per value its cuts; equal ones are one tuple."""

    def _offer(self, value: int | None, state: State) -> None:
        if value is None or self.num_devices == 1 or state in self.cuts[value] or state.units < self.num_devices:
            return
        if value in self.whole and self.graph.values[value].role is Role.PARAMETER:
            return
        if fits(self.graph.values[value].shape, state):
            self.cuts[value][state] = None
            self._todo.update(dict.fromkeys(self._around[value]))

    def _store_in_shards(self) -> None:
        """The first dim of every parameter and of its gradient, for storage only."""
        for parameter, gradient in self.graph.gradients:
            shape = self.graph.values[parameter].shape
            if shape and shape[0] >= self.num_devices:
                for value in (parameter, gradient):
                    self.cuts[value][sharded(0, shape[0])] = None
        self._intern_cuts()

    def _seed(self) -> None:
        if self.kind in (Kind.SAMPLES, Kind.STORED):
            for index in (*self.graph.with_role(Role.INPUT), *self.graph.with_role(Role.RECEIVED)):
                if self.graph.values[index].shape:
                    self._offer(index, sharded(0, self.graph.values[index].shape[0]))
            return
        for index, value in enumerate(self.graph.values):
            if self.kind is Kind.TENSOR and not is_matrix(self.graph, index):
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

    def _offer_opened(self, node: Node, before: Shape, after: Shape) -> None:
        """The first of the dims into which a reshape opens one: heads out of a width."""
        common = next((d for d, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
        samples = self.kind is Kind.TENSOR and common == 0 and self.graph.values[node.inputs[0]].role is Role.RESULT
        if common is not None and len(after) > len(before) and node.outputs[0] is not None and not samples:
            self._offer(node.outputs[0], sharded(common, after[common]))

    def _flow(self) -> None:
        while self._todo:
            index = next(iter(self._todo))
            del self._todo[index]
            if self._reshapes[index]:
                self._flow_reshape(index)
            else:
                for label in self.labels[index].values():
                    self._flow_label(label)

    def _flow_reshape(self, index: int) -> None:
        node, call = self.graph.nodes[index], self.calls[index]
        (before, after), (left, right) = (call.inputs[0], call.outputs[0]), (node.inputs[0], node.outputs[0])
        assert right is not None
        for source, target, here, there in ((left, right, before, after), (right, left, after, before)):
            for state in list(self.cuts[source]):
                found = from_flat_cut(there, *flat_cut(here, state))
                if found is not None:
                    self._offer(target, found)

    def _flow_label(self, label: Label) -> None:
        for outer, units in self._label_cuts(label):
            for value, dim, factor in label.places:
                self._offer(value, sharded(dim, units, outer * factor))

    def _label_cuts(self, label: Label) -> list[Cut]:
        """Cuts of an index that any tensor has and every tensor can have."""
        found: dict[Cut, None] = {}
        for value, dim, factor in label.places:
            for state in self.cuts[value]:
                if state.dim == dim and state.outer % factor == 0:
                    found[state.outer // factor, state.units] = None
        return [(o, u) for o, u in found if all(size % (o * u) == 0 for size in label.sizes)]

    @staticmethod
    def only_whole(graph: Graph, node: Node) -> Row:
        """The row in which every device does everything."""
        return Row(inputs=(REPLICATED,) * len(node.inputs), outputs=(REPLICATED,) * len(node.outputs))

    def rows(self, index: int) -> tuple[Row, ...]:
        """Every way to do a node; equal nodes get the same tuple."""
        node, call = self.graph.nodes[index], self.calls[index]
        ends = (*node.inputs, *node.outputs)
        key = (id(call), *(0 if value is None else id(self.cut_sets[value]) for value in ends))
        if key not in self._rows:
            self._rows[key] = self._find_rows(index)
        return self._rows[key]

    def _find_rows(self, index: int) -> tuple[Row, ...]:
        node, call, pattern = self.graph.nodes[index], self.calls[index], self.patterns[index]
        num_in, num_out = len(call.inputs), len(call.outputs)
        found = [self.only_whole(self.graph, node)]
        if self._reshapes[index]:
            found += self._reshape_rows(index)
        for name, label in self.labels[index].items():
            rows = (self._label_row(index, name, cut) for cut in self._label_cuts(label))
            found += [row for row in rows if self._sums_are_numbers(node, row)]
        for chosen in pattern.linear:
            summed = [*(node.inputs[place] for place in chosen), *(v for v in node.outputs if v is not None)]
            if all(self.graph.values[value].is_floating for value in summed):
                inputs = tuple(PARTIAL if place in chosen else REPLICATED for place in range(num_in))
                found.append(Row(inputs=inputs, outputs=(PARTIAL,) * num_out))
        allowed = [row for row in found if not row.units or row.units in self._work_units]
        split = [row for row in allowed if row.units or PARTIAL in row.inputs]
        forced = self.kind in (Kind.SAMPLES, Kind.STORED) and any(row.units for row in allowed)
        return tuple(split if forced else allowed)

    def _sums_are_numbers(self, node: Node, row: Row) -> bool:
        """A count or a mask is never left as a partial sum."""
        pairs = [*zip(node.inputs, row.inputs, strict=True), *zip(node.outputs, row.outputs, strict=True)]
        return all(s != PARTIAL or v is None or self.graph.values[v].is_floating for v, s in pairs)

    def _reshape_rows(self, index: int) -> Iterator[Row]:
        node, call = self.graph.nodes[index], self.calls[index]
        for state in self.cuts[node.inputs[0]]:
            found = from_flat_cut(call.outputs[0], *flat_cut(call.inputs[0], state))
            if found is not None:
                yield Row(inputs=(state,), outputs=(found,), units=state.units)

    def _label_row(self, index: int, label: str, cut: Cut) -> Row:
        """(1) and (2)."""
        pattern = self.patterns[index]
        outer, units = cut

        def state(place: int, labels: tuple[str, ...]) -> State | None:
            factor = (pattern.stretched or {}).get((place, label), 1)
            return sharded(labels.index(label), units, outer * factor) if label in labels else None

        num_in = len(pattern.inputs)
        outputs = [state(num_in + place, labels) for place, labels in enumerate(pattern.outputs)]
        by_rows = label == pattern.by_rows
        summed = [found is None and (label, place) not in pattern.whole for place, found in enumerate(outputs)]
        inputs = [state(place, labels) for place, labels in enumerate(pattern.inputs)]
        added = PARTIAL if any(summed) else REPLICATED
        missing = [added if place in pattern.additive else REPLICATED for place in range(num_in)]
        return Row(
            inputs=tuple(found or other for found, other in zip(inputs, missing, strict=True)),
            outputs=tuple(
                found or (PARTIAL if partial else REPLICATED) for found, partial in zip(outputs, summed, strict=True)
            ),
            units=units,
            local=BY_ROWS if by_rows else "",
        )


def _shared_calls(graph: Graph) -> tuple[list[Call], list[Pattern]]:
    """Per node its call and pattern; nodes that do the same to tensors of the same shapes and dtypes share them."""
    known: dict[object, tuple[Call, Pattern]] = {}
    values = graph.values
    found = []
    for node in graph.nodes:
        ends = (*node.inputs, *node.outputs)
        looks = tuple([None if value is None else (values[value].shape, values[value].dtype) for value in ends])
        key = (node.op, tuple([_without_values(part) for part in node.arguments]), looks)
        if key not in known:
            call = call_of(graph, node)
            known[key] = (call, pattern_of(call))
        found.append(known[key])
    return [call for call, _ in found], [pattern for _, pattern in found]


def _without_values(argument: Argument) -> object:
    """An argument but for which values it names."""
    if isinstance(argument, Ref):
        return Ref
    return tuple([_without_values(part) for part in argument]) if isinstance(argument, tuple) else argument


def _occurrences(node: Node, call: Call, pattern: Pattern) -> dict[str, Label]:
    """Per label, where it stands."""
    places: dict[str, list[tuple[int, int, int]]] = {}
    sizes: dict[str, set[int]] = {}
    stretched = pattern.stretched or {}
    ends = zip(
        (*node.inputs, *node.outputs),
        (*call.inputs, *call.outputs),
        (*pattern.inputs, *pattern.outputs),
        strict=True,
    )
    for place, (value, shape, labels) in enumerate(ends):
        for dim, label in enumerate(labels):
            if label and value is not None:
                factor = stretched.get((place, label), 1)
                places.setdefault(label, []).append((value, dim, factor))
                sizes.setdefault(label, set()).add(shape[dim] // factor)
    return {label: Label(places=tuple(found), sizes=tuple(sizes[label])) for label, found in places.items()}
