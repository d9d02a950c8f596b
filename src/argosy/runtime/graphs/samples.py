"""Find how the values of a captured forward depend on samples, that is, which operations may run on
parts of the batch.

A loss over n samples is computed on parts of k of them, and the parts are summed with weights k /
n. That gives the loss and the gradients of one process if every value is one of

    (1)  free       depends on no sample
    (2)  samples    has a dim of size outer * n * inner, whose i-th row depends on the i-th sample
                    alone
    (3)  whole      is made of the batch without weights: it is computed from all n samples, and a
                    part takes its rows
    (4)  total      is an affine function of sums over samples. A sum over a part is multiplied by
                    n / k, so that weighted parts add up to the sum; so do affine functions of it,
                    with all constants those for n samples

and the loss is free, whole or a total. Any other operation mixes samples; it may run only if the
samples are not divided. The rules of sharding (``space.operations.calls``) state which dims an
operation keeps apart. An operation without a rule is tested on random numbers, on the whole and in
two parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from argosy.runtime.graphs.calls import RANDOM, RESHAPES, filled, function
from argosy.runtime.graphs.rows import INDEX, by_own_row, row_numbers
from argosy.space.operations.calls import call_of, is_known, pattern_of
from argosy.space.operations.families import Pattern, pointwise
from argosy.space.operations.sharding import flat_cut, from_flat_cut, sharded
from argosy.workload.capture.forward import COUNTS, Forward
from argosy.workload.graph import OWN_GRADIENT, Graph, GraphNode, Role

_AFFINE = {
    f"aten.{name}.{kind}" for name in ("add", "sub", "rsub") for kind in ("Tensor", "Scalar")
}
"""Operations that are affine in each of their operands."""
_SAME = {"aten.detach.default", "aten.clone.default"}
"""Operations that return their operand."""
_FILLED = {"aten.full.default", "aten.expand.default", "aten.repeat.default"}
"""Operations whose results are equal for all samples if their operands are."""
# The most elements of an operation that is tested, which bounds the time of a test.
_MOST_TRIED = 2**22


class SampleDependence(StrEnum):
    """A value's dependence on samples, which is one of (1) to (4) or mixed."""

    FREE = "free"
    SAMPLES = "samples"
    WHOLE = "whole"
    TOTAL = "total"
    MIXED = "mixed"


@dataclass(frozen=True)
class SampleDim:
    """The dim that holds the samples, with the factors outside and inside of them."""

    dim: int
    outer: int
    inner: int

    @property
    def is_alone(self) -> bool:
        """Return whether nothing but the samples is in the dim."""
        return self.outer == self.inner == 1

    def to_front(self, tensor: Tensor) -> Tensor:
        """Return the tensor with the samples as its first dim."""
        if self == FRONT:
            return tensor
        opened: Tensor = tensor.unflatten(self.dim, (self.outer, -1, self.inner))
        return opened.movedim(self.dim + 1, 0)

    def back(self, tensor: Tensor) -> Tensor:
        """Undo ``to_front``."""
        if self == FRONT:
            return tensor
        return tensor.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)

    def rows(self, tensor: Tensor, first: int, count: int) -> Tensor:
        """Return the part that belongs to ``count`` samples from ``first`` on."""
        return self.back(self.to_front(tensor)[first : first + count])


FRONT = SampleDim(0, 1, 1)
"""The samples are the first dim and nothing else is in it."""


@dataclass
class SampleDivision:
    """A record of how values depend on samples, and of what operations do to samples."""

    kinds: dict[int, SampleDependence] = field(default_factory=dict)
    places: dict[int, SampleDim] = field(default_factory=dict)
    """The dim of the samples, for values whose samples are in a known order."""
    of_batch: set[int] = field(default_factory=set)
    """Values that depend on the batch."""
    mixing: dict[int, str] = field(default_factory=dict)
    """For each operation that mixes samples, a phrase that describes how."""
    totals: set[int] = field(default_factory=set)
    """Operations that sum over samples, whose results are multiplied by n / k."""
    whole: set[int] = field(default_factory=set)
    """Operations that run on the whole batch."""


def divide(forward: Forward) -> SampleDivision:
    """Return the kind of every value and operation by (1) to (4)."""
    return _Divider(forward).found()


