"""Run a stage whose replicas cut the sequence into parts, each of which a tensor-parallel group
shares.

The devices of such a replica form a grid: every part has a row of devices, every member a column.

    (1)  columns   divide tokens as ``SequenceStates`` says, and pass keys and values around
    (2)  rows      share the operations of one part, as they are on its tokens, by the cheapest
                   program among the cuts of weights

A value is delivered whole to its row before a column gathers it, adds it up or takes a part of it,
so the collectives of (1) and (2) follow one another. The programs of all rows have the same states,
chosen on the first part; only numbers of tokens differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from argosy.cost.group import CollectiveMethod
from argosy.errors import invalid
from argosy.plan.plan import Recompute
from argosy.runtime.communication.differentiable import converted, taken
from argosy.runtime.communication.exchange import GroupExchange
from argosy.runtime.graphs.cut import StageSegment
from argosy.runtime.graphs.local import LocalCall
from argosy.runtime.stages.context_stage import ContextStage, SequenceExchange, SequenceSharing
from argosy.runtime.stages.graph_stage import OwnBackward
from argosy.runtime.stages.tensor_stage import GroupMember, Sharing, value_of
from argosy.solve.programs.placement import Pricing
from argosy.solve.programs.recorded import GroupSteps, steps_of
from argosy.solve.programs.sequence import RING
from argosy.solve.programs.spmd import program_at
from argosy.space.operations.delivery import Conversion
from argosy.space.operations.rules import CutKind, StateChoices
from argosy.space.operations.sharding import REPLICATED, State, fits, local_shape
from argosy.workload.graph import Graph, GraphNode, OwnGradient, Role
from argosy.workload.part import renamed


@dataclass(frozen=True)
class Derived:
    """A value that a column makes of another one: by a collective, or by taking a part."""

    value: int
    shape: tuple[int, ...]
    """The shape of the value that is converted, on the whole sequence."""
    state: State
    """The state that the column delivers."""
    step: tuple[Conversion, CollectiveMethod] | None
    """The collective; None to take a part of a whole value."""


@dataclass(frozen=True)
class PartGraph:
    """A graph that holds the operations of a stage on one part of the sequence."""

    graph: Graph
    derived: Mapping[int, tuple[Derived, ...]]
    """By value, what columns make of it; these values come after all others."""
    whole: Mapping[int, int]
    """For values that columns make whole, the number of the whole value."""

    @property
    def origins(self) -> dict[int, int]:
        """Return the value of the stage from which each derived value is made."""
        origins: dict[int, int] = {}
        for value, made in self.derived.items():
            for derived in made:
                origins[derived.value] = origins.get(value, value)
        return origins


class _PartBuilder:
    """A builder that makes the graph of one part from the steps of the columns."""

    def __init__(self, steps: GroupSteps, part: int) -> None:
        self.steps, self.part = steps, part
        graph = steps.graph
        self.made: dict[int, State] = {}
        for node, row in zip(graph.nodes, steps.rows, strict=True):
            self.made |= {
                value: state
                for value, state in zip(node.outputs, row.outputs, strict=True)
                if value is not None
            }
        self.values = [
            replace(value, shape=self._shape(number, self.made.get(number, REPLICATED)))
            for number, value in enumerate(graph.values)
        ]
        self.derived: dict[int, list[Derived]] = defaultdict(list)
        self.named: dict[tuple[int, State], int] = {}

    def _shape(self, value: int, state: State) -> tuple[int, ...]:
        shape = self.steps.graph.values[value].shape
        if not fits(shape, state):
            return shape
        return local_shape(shape, state, self.steps.ratios, self.part)

    def build(self) -> PartGraph:
        graph = self.steps.graph
        for value, collectives in self.steps.collectives.items():
            for step in collectives:
                self._derive(value, value, REPLICATED, step)
        nodes = tuple(
            self._node(node, row.inputs)
            for node, row in zip(self._local(), self.steps.rows, strict=True)
        )
        part = replace(
            graph, values=tuple(self.values), nodes=nodes, loss=None, updates=(), sent=()
        )
        whole = {value: name for (value, state), name in self.named.items() if state == REPLICATED}
        derived = {value: tuple(made) for value, made in self.derived.items()}
        return PartGraph(part, derived, whole)

    def _local(self) -> list[GraphNode]:
        """Return the operations with the sizes of the part."""
        steps = self.steps
        calls = (
            LocalCall(graph=steps.graph, node=node, row=row, ratios=steps.ratios, rank=self.part)
            for node, row in zip(steps.graph.nodes, steps.rows, strict=True)
        )
        return [replace(call.node, arguments=call.arguments) for call in calls]

    def _derive(
        self,
        value: int,
        source: int,
        state: State,
        step: tuple[Conversion, CollectiveMethod] | None,
    ) -> int:
        """Add a value that a column makes of ``source``: ``value`` in another state."""
        number = len(self.values)
        whole = self.steps.graph.values[value]
        self.values.append(replace(whole, shape=self._shape(value, state), role=Role.INPUT))
        self.derived[source].append(Derived(number, whole.shape, state, step))
        self.named[value, state] = number
        return number

    def _node(self, node: GraphNode, states: Sequence[State]) -> GraphNode:
        names = iter(
            [self._name(value, state) for value, state in zip(node.inputs, states, strict=True)]
        )
        arguments = tuple(renamed(part, lambda _: next(names)) for part in node.arguments)
        keywords = tuple((key, renamed(part, lambda _: next(names))) for key, part in node.keywords)
        return replace(node, arguments=arguments, keywords=keywords)

    def _name(self, value: int, state: State) -> int:
        """Return the number of a value in the state that an operation reads."""
        if state == self.made.get(value, REPLICATED):
            return value
        if (value, state) not in self.named:
            source = self.named.get((value, REPLICATED), value)
            self._derive(value, source, state, None)
        return self.named[value, state]


@dataclass(frozen=True)
class GridSharing(Sharing):
    """A description that states how the rows of a replica share the parts of its sequence."""

    sequence: SequenceSharing = field(kw_only=True)
    _parts: dict[tuple[int, int], PartGraph] = field(default_factory=dict, compare=False)

    def part(self, samples: int, part: int) -> PartGraph:
        """Return the graph of one part for a number of samples."""
        if (samples, part) not in self._parts:
            steps = self.sequence.steps(samples)
            for node, row in zip(steps.graph.nodes, steps.rows, strict=True):
                if row.local == RING and len(node.inputs) > 3:
                    expected = "none, or one device for each part of the sequence"
                    raise invalid(node.source or node.name, "a mask in attention", expected)
            self._parts[samples, part] = _PartBuilder(steps, part).build()
        return self._parts[samples, part]

    def steps_of_part(self, samples: int, part: int) -> GroupSteps:
        """Return the steps of one row; states are those of the first part."""
        steps, graph = self.steps(samples), self.part(samples, part).graph
        for node, row in zip(graph.nodes, steps.rows, strict=True):
            ends = (*node.inputs, *node.outputs)
            for value, state in zip(ends, (*row.inputs, *row.outputs), strict=True):
                if value is not None and not fits(graph.values[value].shape, state):
                    expected = "a model whose heads and channels have dims of their own"
                    raise invalid(f"{node.op} of a part", f"a cut {state}", expected)
        return replace(steps, graph=graph)

    def _search(self, samples: int, stored: Mapping[int, State]) -> GroupSteps:
        part = self.part(samples, 0)
        loss = self.sequence.steps(samples).graph.loss
        whole = {*self._delivered, *part.derived, *(() if loss is None else (loss,))}
        choices = StateChoices(
            part.graph, len(self.ratios), kind=CutKind.TENSOR, whole=whole, stored=stored
        )
        return steps_of(program_at(part.graph, choices, Pricing(group=self.group), self.ratios))


class GridExchanges(NamedTuple):
    """A pair of exchanges in which one device of a grid takes part."""

    row: GroupExchange
    column: SequenceExchange


class GridStage(ContextStage):
    """A stage that computes one member's share of one part of the sequence."""

    sharing: GridSharing

    def __init__(
        self,
        sharing: GridSharing,
        exchanges: GridExchanges,
        model: nn.Module,
        *,
        recompute: Recompute,
        device: torch.device,
        seed: int,
    ) -> None:
        super().__init__(
            sharing, exchanges.row, model, recompute=recompute, device=device, seed=seed
        )
        self._column = exchanges.column
        self.origins: dict[int, int] = {}
        """Values of the stage from which derived ones are made."""

    @property
    def column(self) -> SequenceExchange:
        return self._column

    def read_by(self, segment: StageSegment, held: dict[Any, Any]) -> dict[Any, Any]:
        reads = segment.reads
        return {key: tensor for key, tensor in held.items() if self.origin(value_of(key)) in reads}

    def origin(self, value: int) -> int:
        return self.origins.get(value, value)

    def on_whole(self, own: OwnGradient, backward: OwnBackward) -> OwnBackward:
        raise invalid(self.cut.graph.name, "a backward of its own", "one device for each part")

    def member(self, samples: int) -> GroupMember:
        part = self.sharing.part(samples, self.column.rank)
        self.origins |= part.origins
        return _GridMember(self, part, samples)


