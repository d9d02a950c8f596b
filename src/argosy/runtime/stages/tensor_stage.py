"""Run a stage that a tensor-parallel group shares: its operations on shards of tensors, which torch
differentiates.

The forward of the stage is a graph of its own, for whose operations ``solve`` chooses rows and
deliveries among the cuts of weights and of positions between them (``tensor_program``), at the
ratios that the plan gives the group.
What the stage receives and sends on is replicated on every member; so are its buffers and its loss.
The states of weights are chosen once; everything else is chosen again for every number of samples,
with these states fixed. A plan for a captured program contains the choices
(``plan.group_program``), which are then executed, no matter which cuts they make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from argosy.cost.group import DeviceGroup
from argosy.plan.group_program import GroupProgram
from argosy.plan.plan import Recompute
from argosy.runtime.communication.differentiable import converted, taken
from argosy.runtime.communication.exchange import GroupExchange
from argosy.runtime.graphs.calls import RANDOM, filled
from argosy.runtime.graphs.classes import EMBEDDING, lookup, normalised, picked_losses
from argosy.runtime.graphs.cut import GraphCut, StageSegment
from argosy.runtime.graphs.local import LocalCall
from argosy.runtime.stages.graph_stage import GraphStage, OwnBackward, apply
from argosy.runtime.stages.moment import Moment
from argosy.solve.programs.placement import Pricing
from argosy.solve.programs.recorded import GroupSteps, recorded, restored, steps_of
from argosy.solve.programs.sequence import RING
from argosy.solve.programs.spmd import tensor_program
from argosy.space.operations.calls import is_linear
from argosy.space.operations.families import BY_CLASSES, BY_ROWS
from argosy.space.operations.rules import StateChoices
from argosy.space.operations.sharding import REPLICATED, State
from argosy.workload.graph import MODULE, OWN_GRADIENT, Graph, GraphNode, OwnGradient, Ref, Role


@dataclass(frozen=True)
class Sharing:
    """A description of how the groups of a stage share it."""

    cut: GraphCut
    index: int
    group: DeviceGroup
    """One of the groups; the others have as many devices."""
    ratios: tuple[float, ...]
    samples: int
    """The samples of the micro-batch for which the states of weights are chosen."""
    total: int
    """The samples of the global batch."""
    layers: range
    """The layers of the stage."""
    whole: frozenset[int]
    """Weights that every member holds whole."""
    records: Mapping[int, GroupProgram] = field(default_factory=dict)
    """The programs of the group that the plan records, by number of samples."""
    _steps: dict[int, GroupSteps] = field(default_factory=dict, compare=False)
    handed: Mapping[int, State] = field(default_factory=dict)
    """States of values that are sent on and not replicated: none."""

    @cached_property
    def stored(self) -> dict[int, State]:
        """Return the states of weights."""
        recorded = next(iter(self.records), None)
        steps = self._search(self.samples, {}) if recorded is None else self._restore(recorded)
        return {value: steps.stored(value) for value in self.cut.parts[self.index].weights}

    def steps(self, samples: int) -> GroupSteps:
        """Return the steps that the group runs for a number of samples."""
        if samples not in self._steps:
            is_recorded = samples in self.records
            self._steps[samples] = (
                self._restore(samples) if is_recorded else self._search(samples, self.stored)
            )
        return self._steps[samples]

    def record(self, samples: int) -> GroupProgram:
        """Return the steps for a number of samples in the form that a plan records."""
        return recorded(self.steps(samples), self._layers, self.layers, samples)

    def _search(self, samples: int, stored: Mapping[int, State]) -> GroupSteps:
        graph = stage_graph(self.cut, self.index, samples, self.total)
        pricing = Pricing(group=self.group)
        return steps_of(
            tensor_program(graph, pricing, self.ratios, whole=self._delivered, stored=stored)
        )

    def _restore(self, samples: int) -> GroupSteps:
        graph = stage_graph(self.cut, self.index, samples, self.total)
        choices = StateChoices(graph, len(self.ratios), whole=self._delivered)
        return restored(self.records[samples], choices, self._layers)

    @property
    def _delivered(self) -> set[int]:
        """Return the values that are stored or sent whole."""
        return {*self.whole, *self.cut.parts[self.index].sends}

    @property
    def _layers(self) -> list[int]:
        """Return the layer of each operation of the stage.

        Values that the stage recomputes for itself belong to its first layer.
        """
        assert self.cut.layers is not None, "a plan that has its programs has layers"
        return [
            max(self.cut.layers[index], self.layers.start)
            for index in self.cut.parts[self.index].operations
        ]


def stage_graph(cut: GraphCut, index: int, samples: int, total: int) -> Graph:
    """Return a stage's part of the forward for ``samples`` of ``total``; values that it does not
    compute become inputs."""
    forward, part = cut.forward, cut.parts[index]
    nodes = forward.nodes(samples, total)
    own = tuple(nodes[at] for at in part.operations)
    made = {value for node in own for value in node.outputs}
    values = tuple(
        replace(
            value,
            shape=forward.shape(number, samples),
            role=Role.INPUT if value.role is Role.RESULT and number not in made else value.role,
        )
        for number, value in enumerate(cut.graph.values)
    )
    return Graph(
        name=f"{cut.graph.name}, stage {index}",
        values=values,
        nodes=own,
        loss=cut.graph.loss if index == cut.num_stages - 1 else None,
        gradients=(),
        updates=part.updates,
        constants=cut.graph.constants,
        sent=part.sends,
        own_gradients=cut.graph.own_gradients,
    )


class SharedStage(Protocol):
    """The interface of a stage that a group shares: by weights (``Sharing``), or by parts of the
    sequence."""

    @property
    def cut(self) -> GraphCut: ...

    @property
    def index(self) -> int: ...

    @property
    def ratios(self) -> tuple[float, ...]: ...

    @property
    def stored(self) -> Mapping[int, State]:
        """Return the states of weights, and of values that arrive and are not replicated."""

    @property
    def handed(self) -> Mapping[int, State]:
        """Return the states of values that are sent on and not replicated."""

    def steps(self, samples: int) -> GroupSteps: ...


class TensorStage(GraphStage):
    """A stage that computes one member's part."""

    def __init__(
        self,
        sharing: SharedStage,
        exchange: GroupExchange,
        model: nn.Module,
        *,
        recompute: Recompute,
        device: torch.device,
        seed: int,
    ) -> None:
        super().__init__(
            sharing.cut, sharing.index, model, recompute=recompute, device=device, seed=seed
        )
        self.sharing, self.exchange = sharing, exchange
        self.members: dict[int, GroupMember] = {}
        """The calls of this member, by number of samples."""

    def read_by(self, segment: StageSegment, held: dict[Any, Any]) -> dict[Any, Any]:
        return {key: tensor for key, tensor in held.items() if value_of(key) in segment.reads}

    def on_whole(self, own: OwnGradient, backward: OwnBackward) -> OwnBackward:
        """Return a backward that sums the members' parts of the gradients first, unless it is
        linear, and leaves its result to the first member (``differentiable``, (2))."""
        if is_linear(own):
            return backward
        exchange = self.exchange

        def summed(gradients: Sequence[Tensor]) -> list[Tensor]:
            with exchange.exchanging():
                whole = [
                    exchange.all_reduce(part) if part.is_floating_point() else part
                    for part in gradients
                ]
            computed = backward(whole)
            return computed if exchange.rank == 0 else [torch.zeros_like(part) for part in computed]

        return summed

    def around_ring(self, node: GraphNode, args: list[Any], keywords: dict[str, Any]) -> Any:
        """Attend between parts of the sequence, which only a ``ContextStage`` does."""
        raise AssertionError(
            f"{node.op} goes around a ring, but no device has a part of the sequence"
        )

    def compute(
        self, segment: StageSegment, held: dict[Any, Any], moment: Moment
    ) -> dict[Any, Any]:
        if moment.samples not in self.members:
            self.members[moment.samples] = self.member(moment.samples)
        return self.members[moment.samples].run(segment, held, moment)

    def member(self, samples: int) -> GroupMember:
        """Return the calls of this member for a number of samples."""
        return GroupMember(self, self.sharing.steps(samples))


