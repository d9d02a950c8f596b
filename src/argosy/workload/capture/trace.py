"""One training step of a torch module, traced into a ``Graph``.

The forward, the loss and ``torch.autograd.grad`` run once on fake tensors under ``make_fx``, functionalised, with the
few decompositions of ``decompose``. What comes out is cleaned (copies and detachments are nothing in a functional
graph) and written as plain data. Fake and functional tensors are private torch interfaces: this folder follows torch.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map_only, tree_unflatten

from argosy.errors import bad_input
from argosy.workload.capture.blame import blamed, stack_line
from argosy.workload.capture.decompose import TABLE, numbered_masks
from argosy.workload.capture.initial import FakeModel, build_fake
from argosy.workload.graph import Argument, Graph, Node, Phase, Ref, Role, Symbol, Value

Build = Callable[[], tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]]

NOTHING = {
    "aten.detach.default",
    "aten.alias.default",
    "aten.clone.default",
    "aten.lift_fresh_copy.default",
    "aten.contiguous.default",
}
"""Operations that are the identity in a graph without writes."""
DETACH = "aten.detach.default"
RUNS = "a model and a loss that run on the batch, forward and backward"
ALONE = "if `loss(model, batch).backward()` works by itself, this operation cannot be traced"

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
"""Operations that make a tensor of one number: which, or None where an argument says it."""


def capture(build: Build, *, name: str = "program") -> Graph:
    """The training step of what ``build`` returns: (model, loss function, batch)."""
    return capture_fake(build_fake(build), name=name)


def capture_fake(fake: FakeModel, *, name: str = "program") -> Graph:
    """The training step of a model that was already built on fake tensors; each module in the mode it was left in."""
    parameters, buffers = list(fake.model.named_parameters()), list(fake.model.named_buffers())
    paths, _ = tree_flatten_with_path(fake.batch)
    leaves, spec = tree_flatten(fake.batch)
    tensors = [(keystr(path), leaf) for path, leaf in paths if isinstance(leaf, Tensor)]
    step = _step_function(fake, parameters, buffers, leaves, spec)
    modules = ModuleStack(fake.model)
    with tracing_flags(), modules, blamed(name, expected=RUNS, suggestion=ALONE):
        traced = trace_step(fake, step, [t for _, t in parameters], [t for _, t in buffers], [t for _, t in tensors])
    names = [(n, Role.PARAMETER) for n, _ in parameters] + [(n, Role.BUFFER) for n, _ in buffers]
    names += [(n, Role.INPUT) for n, _ in tensors]
    return GraphWriter(name, traced, names, len(parameters), len(buffers), modules.of).graph()


def num_samples(fake: FakeModel) -> int:
    """The first dim of the batch's first tensor; 1 where it has none."""
    first = next((leaf for leaf in tree_flatten(fake.batch)[0] if isinstance(leaf, Tensor)), None)
    return int(first.shape[0]) if first is not None and first.dim() else 1


def with_samples(fake: FakeModel, count: int) -> FakeModel:
    """The same model on the first samples of its batch: every tensor whose first dim is that of the samples."""
    whole = num_samples(fake)

    def part(tensor: Tensor) -> Tensor:
        return tensor[:count] if tensor.dim() and tensor.shape[0] == whole else tensor

    with fake.mode:
        return replace(fake, batch=tree_map_only(Tensor, part, fake.batch))


def _step_function(
    fake: FakeModel,
    parameters: Sequence[tuple[str, Tensor]],
    buffers: Sequence[tuple[str, Tensor]],
    leaves: Sequence[Any],
    spec: Any,
) -> Callable[..., Any]:
    """Forward, loss and gradients as a function of tensors alone."""
    root = StepRoot(fake, leaves, spec)

    def step(weights: list[Tensor], state: list[Tensor], batch: list[Tensor]) -> Any:
        trained = [w.detach().requires_grad_(p.requires_grad) for w, (_, p) in zip(weights, parameters, strict=True)]
        held = [b.clone() for b in state]
        named = {f"model.{n}": t for (n, _), t in zip([*parameters, *buffers], [*trained, *held], strict=True)}
        loss = functional_call(root, named, tuple(batch))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise bad_input("a scalar tensor from the loss function", type(loss).__name__, where="loss")
        wanted = [t for t in trained if t.requires_grad]
        grads = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
        return loss.detach(), [next(grads) if t.requires_grad else None for t in trained], held

    return step