class _GridMember(GroupMember):
    """The calls that one device of a grid makes, for one number of samples."""

    stage: GridStage

    def __init__(self, stage: GridStage, part: PartGraph, samples: int) -> None:
        steps = stage.sharing.steps_of_part(samples, stage.column.rank)
        super().__init__(stage, steps)
        self.part, outer = part, stage.sharing.sequence.steps(samples)
        self.results |= set() if outer.graph.loss is None else {outer.graph.loss}
        self.outer = {
            index: (outer.graph.values[node.inputs[0]].shape if node.inputs else (), row)
            for index, node, row in zip(
                stage.part.operations, outer.graph.nodes, outer.rows, strict=True
            )
        }
        """By operation, the shape of its first input on the whole sequence, and its row in the
        columns."""

    def made(
        self, have: dict[tuple[int, State], Tensor], value: int, state: State, tensor: Tensor
    ) -> None:
        """Store a value, and what the column makes of it once the row has it whole."""
        super().made(have, value, state, tensor)
        column = self.stage.column
        for derived in self.part.derived.get(value, ()):
            key = (derived.value, REPLICATED)
            whole = have[value, REPLICATED]
            if derived.step is None:
                result = taken(column, whole, derived.state)
            else:
                result = converted(column, whole, derived.shape, *derived.step)
            self.made(have, *key, result)

    def left(
        self, have: dict[tuple[int, State], Tensor], segment: StageSegment
    ) -> dict[Any, Tensor]:
        left: dict[Any, Tensor] = {
            key: tensor
            for key, tensor in have.items()
            if self.stage.origin(key[0]) in segment.leaves
        }
        for value in self.results.intersection(segment.leaves):
            whole = (self.part.whole.get(value, value), REPLICATED)
            if whole in have:
                left[value] = have[whole]
        return left

    def local(self, index: int) -> str:
        row = self.outer[index][1]
        return RING if row.local == RING else super().local(index)

    def whole_shape(self, index: int) -> tuple[int, ...]:
        return self.outer[index][0]

    def drawn_here(self, index: int, positions: Tensor) -> Tensor:
        of_part = self.stage.column.take(positions, self.outer[index][1].outputs[0])
        return super().drawn_here(index, of_part)
