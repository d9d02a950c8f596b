"""Formulate the choice of a distributed program as costs over one or two choices at a time.

The variables are, for each operation its ``ShardingRule``, and for each value its ``Delivery``.
Costs, in seconds, for given ratios:

    (1)  of a row           the longest compute of any device, and what a row exchanges itself
    (2)  row, its result    the collective from the state that the row makes to the delivery
    (3)  of a parameter     the all-gather, where it is used whole and stored in shards
    (4)  row, its operand   infinite unless the delivery has the state that the row takes
    (5)  parameter, grad    infinite unless the gradient is delivered as the parameter is stored

and the loss and changed buffers are delivered whole, what other stages read not as a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from argosy.cost.group import CollectiveMethod, DeviceGroup, GroupCollective
from argosy.solve.programs.elimination import AssignmentProblem, Table
from argosy.space.operations.delivery import Conversion, Delivery, conversions, deliveries
from argosy.space.operations.families import BY_CLASSES, OperationCall
from argosy.space.operations.flop import flop_of
from argosy.space.operations.matrices import is_matrix
from argosy.space.operations.rules import CutKind, ShardingRule, StateChoices
from argosy.space.operations.sharding import PARTIAL, REPLICATED, State, sharded, unit_counts
from argosy.workload.graph import Graph, Role

# Bytes of a sum over classes that devices exchange.
_SUM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """A price list that states the devices, and how FLOP and bytes are counted."""

    group: DeviceGroup
    flop: Callable[[OperationCall], float] = flop_of
    rounded: bool = True
    """Whether shares are whole units of a dim; otherwise they are the ratios themselves."""
    count_moves: bool = True
    """Whether memory traffic counts as compute time."""
    element_bytes: float | None = None
    """Bytes of an element in communication, where that is not the tensor's own."""


