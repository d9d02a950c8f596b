"""Represent a training step as a graph: every operation of forward and backward, on tensors with
shapes and no contents.

A ``Graph`` represents a captured program without torch: the planner reads it without torch, and the
runtime turns it back into calls. Values are numbered; a node names the values that it reads (as
``Ref`` inside its arguments) and those that it makes. The graph is functional: nothing is written
twice, views are copies, and everything the step changes (gradients, buffers such as running means)
is a value that it returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias

# Bytes of an element, by torch's name of the dtype.
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
    """A reference that names a value in place of an argument."""

    value: int


@dataclass(frozen=True)
class Symbol:
    """A torch constant that is an argument: ``torch.float32``, or ``device`` for the device of the
    step."""

    text: str


# An argument of an operation.
Argument: TypeAlias = "Ref | Symbol | bool | int | float | str | tuple[Argument, ...] | None"


class Role(StrEnum):
    """A role of a value, which is its origin."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"
    RESULT = "result"


class Phase(StrEnum):
    """A half of the step in which an operation runs."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor that occurs in the step."""

    name: str
    """Path of a parameter or buffer in the model, place of an input in the batch, or name of the
    node that makes it."""
    role: Role
    shape: tuple[int, ...]
    dtype: str
    """Torch's name: ``float32``."""

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
        """Return whether a tensor of this dtype can be differentiated."""
        return self.is_floating or "complex" in self.dtype


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """An operation that is a node of the graph."""

    name: str
    op: str
    """An ATen overload: ``aten.mm.default``."""
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[int | None, ...]
    """Values that it makes; None for a value that nothing reads."""
    phase: Phase = Phase.FORWARD
    module: str = ""
    """Path of the module that ran it, such as ``transformer.h.3.mlp``; a backward has that of its
    forward."""
    source: str = ""
    """``file:line`` in the user's program, if known."""

    @property
    def num_experts(self) -> int:
        """Return the number of experts that the parameters of a called module hold; 0 for every
        other operation."""
        return int(self.arguments[-1]) if self.op == MODULE else 0  # type: ignore[arg-type]

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Return the values that it reads, in the order of its arguments, including repeats."""
        return tuple(references((self.arguments, tuple(value for _, value in self.keywords))))


MODULE = "argosy.module.default"
"""An operation that calls a module whose operations depend on data. Its arguments are the tensors
that the module is given, its parameters and buffers, the form of its call, its FLOP and the shapes
of its results, the labels of the dims along which it may be cut, and the number of experts that its
parameters hold (0 if it is called as a whole)."""
MODULE_BACKWARD = "argosy.module_backward.default"
"""The backward of such a call. Its arguments are the gradients of the results, what the module was
given, holds and kept, and FLOP, labels and experts as above."""
OWN_GRADIENT = "argosy.own_gradient.default"
"""An operation that returns its first list of values, whose gradients an ``OwnGradient`` computes.
Its arguments are the values, the inputs that get gradients, the values that the backward reads, and
the number of the ``OwnGradient``."""


@dataclass(frozen=True, kw_only=True)
class OwnGradient:
    """A backward that the program wrote itself, as a ``torch.autograd.Function``."""

    nodes: tuple[GraphNode, ...]
    given: tuple[int, ...]
    """Values that stand for the gradients of the results."""
    gradients: tuple[int, ...]
    """Gradients of the inputs."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A graph that holds a forward, a loss and a backward, or one stage's part of them, but not the
    optimizer."""

    name: str
    values: tuple[Value, ...]
    nodes: tuple[GraphNode, ...]
    """Nodes in an order in which they can run."""
    loss: int | None
    """Value of the loss; None for a stage that does not make it."""
    gradients: tuple[tuple[int, int], ...]
    """Pairs of a parameter and its gradient; parameters that the loss does not depend on are
    absent."""
    updates: tuple[tuple[int, int], ...] = ()
    """Pairs of a buffer and its value after the step."""
    constants: tuple[tuple[int, Argument], ...] = ()
    """Pairs of a value and its elements as nested tuples."""
    sent: tuple[int, ...] = ()
    """Values that other stages read."""
    own_gradients: tuple[OwnGradient, ...] = ()
    """Backwards that the program wrote itself, in a forward alone whose other operations torch
    differentiates."""

    def with_role(self, role: Role) -> tuple[int, ...]:
        return tuple(index for index, value in enumerate(self.values) if value.role is role)

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        return self.with_role(Role.PARAMETER)

    @cached_property
    def trained(self) -> frozenset[int]:
        """Return the parameters that have a gradient; the others are frozen or unused."""
        return frozenset(parameter for parameter, _ in self.gradients)

    @cached_property
    def producer(self) -> dict[int, int]:
        """Return the index of the node that makes each value."""
        return {
            value: index
            for index, node in enumerate(self.nodes)
            for value in node.outputs
            if value is not None
        }

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Return, per value, the indices of the nodes that read it, each once."""
        readers: list[dict[int, None]] = [{} for _ in self.values]
        for index, node in enumerate(self.nodes):
            for value in node.inputs:
                readers[value][index] = None
        return tuple(tuple(nodes) for nodes in readers)

    @cached_property
    def kept(self) -> frozenset[int]:
        """Return the values that a forward makes and the backward reads: they occupy memory besides
        the model."""
        forward = {
            value for node in self.nodes if node.phase is Phase.FORWARD for value in node.outputs
        }
        backward = {
            value for node in self.nodes if node.phase is Phase.BACKWARD for value in node.inputs
        }
        return frozenset(value for value in forward & backward if value is not None)

    @cached_property
    def fewest_experts(self) -> int | None:
        """Return the least number of experts of a module whose experts devices can share; None
        without such a module."""
        return min((node.num_experts for node in self.nodes if node.num_experts), default=None)

    def num_parameters(self) -> int:
        return sum(self.values[index].elements for index in self.parameters)

    def __repr__(self) -> str:
        forward = sum(node.phase is Phase.FORWARD for node in self.nodes)
        size = f"{self.num_parameters():,} parameters"
        backward = len(self.nodes) - forward
        return f"{self.name}: {forward} forward and {backward} backward operations, {size}"


def references(argument: Argument) -> Iterator[int]:
    """Yield the values that an argument names, in order.

    >>> list(references((Ref(3), (Ref(1), 2.0), None)))
    [3, 1]
    """
    if isinstance(argument, Ref):
        yield argument.value
    elif isinstance(argument, tuple):
        for part in argument:
            yield from references(part)
