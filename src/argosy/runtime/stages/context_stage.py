"""Run a stage whose replicas divide the sequence: every device runs all layers on its own tokens
(``solve.programs.sequence``).

Weights are replicated on every device. Neighbouring stages that divide the sequence equally send
parts; all others send whole values, of which a device of this stage takes its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from argosy.errors import invalid
from argosy.plan.plan import Plan, Replica, Stage
from argosy.runtime.communication.collectives import GatherBy, Group
from argosy.runtime.communication.exchange import GroupExchange
from argosy.runtime.communication.marks import Exchanging
from argosy.runtime.graphs.cut import GraphCut
from argosy.runtime.processes.ranks import parts_of
from argosy.runtime.stages.ring import SequenceRing, Setting, ring_attention
from argosy.runtime.stages.tensor_stage import TensorStage, stage_graph
from argosy.solve.programs.recorded import GroupSteps
from argosy.solve.programs.sequence import SequenceStates, repeated_heads, sequence_length
from argosy.space.operations.sequence import SequenceParts
from argosy.space.operations.sharding import State
from argosy.workload.graph import Graph, GraphNode


@dataclass(frozen=True)
class SequenceSharing:
    """A description of how one replica of a stage divides its sequence."""

    cut: GraphCut
    index: int
    parts: SequenceParts
    total: int
    """Samples of the global batch."""
    arrives: bool
    """True if the previous stage sends parts."""
    hands_on: bool
    """True if the next stage receives parts."""
    _steps: dict[int, GroupSteps] = field(default_factory=dict, compare=False)

    @property
    def ratios(self) -> tuple[float, ...]:
        return self.parts.ratios

    @property
    def stored(self) -> Mapping[int, State]:
        """Return the states of values that arrive; weights are replicated."""
        return self._cut(self.cut.parts[self.index].receives if self.arrives else ())

    @property
    def handed(self) -> Mapping[int, State]:
        """Return the states of values that are sent on."""
        return self._cut(self.cut.parts[self.index].sends if self.hands_on else ())

    def _cut(self, values: tuple[int, ...]) -> dict[int, State]:
        states = self.states
        return {value: states.states[value] for value in values if value in states.cut_values}

    @cached_property
    def states(self) -> SequenceStates:
        """Return the states at some number of samples; the dim along which a value is cut does not
        depend on that number."""
        return self._states_at(2)

    def _states_at(self, samples: int) -> SequenceStates:
        return sequence_states(self.cut, self.parts.length, samples, self.total)

    def steps(self, samples: int) -> GroupSteps:
        """Return the steps that the devices run for a number of samples."""
        if samples not in self._steps:
            part = self.cut.parts[self.index]
            graph = stage_graph(self.cut, self.index, samples, self.total)
            loss = () if graph.loss is None else (graph.loss,)
            whole = {*part.sends, *loss, *(after for _, after in part.updates)} - self.handed.keys()
            self._steps[samples] = self._states_at(samples).stage(
                graph, part.operations, ratios=self.ratios, received=self.stored, whole=whole
            )
        return self._steps[samples]


def sequence_states(cut: GraphCut, length: int, samples: int, total: int) -> SequenceStates:
    """Return the states of a forward on parts of its sequence, for ``samples`` of ``total``."""
    forward, graph = cut.forward, cut.graph
    values = tuple(
        replace(value, shape=forward.shape(at, samples)) for at, value in enumerate(graph.values)
    )
    whole = Graph(
        name=graph.name,
        values=values,
        nodes=forward.nodes(samples, total),
        loss=graph.loss,
        gradients=(),
        constants=graph.constants,
        own_gradients=graph.own_gradients,
    )
    sample_dims = {value: place.dim for value, place in cut.places.items()}
    return SequenceStates(whole, length, sample_dims)


class SequenceExchange(GroupExchange):
    """An exchange between parts of a sequence, whose tokens are not in the order of the devices."""

    def __init__(self, parts: SequenceParts, group: Group, exchanging: Exchanging) -> None:
        super().__init__(parts.ratios, group, exchanging)
        self.parts = parts
        order = torch.tensor(parts.order)
        self._order, self._places = order, order.argsort()
        begin = sum(parts.counts[: self.rank])
        self._own = order[begin : begin + parts.counts[self.rank]]

    def take(self, whole: Tensor, state: State) -> Tensor:
        return (
            _selected(whole, state, self._own) if state.is_sharded else super().take(whole, state)
        )

    def all_gather(
        self, part: Tensor, shape: tuple[int, ...], state: State, by: GatherBy
    ) -> Tensor:
        return _selected(super().all_gather(part, shape, state, by), state, self._places)

    def reduce_scatter(self, part: Tensor, state: State) -> Tensor:
        return super().reduce_scatter(_selected(part, state, self._order), state)


def _selected(whole: Tensor, state: State, tokens: Tensor) -> Tensor:
    opened: Tensor = whole.unflatten(state.dim, (state.outer, state.units, -1))
    return opened.index_select(state.dim + 1, tokens.to(whole.device)).flatten(
        state.dim, state.dim + 2
    )


class ContextStage(TensorStage):
    """A stage that computes one device's tokens."""

    @property
    def column(self) -> SequenceExchange:
        """Return the exchange between the parts of the sequence."""
        assert isinstance(self.exchange, SequenceExchange)
        return self.exchange

    @cached_property
    def ring(self) -> SequenceRing:
        exchange = self.column
        return SequenceRing(exchange.parts, exchange.group, exchange.rank, exchange.exchanging)

    def origin(self, value: int) -> int:
        """Return the number that a value of a call has in the stage."""
        return value

    def around_ring(self, node: GraphNode, args: list[Any], keywords: dict[str, Any]) -> Any:
        q, k, v = args[:3]
        causal = len(args) > 4 and args[4]
        heads = [self.origin(value) for value in node.inputs[1:3]]
        groups = min(repeated_heads(self.cut.graph, value) for value in heads)
        setting = Setting(bool(causal), keywords.get("scale"), groups)
        return ring_attention(q, k, v, keywords.get("attn_mask"), self.ring, setting), None