class ProgramPlacement:
    """The variables and costs that one graph has on one group at given ratios."""

    def __init__(
        self, graph: Graph, choices: StateChoices, pricing: Pricing, ratios: Sequence[float]
    ) -> None:
        self.graph, self.choices, self.pricing, self.ratios = graph, choices, pricing, tuple(ratios)
        self._full = (1.0,) * len(pricing.group)
        self._shares: dict[int, tuple[float, ...]] = {}
        self._interned: dict[object, Table] = {}
        self._seconds: dict[object, float] = {}
        self.rows = [choices.rows(index) for index in range(len(graph.nodes))]
        self._whole = {
            *_shared_constants(graph),
            graph.loss,
            *(a for _, a in graph.updates),
            *choices.whole,
        }
        self._sent = frozenset(graph.sent)
        self._options: dict[object, tuple[Delivery, ...]] = {}
        self._values = range(len(graph.values))
        self.deliveries = [self._deliveries(value) for value in self._values]

    def _deliveries(self, value: int) -> tuple[Delivery, ...]:
        """Return the deliveries of a value.

        Values of one kind share one tuple, so that their tables are shared too.
        """
        described, cuts = self.graph.values[value], self.choices.cut_sets[value]
        several = len(self.graph.consumers[value]) > 1
        bounds = (
            value in self._whole,
            value in self._sent,
            self.choices.stored.get(value),
            self._is_cut(value),
            self._may_gather(value),
        )
        key = (
            described.role,
            described.is_floating,
            several,
            *bounds,
            id(cuts),
        )
        if key not in self._options:
            self._options[key] = self._find_deliveries(value, cuts)
        return self._options[key]

    def _find_deliveries(self, value: int, cuts: tuple[State, ...]) -> tuple[Delivery, ...]:
        options = deliveries(self.graph, value, cuts)
        if value in self._sent:
            options = tuple(option for option in options if option.states != (PARTIAL,))
        if value in self._whole:
            options = tuple(option for option in options if REPLICATED in option.states)
        if value in self.choices.stored:
            options = tuple(
                option for option in options if option.stored == self.choices.stored[value]
            )
        elif self._is_cut(value) and cuts:
            options = tuple(option for option in options if option.stored != REPLICATED)
        if not self._may_gather(value):
            options = tuple(option for option in options if not option.is_gathered)
        return options

    def _is_cut(self, value: int) -> bool:
        """Return whether a parameter must not be stored whole if it can be cut."""
        return self.choices.kind is not CutKind.ANY and is_matrix(self.graph, value)

    def _may_gather(self, value: int) -> bool:
        return self.choices.gathered is None or value in self.choices.gathered

    def shares(self, state: State) -> tuple[float, ...]:
        """Return for each device the share of a tensor in this state that it holds."""
        if not state.is_sharded:
            return self._full
        if not self.pricing.rounded:
            return self.ratios
        if state.units not in self._shares:
            counts = unit_counts(state.units, self.ratios)
            self._shares[state.units] = tuple(count / state.units for count in counts)
        return self._shares[state.units]

    def moved_bytes(self, value: int) -> float:
        described = self.graph.values[value]
        per = self.pricing.element_bytes
        return described.elements * per if per is not None else float(described.num_bytes)

    def transfer(self, value: int, step: Conversion) -> tuple[float, CollectiveMethod]:
        """Return the seconds and the method of one collective on one value."""
        group, amount = self.pricing.group, self.moved_bytes(value)
        cut = step.after if step.kind is GroupCollective.REDUCE_SCATTER else step.before
        return group.transfer_seconds(step.kind, amount, self.shares(cut))

    def delivery_seconds(self, value: int, made: State, delivery: Delivery) -> float:
        """Return the seconds of the collective from the state in which a value is made to its
        delivery (2)."""
        if made is REPLICATED:
            return 0.0
        steps = conversions(made, delivery)
        if steps is None:
            return float("inf")
        return sum(self._transfer_seconds(value, step) for step in steps)

    def _transfer_seconds(self, value: int, step: Conversion) -> float:
        key = (self.moved_bytes(value), step)
        if key not in self._seconds:
            self._seconds[key] = self.transfer(value, step)[0]
        return self._seconds[key]

    def row_work(self, index: int) -> tuple[float, float]:
        """Return the FLOP and bytes of an operation done whole, as the group counts them."""
        return self._flop[index], self._moves[index] if self.pricing.count_moves else 0.0

    @cached_property
    def _flop(self) -> list[float]:
        known: dict[int, float] = {}
        for call in self.choices.calls:
            if id(call) not in known:
                known[id(call)] = self.pricing.flop(call)
        return [known[id(call)] for call in self.choices.calls]

    @cached_property
    def _moves(self) -> list[float]:
        """Return the bytes that each operation reads and writes; one that only renames elements
        moves none."""
        values = self.graph.values
        moved = []
        for node, call in zip(self.graph.nodes, self.choices.calls, strict=True):
            free = call.entry.get("flop", 1) == 0 and len(node.inputs) == 1
            ends = (*node.inputs, *(v for v in node.outputs if v is not None))
            moved.append(0.0 if free else float(sum(values[v].num_bytes for v in ends)))
        return moved

    def row_seconds(self, index: int, row: ShardingRule) -> float:
        """Return the longest compute of any device for an operation done by a row (1), in
        seconds."""
        flop, moved = self.row_work(index)
        if flop == 0 and moved == 0:
            return 0.0
        shares = self.shares(sharded(0, row.units) if row.units else REPLICATED)
        seconds = self.pricing.group.compute_seconds(flop, moved, shares)
        return seconds + self._exchanged_seconds(index, row)

    def _exchanged_seconds(self, index: int, row: ShardingRule) -> float:
        """Return the seconds of what an operation by a row exchanges itself (1)."""
        amount = exchanged_bytes(self.graph, index, row)
        if not amount:
            return 0.0
        group = self.pricing.group
        return group.transfer_seconds(GroupCollective.ALL_REDUCE, amount, group.even)[0]

    def parameter_seconds(self, value: int, delivery: Delivery) -> float:
        """Return the seconds of the all-gather of a value that is stored in shards and used whole
        (3)."""
        if not delivery.is_gathered:
            return 0.0
        assert delivery.stored is not None
        step = Conversion(GroupCollective.ALL_GATHER, delivery.stored, REPLICATED)
        return self._transfer_seconds(value, step)

    @cached_property
    def problem(self) -> AssignmentProblem:
        """Return the problem whose variables are first the rows of nodes, then the deliveries of
        values; equal nodes share their tables."""
        nodes = len(self.graph.nodes)
        known: dict[object, tuple[Table, list[tuple[int, Table]]]] = {}
        costs: list[Table] = []
        pairs: list[tuple[int, int, Table]] = []
        choices = self.choices
        for index, (ends, rows) in enumerate(zip(choices.ends, self.rows, strict=True)):
            around = tuple([0 if value is None else id(self.deliveries[value]) for value in ends])
            key = (id(choices.calls[index]), choices.same[index], id(rows), around)
            if key not in known:
                known[key] = (self._row_costs(index), self._pair_costs(index))
            cost, tables = known[key]
            costs.append(cost)
            for end, table in tables:
                value = ends[end]
                assert value is not None
                pairs.append((index, nodes + value, table))
        costs += [self._value_costs(value) for value in self._values]
        for parameter, gradient in self.graph.gradients:
            pairs.append((nodes + parameter, nodes + gradient, self._trained(parameter, gradient)))
        return AssignmentProblem(costs=tuple(costs), pairs=tuple(pairs))

    def _intern(self, key: object, make: Callable[[], Table]) -> Table:
        if key not in self._interned:
            self._interned[key] = make()
        return self._interned[key]

    def _zeros(self, count: int) -> Table:
        return self._intern(("none", count), lambda: np.zeros(count))

    def _row_costs(self, index: int) -> Table:
        rows = self.rows[index]
        key = ("row", id(rows), *self.row_work(index))
        return self._intern(key, lambda: np.array([self.row_seconds(index, row) for row in rows]))

    def _pair_costs(self, index: int) -> list[tuple[int, Table]]:
        """Return tables over a node and the values at its ends: collectives (2) and forbidden pairs
        (4)."""
        node = self.graph.nodes[index]
        made = enumerate(node.outputs, len(node.inputs))
        tables = [
            (end, self._made(index, end - len(node.inputs), value))
            for end, value in made
            if value is not None
        ]
        for value, places in _places(node.inputs).items():
            if (
                len(self.deliveries[value]) > 1
                or REPLICATED not in self.deliveries[value][0].states
            ):
                tables.append((places[0], self._taken(index, places, value)))
        return tables

    def _value_costs(self, value: int) -> Table:
        options = self.deliveries[value]
        if self.graph.values[value].role is not Role.PARAMETER:
            return self._zeros(len(options))
        key = ("parameter", id(options), self.moved_bytes(value))
        return self._intern(
            key, lambda: np.array([self.parameter_seconds(value, option) for option in options])
        )

    def _made(self, index: int, place: int, value: int) -> Table:
        """Return the table of collectives from the results of a node's rows to the deliveries of a
        value (2)."""
        rows, options = self.rows[index], self.deliveries[value]
        how = (id(options), self.moved_bytes(value))

        def line(made: State) -> Table:
            return self._intern(
                ("line", made, *how),
                lambda: np.array(
                    [self.delivery_seconds(value, made, option) for option in options]
                ),
            )

        key = ("made", id(rows), place, *how)
        return self._intern(key, lambda: np.array([line(row.outputs[place]) for row in rows]))

    def _taken(self, index: int, places: tuple[int, ...], value: int) -> Table:
        """Return the table that forbids rows of a node which a delivery of its operand does not
        serve (4)."""
        rows, options = self.rows[index], self.deliveries[value]

        def barred() -> Table:
            needs = [tuple([row.inputs[place] for place in places]) for row in rows]
            lines = {
                need: [0.0 if all(map(option.has, need)) else np.inf for option in options]
                for need in dict.fromkeys(needs)
            }
            return np.array([lines[need] for need in needs])

        return self._intern(("taken", id(rows), places, id(options)), barred)

    def _trained(self, parameter: int, gradient: int) -> Table:
        """Return the table that forbids deliveries of a gradient other than the parameter's storage
        (5)."""
        ours, theirs = self.deliveries[parameter], self.deliveries[gradient]

        def fits(held: Delivery, given: Delivery) -> bool:
            assert held.stored is not None
            return given.has(held.stored)

        return self._intern(
            ("trained", id(ours), id(theirs)),
            lambda: np.array(
                [[0.0 if fits(held, given) else np.inf for given in theirs] for held in ours]
            ),
        )


def exchanged_bytes(graph: Graph, index: int, row: ShardingRule) -> float:
    """Return the bytes of the all-reduce inside an operation that is done by a row: one number for
    each position if its classes are cut."""
    if row.local != BY_CLASSES:
        return 0.0
    value = graph.values[graph.nodes[index].inputs[0]]
    return _SUM_BYTES * value.elements / value.shape[row.inputs[0].dim]


def _places(inputs: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return for each value its positions among the operands."""
    positions: dict[int, list[int]] = {}
    for place, value in enumerate(inputs):
        positions.setdefault(value, []).append(place)
    return {value: tuple(places) for value, places in positions.items()}


def _shared_constants(graph: Graph) -> frozenset[int]:
    """Return the values that many operations read and no parameter enters (masks, rotary angles):
    every device has them whole.

    They cost little to make and would connect every layer to every other in the search.
    """
    learned: set[int] = set(graph.parameters)
    for node in graph.nodes:
        if any(value in learned for value in node.inputs):
            learned.update(value for value in node.outputs if value is not None)
    made = graph.producer
    return frozenset(v for v in made if v not in learned and len(graph.consumers[v]) > 2)
