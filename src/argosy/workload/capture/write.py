"""Write a traced step as plain data: convert an fx graph to a ``Graph``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from argosy.errors import InputError, invalid
from argosy.workload.capture.blame import stack_line
from argosy.workload.graph import (
    OWN_GRADIENT,
    Argument,
    Graph,
    GraphNode,
    OwnGradient,
    Phase,
    Ref,
    Role,
    Symbol,
    Value,
)

NOTHING = {
    "aten.detach.default",
    "aten.alias.default",
    "aten.clone.default",
    "aten.lift_fresh_copy.default",
    "aten.contiguous.default",
}
"""Operations that are the identity in a graph without writes."""
VIEWS = {"aten.view.default", "aten._unsafe_view.default"}
"""Operations that are the identity if they keep the shape. Strides decide whether torch adds such a
view, and convolutions choose strides by the number of samples."""
# The operation that stops gradients.
DETACH = "aten.detach.default"

FILLED = {
    "aten.zeros.default": 0,
    "aten.zeros_like.default": 0,
    "aten.new_zeros.default": 0,
    "aten.ones.default": 1,
    "aten.ones_like.default": 1,
    "aten.new_ones.default": 1,
    "aten.empty.memory_format": 0,
    "aten.empty_like.default": 0,
    "aten.full_like.default": None,
    "aten.full.default": None,
}
"""Operations that make a tensor of one number, with that number; None if it is an argument."""


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """A list of the values that a step is a function of."""

    names: tuple[tuple[str, Role], ...]
    """Parameters, then buffers, then inputs."""
    trains: tuple[bool, ...]
    """Whether each parameter is trained."""
    num_buffers: int


class GraphWriter:
    """A writer that converts an fx graph to plain data."""

    def __init__(
        self,
        name: str,
        traced: fx.GraphModule,
        given: StepInputs,
        modules: dict[str, str],
        stopped: set[tuple[str, str]] | None,
    ) -> None:
        """Create a writer; ``stopped`` has the pairs (reader, read) without gradients of a forward
        alone, which are then written down."""
        self.name, self.traced, self.given, self.modules, self.stopped = (
            name,
            traced,
            given,
            modules,
            stopped,
        )
        self.names = iter(given.names)
        self.values: list[Value] = []
        self.nodes: list[GraphNode] = []
        self.constants: list[tuple[int, Argument]] = []
        self.own_gradients: list[OwnGradient] = []
        self.index: dict[fx.Node, int] = {}
        self.parts: dict[tuple[fx.Node, int], int] = {}
        self.carrying: set[int] = {value for value, trains in enumerate(given.trains) if trains}
        """Values through which gradients reach parameters."""
        self.detached: dict[int, int] = {}

    def graph(self) -> Graph:
        """Convert the traced step to a ``Graph``."""
        for node in self.traced.graph.nodes:
            self._add(node)
        (output,) = (node for node in self.traced.graph.nodes if node.op == "output")
        loss, *rest = output.args[0]
        count = len(self.given.trains)
        grads, after = rest[:count], rest[count:]
        gradients = [(i, self.index[g]) for i, g in enumerate(grads) if g is not None]
        updates = [(i, self.index[value]) for i, value in enumerate(after)]
        changed = tuple((before, value) for before, value in updates if before != value)
        self._check_changed(changed)
        return finish(
            Graph(
                name=self.name,
                values=tuple(self.values),
                nodes=tuple(self.nodes),
                loss=self.index[loss],
                gradients=tuple(gradients),
                updates=changed,
                constants=tuple(self.constants),
                own_gradients=tuple(self.own_gradients),
            )
        )

    def _check_changed(self, changed: Sequence[tuple[int, int]]) -> None:
        for value, _ in changed:
            if value < len(self.given.trains) and self.given.trains[value]:
                actual = f"a change of the parameter {self.values[value].name}, which is trained"
                expected, suggestion = (
                    "changes by the optimizer alone",
                    "change a copy that is not trained, or a buffer",
                )
                raise invalid("loss", actual, expected, suggestion=suggestion)

    def _add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            name, role = next(self.names)
            self.index[node] = self._value(name, role, node.meta["val"])
        elif node.op == "get_attr":
            tensor = getattr(self.traced, str(node.target))
            if isinstance(tensor, FakeTensor):
                raise _kept(tensor)
            self.index[node] = self._value(str(node.target), Role.CONSTANT, tensor)
            self.constants.append((self.index[node], _nested(tensor.tolist())))
        elif node.op == "call_function":
            self._add_call(node)

    def _add_call(self, node: fx.Node) -> None:
        target = str(node.target)
        if node.target is operator.getitem:
            source, part = node.args
            self.index[node] = self.parts[source, part]  # type: ignore[index]
        elif target == OWN_GRADIENT:
            self._add_own_gradient(node)
        elif target in FILLED:
            self._add_filled(node, FILLED[target])
        elif target in NOTHING or (target in VIEWS and _keeps_shape(node)):
            self.index[node] = self.index[node.args[0]]  # type: ignore[index]
        else:
            self._add_operation(node, target)

    def _add_filled(self, node: fx.Node, fill: int | None) -> None:
        """Add a new tensor of one number, which needs no other tensor, only a shape."""
        made = node.meta["val"]
        number = node.args[1] if fill is None else fill
        self.index[node] = self._value(node.name, Role.RESULT, made)
        keywords = (("dtype", Symbol(str(made.dtype))), ("device", Symbol("device")))
        arguments = (tuple(int(size) for size in made.shape), self._argument(node, number))
        self._append(node, "aten.full.default", arguments, keywords, (self.index[node],))

    def _add_operation(self, node: fx.Node, target: str) -> None:
        made = node.meta["val"]
        source = stack_line(node.meta.get("stack_trace"))
        known = target.startswith("argosy.") or "scaled_dot_product" in target
        tags = node.target.tags  # type: ignore[union-attr]
        if not known and torch.Tag.nondeterministic_seeded in tags:
            actual, suggestion = (
                f"{target}, which draws random numbers",
                "write it with torch.rand or torch.randn",
            )
            expected = "random numbers that are equal under every plan"
            raise invalid(source or self.name, actual, expected, suggestion=suggestion)
        arguments = tuple(self._argument(node, part) for part in node.args)
        keywords = tuple((key, self._argument(node, part)) for key, part in node.kwargs.items())
        if isinstance(made, (tuple, list)):
            outputs = []
            read = {user.args[1] for user in node.users if user.target is operator.getitem}
            for part, tensor in enumerate(made):
                if part in read and tensor is not None:
                    self.parts[node, part] = self._value(f"{node.name}.{part}", Role.RESULT, tensor)
                outputs.append(self.parts.get((node, part)))
        else:
            self.index[node] = self._value(node.name, Role.RESULT, made)
            outputs = [self.index[node]]
        self._append(node, target, arguments, keywords, tuple(outputs))

    def _append(
        self, made: fx.Node, op: str, arguments: Any, keywords: Any, outputs: tuple[int | None, ...]
    ) -> None:
        node = GraphNode(
            name=made.name,
            op=op,
            arguments=arguments,
            keywords=keywords,
            outputs=outputs,
            module=self.modules.get(made.name, ""),
            source=stack_line(made.meta.get("stack_trace")),
        )
        self.nodes.append(node)
        if not self.carrying.isdisjoint(node.inputs):
            self.carrying.update(
                v for v in outputs if v is not None and self.values[v].has_gradients
            )

    def _add_own_gradient(self, node: fx.Node) -> None:
        """Turn the operations since the given gradients into a backward, and read from it what it
        belongs to."""
        marked: tuple[Any, ...] = node.args
        results, inputs, given, gradients = marked
        first = self.index[given[0]]
        start = next(at for at, made in enumerate(self.nodes) if first in made.outputs)
        inside = self.nodes[start:]
        del self.nodes[start:]
        made = {value for part in inside for value in part.outputs}
        self.detached = {value: copy for value, copy in self.detached.items() if copy not in made}
        stand_ins = tuple(self.index[part] for part in given)
        backward = tuple(part for part in inside if part.outputs[0] not in stand_ins)
        saved = dict.fromkeys(
            value for part in backward for value in part.inputs if value not in made
        )
        gradient_values = tuple(self.index[part] for part in gradients)
        own = OwnGradient(nodes=backward, given=stand_ins, gradients=gradient_values)
        self.own_gradients.append(own)
        outputs = [
            self._value(f"{part.name}_own", Role.RESULT, part.meta["val"]) for part in results
        ]
        arguments = (
            tuple(Ref(self.index[part]) for part in results),
            tuple(Ref(self.index[part]) for part in inputs),
            tuple(Ref(value) for value in saved),
            len(self.own_gradients) - 1,
        )
        self._append(node, OWN_GRADIENT, arguments, (), tuple(outputs))
        self.index.update(zip(results, outputs, strict=True))
        self.carrying.update(value for value in outputs if self.values[value].has_gradients)

    def _value(self, name: str, role: Role, tensor: Tensor) -> int:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.values.append(
            Value(name=name, role=role, shape=tuple(int(s) for s in tensor.shape), dtype=dtype)
        )
        return len(self.values) - 1

    def _read(self, reader: fx.Node, read: Any) -> int:
        """Return the value that an operation reads, detached if the operation passes no gradients
        on to it."""
        value = self.index[read]
        if (
            self.stopped is None
            or value not in self.carrying
            or (reader.name, read.name) not in self.stopped
        ):
            return value
        if value not in self.detached:
            copy = replace(
                self.values[value], name=f"{self.values[value].name}_detached", role=Role.RESULT
            )
            self.values.append(copy)
            self.detached[value] = len(self.values) - 1
            self.nodes.append(
                GraphNode(
                    name=copy.name,
                    op=DETACH,
                    arguments=(Ref(value),),
                    outputs=(len(self.values) - 1,),
                )
            )
        return self.detached[value]

    def _argument(self, reader: fx.Node, part: Any) -> Argument:
        if isinstance(part, fx.Node):
            return Ref(self._read(reader, part))
        if isinstance(part, (list, tuple)):
            return tuple(self._argument(reader, inner) for inner in part)
        if isinstance(part, torch.device):
            return Symbol("device")
        if isinstance(part, (torch.dtype, torch.layout, torch.memory_format)):
            return Symbol(str(part))
        if part is None or isinstance(part, (bool, int, float, str)):
            return part
        where = stack_line(reader.meta.get("stack_trace")) or reader.name
        actual = f"{type(part).__name__} given to {reader.target}"
        raise invalid(where, actual, "numbers, texts and tensors")


def _kept(tensor: Tensor) -> InputError:
    """Return the error for a tensor that the program made in one call and read in a later one."""
    return invalid(
        "loss",
        f"a tensor of shape {list(tensor.shape)} that an earlier call of the loss has made",
        "no tensors that outlast the step",
        suggestion="register it as a buffer of the model, or make it again in every step",
    )


def _keeps_shape(node: fx.Node) -> bool:
    """Return whether the result of an operation has the shape of its first argument."""
    given: Any = node.args[0]
    return bool(node.meta["val"].shape == given.meta["val"].shape)


def _nested(part: Any) -> Argument:
    return tuple(_nested(inner) for inner in part) if isinstance(part, list) else part


def finish(graph: Graph) -> Graph:
    """Set the phase of each node, and the module of backward nodes: that of the forward node whose
    results they read."""
    producer = graph.producer
    forward: set[int] = set()
    assert graph.loss is not None
    todo = [graph.loss, *(after for _, after in graph.updates)]
    while todo:
        maker = producer.get(todo.pop())
        if maker is not None and maker not in forward:
            forward.add(maker)
            todo += graph.nodes[maker].inputs
    module_of: dict[int, str] = {}
    done = []
    for index, node in enumerate(graph.nodes):
        if index not in forward:
            near = [module_of[v] for v in reversed(node.inputs) if module_of.get(v)]
            node = replace(node, phase=Phase.BACKWARD, module=near[0] if near else "")
        module_of.update({value: node.module for value in node.outputs if value is not None})
        done.append(node)
    return replace(graph, nodes=tuple(done))
