"""Choose how each device of a group processes its part of a sequence, and what the devices
exchange.

The states of a forward's values follow from one another, in the order of its operations:

    (1)  values made from the batch without weights or buffers (ids, masks, targets) are whole on
         every device, and so are values that do not depend on the batch (tables of positions)
    (2)  if such a value of the batch meets a weight or a buffer, its dim of the sequence is cut;
         so is that of any other whole value of the batch with dims for samples, tokens and more
    (3)  an operation keeps the cut if its pattern allows it; a result that lacks the dim is a
         partial sum
    (4)  an attention of cut queries to cut keys and values passes these around a ring of the
         devices (``RING``)
    (5)  inputs of any other operation are made whole, by an all-gather or an all-reduce

Weights are whole on every device, so their gradients are partial sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from argosy.cost.group import CollectiveMethod, GroupCollective
from argosy.errors import invalid
from argosy.solve.programs.recorded import GroupSteps
from argosy.space.operations.calls import call_of, pattern_of, table
from argosy.space.operations.delivery import WHOLE, Conversion
from argosy.space.operations.families import Pattern
from argosy.space.operations.rules import ShardingRule, label_row, only_whole, sums_are_numbers
from argosy.space.operations.sharding import (
    PARTIAL,
    REPLICATED,
    State,
    fits,
    flat_cut,
    from_flat_cut,
    sharded,
)
from argosy.workload.graph import Graph, GraphNode, Role

RING = "ring"
"""The implementation of attention that passes keys and values around a ring."""
# The operation that torch captures for attention on a CPU.
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
# Collectives by the value that they deliver.
Gathers = dict[int, tuple[tuple[Conversion, CollectiveMethod], ...]]
# The dim of tokens in queries, keys and values: samples, heads, tokens, elements of a head.
_SEQUENCE_DIM = 2


def sequence_length(graph: Graph) -> int:
    """Return the number of tokens that attention works on; raise InputError if it is not unique."""
    nodes = [node for node in graph.nodes if node.op == ATTENTION]
    for node in nodes:
        if len(node.arguments) > 3 and node.arguments[3]:
            where = node.source or node.name
            raise invalid(where, "dropout in attention", "none on parts of a sequence")
    lengths = {
        graph.values[value].shape[_SEQUENCE_DIM] for node in nodes for value in node.inputs[:2]
    }
    if len(lengths) == 1:
        return lengths.pop()
    actual = (
        f"attention over {' and '.join(map(str, sorted(lengths)))} tokens"
        if lengths
        else "no attention"
    )
    calls = "calls of scaled_dot_product_attention over sequences of one length"
    expected = f"{calls}, to cut a sequence into parts"
    raise invalid("model", actual, expected)


class SequenceStates:
    """The states (1) to (5) that the values of a whole forward have at one number of samples."""

    def __init__(self, graph: Graph, length: int, sample_dims: Mapping[int, int]) -> None:
        """Determine all states; ``sample_dims`` has the dim of the samples for values of the
        batch."""
        self.graph, self.length, self.sample_dims = graph, length, sample_dims
        self.states: dict[int, State] = {}
        """States of values that are not whole, as they are made."""
        self._bare = {
            at for at, value in enumerate(graph.values) if value.role in (Role.INPUT, Role.CONSTANT)
        }
        self.of_batch = {at for at, value in enumerate(graph.values) if value.role is Role.INPUT}
        self._trained = {
            at for at, value in enumerate(graph.values) if value.role is Role.PARAMETER
        }
        self.rows = tuple(self._row(node) for node in graph.nodes)

    def _row(self, node: GraphNode) -> ShardingRule:
        made = [value for value in node.outputs if value is not None]
        is_bare = self._bare.issuperset(node.inputs)
        if is_bare:
            self._bare.update(made)
        if not self.of_batch.isdisjoint(node.inputs):
            self.of_batch.update(made)
        if not self._trained.isdisjoint(node.inputs):
            self._trained.update(made)
        row = only_whole(node) if is_bare else self._chosen(node)
        for value, state in zip(node.outputs, row.outputs, strict=True):
            if value is not None and state != REPLICATED:
                self.states[value] = state
        return row

    def _chosen(self, node: GraphNode) -> ShardingRule:
        rows = (
            row
            for row in self._possible(node)
            if self._fits(node, row) and sums_are_numbers(self.graph, node, row)
        )
        return next(rows, only_whole(node))

    def _possible(self, node: GraphNode) -> Iterator[ShardingRule]:
        """Yield rows on parts of the sequence, the best first."""
        states = [self._state(value) for value in node.inputs]
        cuts = [state for state in states if state.is_sharded]
        if node.op == ATTENTION and cuts:
            yield from self._attention(node, states)
            return
        if table().get(node.op, {}).get("family") == "view":
            if cuts and node.outputs[0] is not None:
                shapes = [
                    self.graph.values[value].shape for value in (node.inputs[0], node.outputs[0])
                ]
                mapped = from_flat_cut(shapes[1], *flat_cut(shapes[0], cuts[0]))
                if mapped is not None:
                    yield ShardingRule(inputs=(cuts[0],), outputs=(mapped,), units=self.length)
            return
        pattern = pattern_of(call_of(self.graph, node))
        if len(pattern.inputs) != len(node.inputs) or len(pattern.outputs) != len(node.outputs):
            return
        if PARTIAL in states and not cuts:
            yield from self._sums(node, pattern, states)
        yield from self._cut_rows(pattern, states)

    def _state(self, value: int) -> State:
        """Return the state in which a value is made, or its cut if it is about to meet a weight
        (2)."""
        if value in self.states:
            return self.states[value]
        shape = self.graph.values[value].shape
        if value in self.of_batch and (value in self._bare or len(shape) > 2):
            dims = [
                at
                for at, size in enumerate(shape)
                if size == self.length and at != self.sample_dims.get(value)
            ]
            if dims:
                return sharded(dims[0], self.length)
        return REPLICATED

    def _cut_rows(self, pattern: Pattern, states: Sequence[State]) -> Iterator[ShardingRule]:
        """Yield rows by (3) along each index that is cut somewhere; first along those that every
        result has."""
        cuts: dict[tuple[str, int], None] = {}
        for at, state in enumerate(states):
            label = pattern.inputs[at][state.dim] if state.is_sharded else ""
            factor = (pattern.stretched or {}).get((at, label), 1)
            if label and label not in pattern.local and state.outer % factor == 0:
                cuts[label, state.outer // factor] = None
        kept = [cut for cut in cuts if all(cut[0] in labels for labels in pattern.outputs)]
        for label, outer in (*kept, *(cut for cut in cuts if cut not in kept)):
            yield label_row(pattern, label, (outer, self.length))

    def _sums(
        self, node: GraphNode, pattern: Pattern, states: Sequence[State]
    ) -> Iterator[ShardingRule]:
        """Yield rows with partial sums as inputs and outputs."""
        partial = {at for at, state in enumerate(states) if state == PARTIAL}
        for chosen in sorted(pattern.linear, key=len):
            if chosen & partial:
                inputs = tuple(
                    PARTIAL if at in chosen else REPLICATED for at in range(len(node.inputs))
                )
                yield ShardingRule(inputs=inputs, outputs=(PARTIAL,) * len(node.outputs))

    def _attention(self, node: GraphNode, states: Sequence[State]) -> Iterator[ShardingRule]:
        """Yield the row of ring attention (4); a mask is whole on every device, and gets no
        gradient."""
        cut = sharded(_SEQUENCE_DIM, self.length)
        if all(state == cut for state in states[:3]) and self._trained.isdisjoint(node.inputs[3:]):
            masks = (REPLICATED,) * (len(states) - 3)
            yield ShardingRule(
                inputs=(cut,) * 3 + masks,
                outputs=(cut,) * len(node.outputs),
                units=self.length,
                local=RING,
            )

    def _fits(self, node: GraphNode, row: ShardingRule) -> bool:
        ends = [
            *zip(node.inputs, row.inputs, strict=True),
            *zip(node.outputs, row.outputs, strict=True),
        ]
        return all(
            value is None or fits(self.graph.values[value].shape, state) for value, state in ends
        )

    def stage(
        self,
        graph: Graph,
        operations: Sequence[int],
        *,
        ratios: tuple[float, ...],
        received: Mapping[int, State],
        whole: Collection[int],
    ) -> GroupSteps:
        """Return the steps of a stage that consists of these operations, which form ``graph``.

        ``received`` has the states in which values arrive, whole unless given; ``whole`` lists
        values that are needed whole in addition to what the operations read.
        """
        rows = tuple(self.rows[index] for index in operations)
        own = {value for node in graph.nodes for value in node.outputs}
        states = {value: state for value, state in self.states.items() if value in own} | dict(
            received
        )
        collectives = _gathers(graph, rows, states, whole)
        deliveries = (WHOLE,) * len(graph.values)
        return GroupSteps(
            graph=graph, ratios=ratios, rows=rows, deliveries=deliveries, collectives=collectives
        )

    def gathers(self) -> Gathers:
        """Return the collectives that make values of the forward whole, except its results."""
        return _gathers(self.graph, self.rows, self.states, ())

    @property
    def has_ring(self) -> bool:
        return any(row.local == RING for row in self.rows)

    @cached_property
    def cut_values(self) -> frozenset[int]:
        """Return the values whose tokens are cut in a dim without samples, so that they can be sent
        in parts."""
        return frozenset(
            value
            for value, state in self.states.items()
            if state.is_sharded and state.outer == 1 and state.dim != self.sample_dims.get(value)
        )


def _gathers(
    graph: Graph,
    rows: Sequence[ShardingRule],
    states: Mapping[int, State],
    whole: Collection[int],
) -> Gathers:
    """Return the collectives (5) of values that an operation reads in another state than they have,
    and of those that must be ``whole``."""
    needs = dict.fromkeys(value for value in whole if value in states)
    for node, row in zip(graph.nodes, rows, strict=True):
        for value, state in zip(node.inputs, row.inputs, strict=True):
            if value in states and state != states[value]:
                needs[value] = None
    return {value: ((_made_whole(states[value]), CollectiveMethod.RING),) for value in needs}


def _made_whole(state: State) -> Conversion:
    """Return the collective that makes a value whole (5)."""
    kind = GroupCollective.ALL_REDUCE if state == PARTIAL else GroupCollective.ALL_GATHER
    return Conversion(kind, state, REPLICATED)


def repeated_heads(graph: Graph, value: int) -> int:
    """Return how many consecutive heads have the same keys or values, because fewer were expanded:
    1 if all differ."""
    shape = graph.values[value].shape
    for node in _makers(graph, value):
        (source,), (result,) = node.inputs[:1], node.outputs
        before, after = graph.values[source].shape, graph.values[result or 0].shape
        if node.op == "aten.expand.default" and len(after) == 5 and before != after:
            heads, times = after[1], after[2]
            is_repeat = before[2] == 1 and (before[0], heads, *before[3:]) == (
                after[0],
                before[1],
                *after[3:],
            )
            return (
                times if is_repeat and heads * times == shape[1] and after[3:] == shape[2:] else 1
            )
        if node.op not in _UNCHANGED:
            return 1
    return 1


_UNCHANGED = (
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.clone.default",
)
"""Operations that leave elements in their order."""


def _makers(graph: Graph, value: int) -> Iterable[GraphNode]:
    """Yield the operation that makes a value, the one that makes its first operand, and so on."""
    while value in graph.producer:
        node = graph.nodes[graph.producer[value]]
        yield node
        if not node.inputs:
            return
        value = node.inputs[0]
