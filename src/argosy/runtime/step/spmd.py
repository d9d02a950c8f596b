"""A distributed program on real devices: one fx module per rank, with parameters that exist in
shards only.

``lower`` writes a rank's half of the program: every operation on its shards by the row that was
chosen, every collective where a value is made, every slice where it is first taken. The captured
graph already holds the backward, so nothing here differentiates. ``Trainer`` holds the shards and
runs steps; optimizers see local tensors, which is exact for all that work element by element (SGD,
Adam, AdamW and their like).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from argosy.cost.group import GroupCollective
from argosy.errors import InputError, Problem
from argosy.runtime.communication.collectives import GatherBy, Group
from argosy.runtime.communication.exchange import GroupExchange
from argosy.runtime.graphs.calls import filled, tensor_constants
from argosy.runtime.graphs.local import LocalCall, MaskClock
from argosy.runtime.processes.world import device_of, join
from argosy.runtime.sources.optimizing import OptimizerFactory, make_updating
from argosy.solve.programs.spmd import Program
from argosy.space.operations.sharding import REPLICATED, State
from argosy.workload.capture.initial import FakeModel
from argosy.workload.graph import Role


class _Lowering:
    """One rank's graph under construction."""

    def __init__(
        self, program: Program, exchange: GroupExchange, clock: MaskClock, device: torch.device
    ) -> None:
        self.program, self.exchange, self.clock, self.device = program, exchange, clock, device
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.have: dict[tuple[int, State], fx.Node] = {}
        self.moves: dict[int, list[Any]] = {}
        for move in program.moves:
            if move.step.kind is not GroupCollective.SLICE:
                self.moves.setdefault(move.value, []).append(move)

    def module(self) -> fx.GraphModule:
        self._add_given()
        for index in range(len(self.program.graph.nodes)):
            self._add_operation(index)
        whole = self.program.graph
        gradients = tuple(self._in_stored_state(p, g) for p, g in whole.gradients)
        updates = tuple(self._take(after, REPLICATED) for _, after in whole.updates)
        assert whole.loss is not None
        self.graph.output((self._take(whole.loss, REPLICATED), gradients, updates))
        return fx.GraphModule(self.root, self.graph)

    def _in_stored_state(self, parameter: int, gradient: int) -> fx.Node:
        stored = self.program.deliveries[parameter].stored
        assert stored is not None
        return self._take(gradient, stored)

    def _add_given(self) -> None:
        """Parameters as stored; buffers, inputs and constants whole."""
        constants = tensor_constants(self.program.graph, self.device)
        for value, described in enumerate(self.program.graph.values):
            if described.role is Role.RESULT:
                continue
            stored = self.program.deliveries[value].stored or REPLICATED
            if described.role is Role.CONSTANT:
                name = f"constant_{value}"
                self.root.register_buffer(name, constants[value])
                node = self.graph.get_attr(name)
            else:
                node = self.graph.placeholder(f"{described.role}_{value}")
            self._made(value, stored, node)

    def _made(self, value: int, state: State, node: fx.Node) -> None:
        """A value in the state it was made in, and what its delivery adds."""
        self.have[value, state] = node
        shape = self.program.graph.values[value].shape
        for move in self.moves.get(value, ()):
            step, way = move.step, move.way
            call = _named(
                step.kind, partial(self.exchange.convert, shape=shape, step=step, way=way)
            )
            self.have[value, step.after] = self.graph.call_function(call, (node,))

    def _take(self, value: int, state: State) -> fx.Node:
        """A value in the state that somebody needs: had, or a slice of the whole."""
        if (value, state) not in self.have:
            whole = self.have[value, REPLICATED]
            call = _named("slice", lambda tensor: self.exchange.take(tensor, state))
            self.have[value, state] = self.graph.call_function(call, (whole,))
        return self.have[value, state]

    def _add_operation(self, index: int) -> None:
        node, row = self.program.graph.nodes[index], self.program.rows[index]
        call = LocalCall(
            graph=self.program.graph,
            node=node,
            row=row,
            ratios=self.program.segments.ratios[self.program.segments.at(index)],
            rank=self.exchange.rank,
            clock=self.clock,
        )
        operands = iter(
            [self._take(value, state) for value, state in zip(node.inputs, row.inputs, strict=True)]
        )
        arguments = tuple(
            filled(part, lambda _: next(operands), self.device) for part in call.arguments
        )
        keywords = {
            key: filled(part, lambda _: next(operands), self.device) for key, part in node.keywords
        }
        made = self.graph.call_function(_named(node.name, call.run), arguments, keywords)
        several = len(node.outputs) > 1
        for place, value in enumerate(node.outputs):
            if value is not None:
                part = self.graph.call_function(_item, (made, place)) if several else made
                self._made(value, row.outputs[place], part)


def _item(parts: Sequence[Tensor], place: int) -> Tensor:
    return parts[place]