def sequence_sharing(
    cut: GraphCut, plan: Plan, index: int, replica: Replica, roster: Sequence[str]
) -> SequenceSharing:
    """Return how a replica runs a stage that divides the sequence; raise an ``InputError`` if the
    program's sequence cannot be divided."""
    shares = _shares(plan, plan.stages[index], replica, roster)
    length = sequence_length(cut.graph)
    if length < 2 * len(shares):
        actual = f"{length} tokens"
        expected = f"{2 * len(shares)} at least, two for each of {len(shares)} parts"
        raise invalid(f"stages[{index}].context", actual, expected)
    parts = SequenceParts.by_shares(length, shares)
    keeps_parts = [_have_equal_parts(plan, at, roster) for at in (index - 1, index)]
    sharing = SequenceSharing(
        cut, index, parts, plan.global_batch, arrives=keeps_parts[0], hands_on=keeps_parts[1]
    )
    if not sharing.states.has_ring:
        actual = "no attention whose queries, keys and values have their tokens in one dim"
        expected = (
            "scaled_dot_product_attention over the sequence of the batch, to cut it into parts"
        )
        raise invalid("model", actual, expected)
    return sharing


def _shares(plan: Plan, stage: Stage, replica: Replica, roster: Sequence[str]) -> tuple[float, ...]:
    parts = parts_of(plan, stage, replica, roster)
    return tuple(math.fsum(share for _, share in part) for part in parts)


def _have_equal_parts(plan: Plan, index: int, roster: Sequence[str]) -> bool:
    """Return whether all replicas of a stage and of the next divide the sequence into the same
    parts, on one device each."""
    if not 0 <= index < len(plan.stages) - 1:
        return False
    pair = plan.stages[index : index + 2]
    shares = {_shares(plan, stage, replica, roster) for stage in pair for replica in stage.replicas}
    return len(shares) == 1 and all(stage.context > 1 and stage.parts_are_alone for stage in pair)