class StepRoot(nn.Module):
    """The model behind its loss function, so that parameters can be handed in by name."""

    def __init__(self, fake: FakeModel, leaves: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.model, self.loss, self.leaves, self.spec = fake.model, fake.loss, leaves, spec

    def forward(self, *tensors: Tensor) -> Tensor:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self.loss(self.model, tree_unflatten(leaves, self.spec))


def trace_step(fake: FakeModel, step: Callable[..., Any], *inputs: list[Tensor]) -> fx.GraphModule:
    function = dispatch_functionalize(step, FunctionalTensorMode())
    make = make_fx(function, TABLE, "fake", _allow_non_fake_inputs=True, record_stack_traces=True)
    with fake.mode, numbered_masks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = make(*inputs)
    traced.graph.eliminate_dead_code()
    return traced


@contextmanager
def tracing_flags() -> Iterator[None]:
    """Libraries ask these before they look into a tensor; what torch logs of an error is in the error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with patch.object(torch.compiler, "_is_compiling_flag", True), patch.object(log, "disabled", True):
        yield


class ModuleStack:
    """Which module each forward operation ran in, by hooks that look at the graph so far."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths: list[str] = []
        self.of: dict[str, str] = {}
        self.seen = 0

    def __enter__(self) -> None:
        self.hooks = []
        for path, module in self.model.named_modules():
            self.hooks.append(module.register_forward_pre_hook(lambda *_, path=path: self._change(path)))
            self.hooks.append(module.register_forward_hook(lambda *_: self._change(None)))

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _change(self, path: str | None) -> None:
        mode = get_proxy_mode()
        nodes = mode.tracer.graph._len if mode is not None else 0
        last = mode.tracer.graph._root._prev if mode is not None else None
        here = self.paths[-1] if self.paths else ""
        for _ in range(nodes - self.seen):
            assert last is not None
            self.of[last.name] = here
            last = last._prev
        self.seen = nodes
        if path is None:
            self.paths.pop()
        else:
            self.paths.append(path)


class GraphWriter:
    """An fx graph as plain data."""

    def __init__(
        self,
        name: str,
        traced: fx.GraphModule,
        names: Sequence[tuple[str, Role]],
        num_parameters: int,
        num_buffers: int,
        modules: dict[str, str],
        *,
        detaches: bool = False,
    ) -> None:
        self.name, self.traced, self.modules = name, traced, modules
        self.detaches = detaches
        """Whether detachments of results are written down: they are nothing only where the backward is there too."""
        self.num_parameters, self.num_buffers = num_parameters, num_buffers
        self.names = iter(names)
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.constants: list[tuple[int, Argument]] = []
        self.index: dict[fx.Node, int] = {}
        self.parts: dict[tuple[fx.Node, int], int] = {}

    def graph(self) -> Graph:
        for node in self.traced.graph.nodes:
            self._add(node)
        (output,) = (node for node in self.traced.graph.nodes if node.op == "output")
        loss, *rest = output.args[0]
        grads, buffers = rest[: self.num_parameters], rest[self.num_parameters :]
        gradients = [(i, self.index[g]) for i, g in enumerate(grads) if g is not None]
        updates = [(self.num_parameters + i, self.index[b]) for i, b in enumerate(buffers)]
        return finish(
            Graph(
                name=self.name,
                values=tuple(self.values),
                nodes=tuple(self.nodes),
                loss=self.index[loss],
                gradients=tuple(gradients),
                updates=tuple((before, after) for before, after in updates if before != after),
                constants=tuple(self.constants),
            )
        )

    def _add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            name, role = next(self.names)
            self.index[node] = self._value(name, role, node.meta["val"])
        elif node.op == "get_attr":
            tensor = getattr(self.traced, str(node.target))
            self.index[node] = self._value(str(node.target), Role.CONSTANT, tensor)
            self.constants.append((self.index[node], _nested(tensor.tolist())))
        elif node.op == "call_function":
            self._add_call(node)

    def _add_call(self, node: fx.Node) -> None:
        target = str(node.target)
        if node.target is operator.getitem:
            source, part = node.args
            self.index[node] = self.parts[source, part]  # type: ignore[index]
        elif target in FILLED:
            self._add_filled(node, FILLED[target])
        elif target in NOTHING and not (self.detaches and target == DETACH and _is_result(node.args[0])):
            self.index[node] = self.index[node.args[0]]  # type: ignore[index]
        else:
            self._add_operation(node, target)

    def _add_filled(self, node: fx.Node, fill: int | None) -> None:
        """A new tensor of one number needs no other tensor, only a shape."""
        made = node.meta["val"]
        number = node.args[1] if fill is None else fill
        self.index[node] = self._value(node.name, Role.RESULT, made)
        keywords = (("dtype", Symbol(str(made.dtype))), ("device", Symbol("device")))
        arguments = (tuple(int(size) for size in made.shape), self._argument(number))
        self.nodes.append(
            Node(
                name=node.name,
                op="aten.full.default",
                arguments=arguments,
                keywords=keywords,
                outputs=(self.index[node],),
                module=self.modules.get(node.name, ""),
                source=stack_line(node.meta.get("stack_trace")),
            )
        )

    def _add_operation(self, node: fx.Node, target: str) -> None:
        made = node.meta["val"]
        arguments = tuple(self._argument(part) for part in node.args)
        keywords = tuple((key, self._argument(part)) for key, part in node.kwargs.items())
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
        source, module = stack_line(node.meta.get("stack_trace")), self.modules.get(node.name, "")
        self.nodes.append(
            Node(
                name=node.name,
                op=target,
                arguments=arguments,
                keywords=keywords,
                outputs=tuple(outputs),
                module=module,
                source=source,
            )
        )

    def _value(self, name: str, role: Role, tensor: Tensor) -> int:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.values.append(Value(name=name, role=role, shape=tuple(int(s) for s in tensor.shape), dtype=dtype))
        return len(self.values) - 1

    def _argument(self, part: Any) -> Argument:
        if isinstance(part, fx.Node):
            return Ref(self.index[part])
        if isinstance(part, (list, tuple)):
            return tuple(self._argument(inner) for inner in part)
        if isinstance(part, torch.device):
            return Symbol("device")
        if isinstance(part, (torch.dtype, torch.layout, torch.memory_format)):
            return Symbol(str(part))
        assert part is None or isinstance(part, (bool, int, float, str)), f"unknown argument {part!r}"
        return part


def _is_result(part: Any) -> bool:
    return isinstance(part, fx.Node) and part.op == "call_function"


def _nested(part: Any) -> Argument:
    return tuple(_nested(inner) for inner in part) if isinstance(part, list) else part


def finish(graph: Graph) -> Graph:
    """Phases, and modules of backward operations: those of the forward operation whose results they read."""
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