def _named(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function around a call, named so that the module's code reads well."""
    if isinstance(call, torch._ops.OpOverload):
        return call

    def run(*arguments: Any, **keywords: Any) -> Any:
        return call(*arguments, **keywords)

    run.__name__ = run.__qualname__ = str(name).replace("-", "_")
    return run


def lower(
    program: Program, exchange: GroupExchange, *, clock: MaskClock, device: torch.device
) -> fx.GraphModule:
    """A rank's program: (parameters, buffers, inputs) -> (loss, gradients, changed buffers), all in
    local shapes."""
    return _Lowering(program, exchange, clock, device).module()


def parallelize_program(
    model: nn.Module, optimizer: OptimizerFactory, batch: Any, program: Program
) -> Trainer:
    """A trainer for this rank of a program, from the model that was captured; every rank gets rank
    0's values.

    The loss is in the program. Only this rank's shards are kept of the model's tensors.
    """
    roster = program.group.names
    join(None, roster)
    device = device_of(roster, dist.get_rank())
    _check_captured(model, batch, program)
    return Trainer(program, _from_first_rank(model, device), optimizer=optimizer, device=device)


def _check_captured(model: nn.Module, batch: Any, program: Program) -> None:
    """An ``InputError`` where a model or a batch is not what was captured."""
    tensors = [
        (name, tuple(t.shape)) for name, t in [*model.named_parameters(), *model.named_buffers()]
    ]
    tensors += [
        (keystr(path), tuple(leaf.shape))
        for path, leaf in tree_flatten_with_path(batch)[0]
        if _is_tensor(leaf)
    ]
    given, wrong = dict(tensors), []
    for value in program.graph.values:
        if (
            value.role in (Role.PARAMETER, Role.BUFFER, Role.INPUT)
            and given.get(value.name) != value.shape
        ):
            found = f"shape {given[value.name]}" if value.name in given else "none"
            wrong.append(
                Problem(
                    path=f"{value.role} {value.name}", found=found, expected=f"shape {value.shape}"
                )
            )
    if wrong:
        raise InputError(wrong)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _from_first_rank(model: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, one at a time, as rank 0 has them."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = tensor.detach().to(device).contiguous()
        dist.broadcast(whole, 0)
        yield name, whole


class Trainer:
    """Trains a captured program on this rank's share of it."""

    def __init__(
        self,
        program: Program,
        named: Iterable[tuple[str, Tensor]],
        *,
        optimizer: OptimizerFactory,
        group: Group = None,
        device: torch.device | None = None,
        seed: int = 0,
    ) -> None:
        """``named`` yields parameters and buffers whole, one at a time; only shards of them are
        kept."""
        self.program, self.device = program, device or torch.device("cpu")
        self.exchange = GroupExchange(program.segments, group)
        self.clock = MaskClock(seed=seed)
        self.module = lower(program, self.exchange, clock=self.clock, device=self.device)
        self.held = self._shards(named)
        graph = program.graph
        self.parameters = [self.held[value] for value in graph.parameters]
        named = [(graph.values[value].name, self.held[value]) for value in graph.parameters]
        trained = [(name, held) for name, held in named if isinstance(held, nn.Parameter)]
        self.updating = make_updating(optimizer, None, trained, 0)
        self.optimizer = self.updating.optimizer

    @classmethod
    def from_build(
        cls, program: Program, fake: FakeModel, *, seed: int = 0, **options: Any
    ) -> Trainer:
        """With the initial values of ``build_fake(build, seed=seed)``, those of a plain build after
        that seed."""
        return cls(program, fake.values(), seed=seed, **options)

    def _shards(self, named: Iterable[tuple[str, Tensor]]) -> dict[int, Tensor]:
        values = self.program.graph.values
        given = (Role.PARAMETER, Role.BUFFER)
        index = {value.name: place for place, value in enumerate(values) if value.role in given}
        held: dict[int, Tensor] = {}
        for name, whole in named:
            if name in index:
                place = index[name]
                stored = self.program.deliveries[place].stored or REPLICATED
                part = self.exchange.take(whole.detach(), stored)
                own = part.clone(memory_format=torch.contiguous_format).to(self.device)
                trains = values[place].role is Role.PARAMETER and own.is_floating_point()
                held[place] = nn.Parameter(own) if trains else own
        return held

    def step(self, batch: Any) -> float:
        """One step on a global batch: the loss before it."""
        loss = self.backward(batch)
        if self.optimizer is not None:
            self.optimizer.step()
        self.updating.after_step()
        self.clock.step += 1
        return loss

    def backward(self, batch: Any) -> float:
        """Loss and gradients, without the update."""
        graph = self.program.graph
        leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(batch)[0]}
        given = []
        for place, value in enumerate(graph.values):
            if value.role is Role.INPUT:
                given.append(leaves[value.name].to(self.device))
            elif value.role in (Role.PARAMETER, Role.BUFFER):
                given.append(self.held[place])
        with torch.no_grad():
            loss, gradients, updates = self.module(*given)
        for (parameter, _), gradient in zip(graph.gradients, gradients, strict=True):
            self.held[parameter].grad = gradient
        for (buffer, _), after in zip(graph.updates, updates, strict=True):
            self.held[buffer] = after
        return float(loss)

    def whole(self, place: int, tensor: Tensor) -> Tensor:
        """A parameter's tensor (itself, or its gradient) gathered from its shards; every rank must
        call it."""
        stored = self.program.deliveries[place].stored
        if stored is None or not stored.is_sharded or len(self.program.ratios) == 1:
            return tensor
        return self.exchange.all_gather(
            tensor, self.program.graph.values[place].shape, stored, GatherBy.ALL_TO_ALL
        )
