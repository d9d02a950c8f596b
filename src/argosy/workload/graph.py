"""A training step as a graph: every operation of forward and backward, on tensors with shapes and
no contents.

A ``Graph`` is what a captured program leaves behind once torch is gone: the planner reads it
without torch, the runtime turns it back into calls. Values are numbered; a node names the values
that it reads (as ``Ref`` inside its arguments) and those that it makes. The graph is functional:
nothing is written twice, views are copies, and what the step changes (gradients, buffers such as
running means) are values that it returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


@dataclass(frozen=True)
class Ref:
    """A value where an argument stands."""

    value: int


@dataclass(frozen=True)
class Symbol:
    """A torch constant where an argument stands: ``torch.float32``, or ``device`` for wherever the
    step runs."""

    text: str


Argument: TypeAlias = "Ref | Symbol | bool | int | float | str | tuple[Argument, ...] | None"


class Role(StrEnum):
    """Where a value comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"
    RECEIVED = "received"
    """Made by another stage of a pipeline."""
    RESULT = "result"


class Phase(StrEnum):
    """The half of the step in which an operation runs."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True)
class Value:
    """One tensor of the step."""

    name: str
    """A parameter's or buffer's path in the model, an input's place in the batch, or the node that
    makes it."""
    role: Role
    shape: tuple[int, ...]
    dtype: str
    """As torch calls it: ``float32``."""

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @cached_property
    def is_floating(self) -> bool:
        return "float" in self.dtype

    @cached_property
    def has_gradients(self) -> bool:
        """Whether a tensor of this dtype can be differentiated."""
        return self.is_floating or "complex" in self.dtype


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """One operation."""

    name: str
    op: str
    """An ATen overload: ``aten.mm.default``."""
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[int | None, ...]
    """Values that it makes; None where nobody reads one."""
    phase: Phase = Phase.FORWARD
    module: str = ""
    """Path of the module that ran it, such as ``transformer.h.3.mlp``; a backward carries its
    forward's."""
    source: str = ""
    """``file:line`` in the user's program, where it is known."""

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Values that it reads, in the order of its arguments, repeats included."""
        return tuple(references((self.arguments, tuple(value for _, value in self.keywords))))


OWN_GRADIENT = "argosy.own_gradient.default"
"""An operation that returns its first list of values, whose gradients are found by an
``OwnGradient``. Its arguments are (values, the inputs that get gradients, what the backward reads,
the number of the ``OwnGradient``)."""


@dataclass(frozen=True, kw_only=True)
class OwnGradient:
    """A backward that the program wrote itself, as a ``torch.autograd.Function``."""

    nodes: tuple[GraphNode, ...]
    given: tuple[int, ...]
    """Values that stand for the gradients of the results."""
    gradients: tuple[int, ...]
    """Of the inputs."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A forward, a loss and a backward, or one stage's part of them; the optimizer is not in it."""

    name: str
    values: tuple[Value, ...]
    nodes: tuple[GraphNode, ...]
    """In an order in which they can run."""
    loss: int | None
    """None for a stage that does not make it."""
    gradients: tuple[tuple[int, int], ...]
    """(parameter, its gradient); parameters that the loss does not depend on are absent."""
    updates: tuple[tuple[int, int], ...] = ()
    """(buffer, what it is after the step)."""
    constants: tuple[tuple[int, Argument], ...] = ()
    """(value, its elements as nested tuples)."""
    sent: tuple[int, ...] = ()
    """Values that other stages read."""
    own_gradients: tuple[OwnGradient, ...] = ()
    """Of a forward alone, whose other operations torch differentiates."""

    def with_role(self, role: Role) -> tuple[int, ...]:
        return tuple(index for index, value in enumerate(self.values) if value.role is role)

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        return self.with_role(Role.PARAMETER)

    @cached_property
    def trained(self) -> frozenset[int]:
        """Parameters that have a gradient; of a step, the others are frozen or unused."""
        return frozenset(parameter for parameter, _ in self.gradients)

    @cached_property
    def producer(self) -> dict[int, int]:
        """Per made value, the index of its node."""
        return {
            value: index
            for index, node in enumerate(self.nodes)
            for value in node.outputs
            if value is not None
        }

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Per value, the indices of the nodes that read it, each once."""
        found: list[dict[int, None]] = [{} for _ in self.values]
        for index, node in enumerate(self.nodes):
            for value in node.inputs:
                found[value][index] = None
        return tuple(tuple(nodes) for nodes in found)

    @cached_property
    def kept(self) -> frozenset[int]:
        """Values that a forward makes and the backward reads: what a step holds in memory besides
        the model."""
        forward = {
            value for node in self.nodes if node.phase is Phase.FORWARD for value in node.outputs
        }
        read = {
            value for node in self.nodes if node.phase is Phase.FORWARD for value in node.inputs
        }
        forward |= read & set(self.with_role(Role.RECEIVED))
        backward = {
            value for node in self.nodes if node.phase is Phase.BACKWARD for value in node.inputs
        }
        return frozenset(value for value in forward & backward if value is not None)

    def num_parameters(self) -> int:
        return sum(self.values[index].elements for index in self.parameters)

    def __repr__(self) -> str:
        forward = sum(node.phase is Phase.FORWARD for node in self.nodes)
        size = f"{self.num_parameters():,} parameters"
        return f"{self.name}: {forward} forward and {len(self.nodes) - forward} backward operations, {size}"


def references(argument: Argument) -> Iterator[int]:
    """Values that an argument names, in order.

    >>> list(references((Ref(3), (Ref(1), 2.0), None)))
    [3, 1]
    """
    if isinstance(argument, Ref):
        yield argument.value
    elif isinstance(argument, tuple):
        for part in argument:
            yield from references(part)