def value_of(key: int | tuple[int, State]) -> int:
    """Return the value of a key, which is the value itself if it is whole, else a pair with its
    state."""
    return key if isinstance(key, int) else key[0]


class GroupMember:
    """The calls that one member of a group makes, for one number of samples."""

    def __init__(self, stage: TensorStage, steps: GroupSteps) -> None:
        self.stage, self.steps, self.exchange = stage, steps, stage.exchange
        self.calls = {
            index: LocalCall(
                graph=steps.graph,
                node=node,
                row=row,
                ratios=steps.ratios,
                rank=self.exchange.rank,
            )
            for index, node, row in zip(
                stage.part.operations, steps.graph.nodes, steps.rows, strict=True
            )
        }
        """Calls by operation."""
        part = stage.part
        loss = [] if steps.graph.loss is None else [steps.graph.loss]
        self.results = {*part.sends, *loss, *(after for _, after in part.updates)}

    def run(self, segment: StageSegment, held: dict[Any, Any], moment: Moment) -> dict[Any, Any]:
        """Run the operations of a segment; return the values that are read after it in all states
        that exist, and the results of the stage as it sends them."""
        have: dict[tuple[int, State], Tensor] = {
            key: tensor for key, tensor in held.items() if isinstance(key, tuple)
        }
        for value, tensor in held.items():
            if isinstance(value, int) and (value, REPLICATED) not in have:
                self.made(have, value, self.stage.sharing.stored.get(value, REPLICATED), tensor)
        for index in segment.operations:
            call = self.calls[index]
            made = self._call(index, have, moment)
            parts = self.stage.scaled(
                index, made if isinstance(made, (tuple, list)) else (made,), moment
            )
            for made_value, state, part in zip(
                call.node.outputs, call.row.outputs, parts, strict=True
            ):
                if made_value is not None:
                    self.made(have, made_value, state, part)
        return self.left(have, segment)

    def left(
        self, have: dict[tuple[int, State], Tensor], segment: StageSegment
    ) -> dict[Any, Tensor]:
        """Return the values that are read after a segment, and the results of the stage."""
        left: dict[Any, Tensor] = {
            key: tensor for key, tensor in have.items() if key[0] in segment.leaves
        }
        for value in self.results.intersection(segment.leaves):
            state = self.stage.sharing.handed.get(value, REPLICATED)
            if (value, state) in have:
                left[value] = have[value, state]
        return left

    def made(
        self, have: dict[tuple[int, State], Tensor], value: int, state: State, tensor: Tensor
    ) -> None:
        """Store a value as it was computed, and in the states to which collectives deliver it."""
        have[value, state] = tensor
        shape = self.steps.graph.values[value].shape
        for step, way in self.steps.collectives.get(value, ()):
            have[value, step.after] = converted(self.exchange, tensor, shape, step, way)

    def _take(self, have: dict[tuple[int, State], Tensor], value: int, state: State) -> Tensor:
        if (value, state) not in have:
            have[value, state] = taken(self.exchange, have[value, REPLICATED], state)
        return have[value, state]

    def local(self, index: int) -> str:
        """Return the name of the special implementation of an operation, if it has one."""
        return self.calls[index].row.local

    def whole_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of the first input of an operation, on all devices together."""
        return self.steps.graph.values[self.calls[index].node.inputs[0]].shape

    def drawn_here(self, index: int, positions: Tensor) -> Tensor:
        """Return the positions of the whole tensor for which this member draws numbers."""
        return self.exchange.take(positions, self.calls[index].row.outputs[0])

    def _call(self, index: int, have: dict[tuple[int, State], Tensor], moment: Moment) -> Any:
        call = self.calls[index]
        node, row, device = call.node, call.row, self.stage.device
        operands = iter(
            [
                self._take(have, value, state)
                for value, state in zip(node.inputs, row.inputs, strict=True)
            ]
        )
        args = [filled(part, lambda _: next(operands), device) for part in call.arguments]
        keywords = {
            key: filled(part, lambda _: next(operands), device) for key, part in node.keywords
        }
        if node.op in RANDOM:
            return self._drawn(index, args, moment)
        if node.op == OWN_GRADIENT:
            return self.stage.own_gradient(node, args, moment)
        if node.op == MODULE:
            return self.stage.through_module(node, args)
        if self.local(index) == BY_ROWS:
            look_up = lookup if node.op == EMBEDDING else picked_losses
            return look_up(call.rows, *args)
        if self.local(index) == BY_CLASSES:
            return normalised(self.exchange, *args)
        if self.local(index) == RING:
            return self.stage.around_ring(node, args, keywords)
        return apply(node.op, args, keywords, self._weight(call, have))

    def _weight(self, call: LocalCall, have: dict[tuple[int, State], Tensor]) -> Tensor | None:
        """Return this member's part of the weight whose transpose the last argument is, if it is
        stored in that state; else None."""
        last = call.node.arguments[-1] if call.node.arguments else None
        weight = self.stage.weight(last)
        if weight is None or not isinstance(last, Ref):
            return None
        transposed = self.steps.rows[self.steps.graph.producer[last.value]]
        (before,), (after,) = transposed.inputs, transposed.outputs
        is_direct = after == call.row.inputs[call.node.inputs.index(last.value)]
        return have.get((weight, before)) if is_direct else None

    def _drawn(self, index: int, args: list[Any], moment: Moment) -> Tensor:
        """Return this member's part of the random numbers of the whole tensor."""
        like, *others = args
        whole = torch.empty(self.whole_shape(index), dtype=like.dtype, device=like.device)
        return self.stage.drawn(
            self.calls[index].node,
            [whole, *others],
            moment,
            lambda positions: self.drawn_here(index, positions),
        )