class _Divider:
    """A pass over a forward at its largest number of samples, which is a prime, so that other sizes
    are seldom multiples of it."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.graph: Graph = forward.others[-1]
        self.count = COUNTS[-1]
        self.result = SampleDivision()
        self.bare: set[int] = set()
        """Values that depend on no weight and no buffer."""
        self.row_numbers = row_numbers(self.graph, self.count)

    def found(self) -> SampleDivision:
        result = self.result
        for value, described in enumerate(self.graph.values):
            if described.role is not Role.RESULT:
                result.kinds[value] = (
                    SampleDependence.SAMPLES
                    if described.role is Role.INPUT
                    else SampleDependence.FREE
                )
            if described.role is Role.INPUT:
                result.places[value] = FRONT
                result.of_batch.add(value)
            if described.role in (Role.INPUT, Role.CONSTANT):
                self.bare.add(value)
        for index, node in enumerate(self.graph.nodes):
            self._add(index, node)
        return result

    def _add(self, index: int, node: GraphNode) -> None:
        result = self.result
        made = [value for value in node.outputs if value is not None]
        bare = self.bare.issuperset(node.inputs)
        if bare:
            self.bare.update(made)
        if not result.of_batch.isdisjoint(node.inputs):
            result.of_batch.update(made)
        mixes = self._own_gradient(node) if node.op == OWN_GRADIENT else self._kinds(node)
        if mixes is None and any(result.kinds[value] is SampleDependence.TOTAL for value in made):
            sums = all(result.kinds[value] is not SampleDependence.TOTAL for value in node.inputs)
            if sums and bare:
                mixes = "sums over the samples"
            elif sums:
                result.totals.add(index)
        if mixes is not None:
            self._mixed(index, node, mixes, bare)

    def _mixed(self, index: int, node: GraphNode, how: str, bare: bool) -> None:
        """Record where the samples are after an operation that mixes them, by sizes alone; (3)
        applies if it needs no weights."""
        result = self.result
        for value in node.outputs:
            if value is None:
                continue
            place = _grown(self.forward, value)
            if place is not None:
                result.places[value], result.kinds[value] = place, SampleDependence.SAMPLES
                continue
            result.places.pop(value, None)
            constant = bare and not any(self.forward.slopes(value))
            result.kinds[value] = SampleDependence.WHOLE if constant else SampleDependence.MIXED
        if bare:
            result.whole.add(index)
        else:
            result.mixing[index] = how

    def _kinds(self, node: GraphNode) -> str | None:
        """Set the kinds of an operation's results; return how it mixes samples, or None if it does
        not."""
        kinds = [self.result.kinds[value] for value in node.inputs]
        if SampleDependence.MIXED in kinds:
            return "reads a value that depends on all samples"
        if SampleDependence.TOTAL in kinds:
            return self._of_totals(node, kinds)
        if SampleDependence.SAMPLES in kinds:
            return self._of_samples(node)
        made = [value for value in node.outputs if value is not None]
        grown = [value for value in made if any(self.forward.slopes(value))]
        self.result.kinds.update(
            dict.fromkeys(
                made,
                SampleDependence.WHOLE
                if SampleDependence.WHOLE in kinds
                else SampleDependence.FREE,
            )
        )
        if not grown:
            return None
        is_counted = self.row_numbers.issuperset(made)
        if node.op not in _FILLED and node.op not in RANDOM and not is_counted:
            return "depends on how many samples there are or on their order"
        for value in grown:
            self.result.kinds[value] = SampleDependence.SAMPLES
            copies = None if node.op in RANDOM else _grown(self.forward, value, most=None)
            place = _grown(self.forward, value) or self._of_readers(value) or copies
            if place is None:
                return "has samples in no known order"
            self.result.places[value] = place
        return None

    def _of_readers(self, value: int) -> SampleDim | None:
        """Return the dim of the samples of a value made from a shape alone: the dim of the values
        that it is combined with."""
        shape, todo, seen = self.graph.values[value].shape, [value], {value}
        while todo:
            for reader in self.graph.consumers[todo.pop(0)]:
                node = self.graph.nodes[reader]
                for operand in node.inputs:
                    if operand in self.result.places and self.graph.values[operand].shape == shape:
                        return self.result.places[operand]
                made = [
                    output for output in node.outputs if output is not None and output not in seen
                ]
                same = [output for output in made if self.graph.values[output].shape == shape]
                seen.update(same)
                todo += same
        return None

    def _of_totals(self, node: GraphNode, kinds: Sequence[SampleDependence]) -> str | None:
        """Apply (4) to an operation that reads totals."""
        totals = {at for at, kind in enumerate(kinds) if kind is SampleDependence.TOTAL}
        sets = self._pattern(node).linear if is_known(node.op) else ()
        affine = node.op in _AFFINE or node.op in _SAME or any(totals <= chosen for chosen in sets)
        made = [value for value in node.outputs if value is not None]
        numbers = all(self.graph.values[value].has_gradients for value in made)
        if SampleDependence.SAMPLES in kinds or not affine or not numbers:
            return "uses a mean or a sum over the samples in other ways than sums and multiples"
        self.result.kinds.update(dict.fromkeys(made, SampleDependence.TOTAL))
        return None

    def _pattern(self, node: GraphNode) -> Pattern:
        call = call_of(self.graph, node)
        if not is_known(node.op) and torch.Tag.pointwise in getattr(function(node.op), "tags", ()):
            return pointwise(call) if len(call.outputs) == 1 else pattern_of(call)
        pattern = pattern_of(call)
        if node.op == INDEX:
            return by_own_row(node, pattern, self.row_numbers, self.result.places)
        return pattern

    def _of_samples(self, node: GraphNode) -> str | None:
        """Apply (2), and (4) for sums, to an operation that reads samples."""
        if node.op in _SAME:
            self._same(node, node.inputs[0])
            return None
        if node.op in RESHAPES:
            return self._reshaped(node)
        plain = torch.Tag.pointwise in getattr(function(node.op), "tags", ())
        if not is_known(node.op) and not plain:
            return self._tried(node)
        pattern = self._pattern(node)
        index = self._index(node, pattern)
        if index is None:
            return "combines samples"
        label, outer = index
        sums = [at for at, labels in enumerate(pattern.outputs) if label not in labels]
        used = [at for at, value in enumerate(node.outputs) if value is not None]
        if set(sums).intersection(used) and not self._adds(node, pattern, label, sums):
            return "combines samples"
        for at, labels in enumerate(pattern.outputs):
            value = node.outputs[at]
            if value is None:
                continue
            self.result.kinds[value] = SampleDependence.TOTAL
            if label in labels:
                factor = (pattern.stretched or {}).get((len(pattern.inputs) + at, label), 1)
                self._place(value, labels.index(label), outer * factor)
        return None

    def _index(self, node: GraphNode, pattern: Pattern) -> tuple[str, int] | None:
        """Return the index label of an operation that runs over the samples, and the factor outside
        of them; None if there is not exactly one."""
        indices = set()
        if len(pattern.inputs) != len(node.inputs):
            return None
        for at, (value, labels) in enumerate(zip(node.inputs, pattern.inputs, strict=True)):
            if self.result.kinds[value] is not SampleDependence.SAMPLES:
                continue
            place = self.result.places[value]
            label = labels[place.dim]
            outer, rest = divmod(place.outer, (pattern.stretched or {}).get((at, label), 1))
            if not label or rest or label in pattern.local:
                return None
            indices.add((label, outer))
        if len(indices) != 1:
            return None
        ((label, outer),) = indices
        others = [
            value
            for value, labels in zip(node.inputs, pattern.inputs, strict=True)
            if label in labels and self.result.kinds[value] is not SampleDependence.SAMPLES
        ]
        return None if others else (label, outer)

    def _adds(self, node: GraphNode, pattern: Pattern, label: str, sums: Sequence[int]) -> bool:
        """Return whether results without the samples are sums over them, and nothing else is
        added."""
        if any((label, at) in pattern.whole for at in sums):
            return False
        used = [value for at in sums if (value := node.outputs[at]) is not None]
        numbers = all(
            self.graph.values[value].has_gradients or value in self.bare for value in used
        )
        return numbers and all(
            at >= len(node.inputs) or label in pattern.inputs[at] for at in pattern.additive
        )

    def _place(self, value: int, dim: int, outer: int) -> None:
        inner = self.graph.values[value].shape[dim] // (outer * self.count)
        self.result.kinds[value] = SampleDependence.SAMPLES
        self.result.places[value] = SampleDim(dim, outer, inner)

    def _same(self, node: GraphNode, source: int) -> None:
        for value in node.outputs:
            assert value is not None
            self.result.kinds[value] = self.result.kinds[source]
            if source in self.result.places:
                self.result.places[value] = self.result.places[source]

    def _reshaped(self, node: GraphNode) -> str | None:
        source, value = node.inputs[0], node.outputs[0]
        assert value is not None
        place = self.result.places[source]
        cut = flat_cut(self.graph.values[source].shape, sharded(place.dim, self.count, place.outer))
        state = from_flat_cut(self.graph.values[value].shape, *cut)
        grown = self.forward.slopes(value)
        if (
            state is None
            or grown[state.dim] * self.count != self.graph.values[value].shape[state.dim]
        ):
            return "has samples in no known order"
        self._place(value, state.dim, state.outer)
        return None

    def _own_gradient(self, node: GraphNode) -> str | None:
        """Set the kinds of the results of a ``torch.autograd.Function``; return how it or its
        backward mixes samples."""
        number = node.arguments[3]
        assert isinstance(number, int)
        own = self.graph.own_gradients[number]
        results = node.inputs[: len(node.outputs)]
        inputs = node.inputs[len(results) : len(results) + len(own.gradients)]
        for value, source, given in zip(node.outputs, results, own.given, strict=True):
            assert value is not None
            for copy in (value, given):
                self.result.kinds[copy] = self.result.kinds[source]
                if source in self.result.places:
                    self.result.places[copy] = self.result.places[source]
        for inner in own.nodes:
            how = self._kinds(inner)
            if how is not None:
                return f"has a backward that {how}"
        kinds, places = self.result.kinds, self.result.places
        for value, gradient in zip(inputs, own.gradients, strict=True):
            if kinds[value] is SampleDependence.SAMPLES and places.get(gradient) != places[value]:
                return "has a backward that combines samples"
        return None

    def _tried(self, node: GraphNode) -> str | None:
        """Test an operation without a rule on random numbers."""
        try:
            apart = _keeps_samples_apart(self.forward, node, self.graph, self.result.places)
        except Exception:  # an operation without a rule may raise anything
            apart = None
        if apart is None:
            return "is not known to keep samples apart"
        for value, place in apart.items():
            self.result.kinds[value] = SampleDependence.SAMPLES
            self.result.places[value] = place
        return None


def _grown(forward: Forward, value: int, most: int | None = 1) -> SampleDim | None:
    """Return the dim whose size is at most ``most`` times the number of samples; None if there is
    none or several dims depend on that number."""
    slopes, shape = forward.slopes(value), forward.graph.values[value].shape
    growing = [dim for dim, slope in enumerate(slopes) if slope]
    slope = slopes[growing[0]] if len(growing) == 1 else 0
    if not slope or shape[growing[0]] != slope * COUNTS[0] or (most is not None and slope > most):
        return None
    return SampleDim(growing[0], 1, slope)


def _keeps_samples_apart(
    forward: Forward, node: GraphNode, graph: Graph, places: dict[int, SampleDim]
) -> dict[int, SampleDim] | None:
    """Return where the samples of an operation's results are, if parts of its operands give parts
    of its results; else None."""
    first, second, whole = COUNTS
    result_places = {value: _grown(forward, value) for value in node.outputs if value is not None}
    sizes = sum(graph.values[value].elements for value in (*node.inputs, *result_places))
    if sizes > _MOST_TRIED or any(place is None for place in result_places.values()):
        return None
    generator = torch.Generator().manual_seed(0)
    operands = {value: _random(graph, value, generator) for value in node.inputs}
    at = graph.nodes.index(node)

    def run(count: int, begin: int) -> list[Tensor]:
        sized = forward.nodes(count, whole)[at]

        def given(value: int) -> Tensor:
            return (
                places[value].rows(operands[value], begin, count)
                if value in places
                else operands[value]
            )

        device = torch.device("cpu")
        keywords = {key: filled(part, given, device) for key, part in sized.keywords}
        made: Any = function(node.op)(
            *[filled(part, given, device) for part in sized.arguments], **keywords
        )
        return list(made) if isinstance(made, (tuple, list)) else [made]

    full, front, back = run(whole, 0), run(first, 0), run(second, first)
    for output, all_rows, first_rows, rest in zip(node.outputs, full, front, back, strict=True):
        if output is not None:
            place = result_places[output]
            assert place is not None
            parts = torch.cat([place.to_front(first_rows), place.to_front(rest)])
            if not torch.allclose(
                place.to_front(all_rows), parts, rtol=1e-5, atol=1e-6, equal_nan=True
            ):
                return None
    return {value: place for value, place in result_places.items() if place is not None}


def _random(graph: Graph, value: int, generator: torch.Generator) -> Tensor:
    described = graph.values[value]
    dtype = getattr(torch, described.dtype)
    if described.has_gradients:
        return torch.randn(described.shape, generator=generator, dtype=dtype)
    return torch.randint(0, 2, described.shape, generator=generator).to(dtype)
