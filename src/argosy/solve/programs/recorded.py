"""Convert the program of a tensor-parallel group from and to its record in a plan
(``plan.group_program``).

A record is by layers, so that layers that are shared in the same way are written once. Defaults
fill the rest: a weight that it does not name is whole, a result is read in the state in which it
was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from argosy.cost.group import CollectiveMethod, GroupCollective
from argosy.errors import InputError, Mismatch, Problem
from argosy.plan.group_program import (
    Delivered,
    GroupProgram,
    SharedOperation,
    SharedSegment,
    SharedWeight,
)
from argosy.solve.programs.spmd import Program, steps_of_value
from argosy.space.operations.delivery import WHOLE, Conversion, Delivery
from argosy.space.operations.rules import ShardingRule, StateChoices
from argosy.space.operations.sharding import REPLICATED, State, fits, parse_state
from argosy.workload.graph import Graph, GraphNode, Role

Collectives = Mapping[int, Sequence[tuple[Conversion, CollectiveMethod]]]
"""For each value, the collectives that change its state after it is made."""


@dataclass(frozen=True, kw_only=True)
class GroupSteps:
    """The steps that the members of a group execute."""

    graph: Graph
    ratios: tuple[float, ...]
    rows: tuple[ShardingRule, ...]
    """One rule for each operation of the graph."""
    deliveries: tuple[Delivery, ...]
    """One delivery for each value of the graph."""
    collectives: Collectives

    def stored(self, weight: int) -> State:
        return self.deliveries[weight].stored or REPLICATED


def steps_of(program: Program) -> GroupSteps:
    """Return the steps of a program that was just found."""
    collectives: dict[int, list[tuple[Conversion, CollectiveMethod]]] = {}
    for move in program.moves:
        if move.step.kind is not GroupCollective.SLICE:
            collectives.setdefault(move.value, []).append((move.step, move.way))
    return GroupSteps(
        graph=program.graph,
        ratios=program.ratios,
        rows=program.rows,
        deliveries=program.deliveries,
        collectives=collectives,
    )


def recorded(
    steps: GroupSteps, layer_of: Sequence[int], stage: range, samples: int
) -> GroupProgram:
    """Return the record of a group's steps for ``samples`` samples.

    ``layer_of`` has the layer of every operation and ``stage`` all layers of the stage, some of
    which may have no operation that a group executes.
    """
    graph = steps.graph
    by_layer: dict[int, list[SharedOperation]] = {}
    for layer, node, row in zip(layer_of, graph.nodes, steps.rows, strict=True):
        by_layer.setdefault(layer, []).append(_operation(steps, node, row))
    by_operations: dict[tuple[SharedOperation, ...], list[int]] = {}
    for layer, operations in sorted(by_layer.items()):
        by_operations.setdefault(tuple(operations), []).append(layer)
    weights = [
        _weight(steps, value)
        for value in graph.parameters
        if steps.deliveries[value].stored != REPLICATED
    ]
    return GroupProgram(
        first=stage.start,
        end=stage.stop,
        ratios=steps.ratios,
        samples=samples,
        weights=tuple(sorted(weights, key=lambda weight: weight.name)),
        segments=tuple(
            SharedSegment(layers=tuple(layers_alike), operations=done)
            for done, layers_alike in by_operations.items()
        ),
    )


def _operation(steps: GroupSteps, node: GraphNode, row: ShardingRule) -> SharedOperation:
    delivered = []
    for at, (value, made) in enumerate(zip(node.outputs, row.outputs, strict=True)):
        if value is not None and steps.deliveries[value].states != (made,):
            delivered.append(_delivered(steps, value, at))
    return SharedOperation(
        op=node.op,
        takes=tuple(map(str, row.inputs)),
        leaves=tuple(map(str, row.outputs)),
        units=row.units,
        local=row.local,
        delivered=tuple(delivered),
    )


def _delivered(steps: GroupSteps, value: int, output: int = 0) -> Delivered:
    ways = [way for _, way in steps.collectives.get(value, ())]
    states = tuple(map(str, steps.deliveries[value].states))
    return Delivered(output=output, states=states, way=str(ways[0]) if ways else "")


def _weight(steps: GroupSteps, value: int) -> SharedWeight:
    delivery = steps.deliveries[value]
    return SharedWeight(
        name=steps.graph.values[value].name,
        stored=str(delivery.stored),
        delivered=None if delivery.states == (delivery.stored,) else _delivered(steps, value),
    )


def restored(record: GroupProgram, choices: StateChoices, layers: Sequence[int]) -> GroupSteps:
    """Return the steps that a record describes, among the choices that a group has.

    Raise InputError if the program has other operations than the record, or cannot be executed in
    this way.
    """
    return _Restoring(record, choices, layers).steps()


class _Restoring:
    def __init__(self, record: GroupProgram, choices: StateChoices, layers: Sequence[int]) -> None:
        self.record, self.choices, self.graph, self.layers = record, choices, choices.graph, layers
        self.deliveries = [
            Delivery((REPLICATED,), REPLICATED) if value.role is Role.PARAMETER else WHOLE
            for value in self.graph.values
        ]
        self.ways: dict[int, str] = {}

    def steps(self) -> GroupSteps:
        self._weights()
        rows = tuple(self._rows())
        collectives: dict[int, list[tuple[Conversion, CollectiveMethod]]] = {}
        for value in range(len(self.graph.values)):
            steps = steps_of_value(self.graph, rows, value, self.deliveries[value])
            if steps is None:
                raise self._error(
                    self._maker(value),
                    "no collective that gives these states",
                    "states one step away",
                )
            for step in steps:
                if step.kind is not GroupCollective.SLICE:
                    collectives.setdefault(value, []).append((step, self._way(value)))
        self._check_delivered(rows)
        return GroupSteps(
            graph=self.graph,
            ratios=self.record.ratios,
            rows=rows,
            deliveries=tuple(self.deliveries),
            collectives=collectives,
        )

    def _weights(self) -> None:
        named = {self.graph.values[value].name: value for value in self.graph.parameters}
        for weight in self.record.weights:
            if weight.name not in named:
                raise self._error(
                    f"weights.{weight.name}",
                    "a weight that its layers do not have",
                    "one of theirs",
                )
            value = named[weight.name]
            stored = self._state(f"weights.{weight.name}", weight.stored, value)
            self.deliveries[value] = Delivery((stored,), stored)
            if weight.delivered is not None:
                self._deliver(f"weights.{weight.name}", value, weight.delivered, stored)

    def _rows(self) -> list[ShardingRule]:
        left = {layer: list(self.record.operations(layer)) for layer in set(self.layers)}
        rows: list[ShardingRule] = []
        for layer, node in zip(self.layers, self.graph.nodes, strict=True):
            where = f"layer {layer}"
            operation = left[layer].pop(0) if left[layer] else None
            if operation is None or operation.op != node.op:
                actual = "no further operation" if operation is None else operation.op
                raise self._error(where, actual, f"{node.op}, the next operation of the program")
            rows.append(self._row(where, len(rows), operation))
        if extra := next((operations for operations in left.values() if operations), None):
            raise self._error("segments", extra[0].op, "no further operation, as in the program")
        self._check_rows(rows)
        return rows

    def _check_rows(self, rows: Sequence[ShardingRule]) -> None:
        """Raise InputError unless every row is a way to do its operation."""
        self.choices.consider(
            (value, state)
            for ends, row in zip(self.choices.ends, rows, strict=True)
            for value, state in zip(ends, (*row.inputs, *row.outputs), strict=True)
            if state.is_sharded
        )
        for index, row in enumerate(rows):
            if row not in self.choices.rows(index):
                raise self._error(
                    f"layer {self.layers[index]}",
                    f"{self.graph.nodes[index].op} as {row}",
                    "a way to do it on parts of tensors",
                )

    def _row(self, where: str, index: int, operation: SharedOperation) -> ShardingRule:
        node = self.graph.nodes[index]
        if (len(operation.takes), len(operation.leaves)) != (len(node.inputs), len(node.outputs)):
            taken = f"{len(operation.takes)} states taken"
            actual = f"{taken} and {len(operation.leaves)} left by {operation.op}"
            raise self._error(where, actual, f"{len(node.inputs)} and {len(node.outputs)}")
        row = ShardingRule(
            inputs=tuple(
                self._state(where, t, v) for t, v in zip(operation.takes, node.inputs, strict=True)
            ),
            outputs=tuple(
                self._state(where, t, v)
                for t, v in zip(operation.leaves, node.outputs, strict=True)
            ),
            units=operation.units,
            local=operation.local,
        )
        for value, made in zip(node.outputs, row.outputs, strict=True):
            if value is not None:
                self.deliveries[value] = Delivery((made,))
        for delivered in operation.delivered:
            value = node.outputs[delivered.output] if delivered.output < len(node.outputs) else None
            if value is None:
                raise self._error(
                    where, f"result {delivered.output} of {operation.op}", "a result that is read"
                )
            self._deliver(where, value, delivered, None)
        return row

    def _check_delivered(self, rows: Sequence[ShardingRule]) -> None:
        """Raise InputError unless every operation can read what it takes, and what leaves the group
        is whole."""
        for index, (node, row) in enumerate(zip(self.graph.nodes, rows, strict=True)):
            for value, state in zip(node.inputs, row.inputs, strict=True):
                if not self.deliveries[value].has(state):
                    where = f"layer {self.layers[index]}"
                    raise self._error(
                        where, f"{node.op}, which takes {state}", f"{self.deliveries[value]}"
                    )
        results = [*self.graph.sent, *(after for _, after in self.graph.updates)]
        for value in (*results, *(() if self.graph.loss is None else (self.graph.loss,))):
            if not self.deliveries[value].has(REPLICATED):
                raise self._error(
                    self._maker(value), f"a result as {self.deliveries[value]}", "a whole one"
                )

    def _deliver(self, where: str, value: int, delivered: Delivered, stored: State | None) -> None:
        states = tuple(self._state(where, text, value) for text in delivered.states)
        self.deliveries[value] = Delivery(states, stored)
        self.ways[value] = delivered.way

    def _way(self, value: int) -> CollectiveMethod:
        way = self.ways.get(value, "")
        if way not in set(CollectiveMethod):
            raise self._error(
                self._maker(value), f'way "{way}"', f"one of {', '.join(CollectiveMethod)}"
            )
        return CollectiveMethod(way)

    def _state(self, where: str, text: str, value: int | None) -> State:
        try:
            state = parse_state(text)
        except Mismatch as error:
            raise self._error(where, error.found, error.expected) from None
        shape = None if value is None else self.graph.values[value].shape
        if shape is not None and not (fits(shape, state) and _has_units(state, self.record)):
            raise self._error(
                where,
                text,
                f"a cut of a tensor of {list(shape)} by {len(self.record.ratios)} devices",
            )
        return state

    def _maker(self, value: int) -> str:
        node = self.graph.producer.get(value)
        return self.graph.values[value].name if node is None else f"layer {self.layers[node]}"

    def _error(self, where: str, found: str, expected: str) -> InputError:
        at = f"plan.programs of layers {self.record.first} to {self.record.end - 1}, {where}"
        again = "plan again with the package and the torch that run it"
        return InputError([Problem(at, found, expected, suggestion=again)])


def _has_units(state: State, record: GroupProgram) -> bool:
    return not state.is_sharded or state.units >= len(record.ratios)
