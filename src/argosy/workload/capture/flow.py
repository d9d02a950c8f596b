"""Record what a trace alone does not show of a step: where gradients stop, and backwards that the
program defines.

A forward is written down as operations that torch differentiates again where it runs. To give the
gradients of the program,

    (1)  an operation that read a tensor without passing gradients on to it (under ``no_grad``,
         after ``detach``) must not pass them on then. ``GradientFlow`` looks at every operation as
         the program calls it and records such pairs.
    (2)  the backward of a ``torch.autograd.Function`` is traced where it is applied, on gradients
         that stand for those of the results, and ends in a mark that ``GraphWriter`` turns into an
         ``OwnGradient``.
    (3)  checkpointing changes no value: a checkpointed function is called directly. The plan
         determines what is computed again.
    (4)  a tensor that is changed in place under ``no_grad`` keeps its gradients: torch's cosine
         similarity does so. It gets the mark of (2), with a backward that passes gradients on
         unchanged.

A branch on a tensor that is made of numbers alone is taken, because the tensor is the same in every
step. The following cannot be written down and raises an ``InputError``: a generator of its own; a
change of a tensor that is neither a parameter nor a buffer; a tensor with gradients that is changed
through ``.data``; a branch that depends on a random number (a branch that no random number can
change, such as layer drop with a rate of 0, is taken).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.function import BackwardCFunction, Function
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from argosy.errors import InputError, invalid
from argosy.workload.capture.blame import running_line
from argosy.workload.capture.hooks import HOOKS_OF_TENSORS, refused_hook
from argosy.workload.capture.initial import Recording, written_by
from argosy.workload.capture.modules import module_op
from argosy.workload.capture.rewritten import rewritten
from argosy.workload.capture.write import NOTHING

_CPU = torch.device("cpu")
# Largest number of elements of a tensor that is neither parameter, buffer nor part of the batch.
MOST_CONSTANT = 2**20


@torch.library.custom_op("argosy::own_gradient", mutates_args=())
def own_gradient(
    results: list[Tensor], inputs: list[Tensor], given: list[Tensor], gradients: list[Tensor]
) -> Tensor:
    """Mark the end of a traced backward (2)."""
    return torch.empty(0)


@own_gradient.register_fake
def _(
    results: list[Tensor], inputs: list[Tensor], given: list[Tensor], gradients: list[Tensor]
) -> Tensor:
    return torch.empty(0)


class GradientFlow(TorchDispatchMode):
    """A mode that applies (1) and, if ``marked``, (4) to the operations while it is entered."""

    def __init__(self, recording: Recording | None, *, marked: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording, self.marked = recording, marked
        self.stopped: set[tuple[str, str]] = set()
        """Pairs of an operation and a value that it reads without passing gradients on, by their
        names in the trace."""
        self.carrying: dict[Node, bool] = {}
        """Whether gradients go through the result of an operation."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._check(function, args, kwargs)
        args, kwargs = tree_map(self._valued, (args, kwargs))
        mode = get_proxy_mode()
        if function is torch.ops.argosy.own_gradient.default:
            result = function(*args, **kwargs)
            for tensor in args[0]:
                self._carry(tensor)
            return result
        if mode is None:
            return function(*args, **kwargs)
        if function is torch.ops.aten._local_scalar_dense.default:
            known = _known(args[0], mode.tracer)
            return function(*args, **kwargs) if known is None else known.item()
        graph, read = mode.tracer.graph, []
        # The call of a module runs inside an autograd function, which disables gradients.
        differentiates = torch.is_grad_enabled() or function is module_op._opoverload
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, FunctionalTensor) and (node := node_of(leaf)) is not None:
                passes = leaf.requires_grad and differentiates
                read.append((node, passes))
                if passes and self.marked:
                    self._check_gradients(leaf, node)
        straight = self._changed_without_gradients(function, args, kwargs)
        before = [tensor.clone() for tensor in straight]
        last = graph._root._prev
        result = function(*args, **kwargs)
        without = {node for node, passes in read if not passes} - {
            node for node, passes in read if passes
        }
        made = graph._root._prev
        while made is not last and made is not graph._root:
            inputs = made.all_input_nodes
            stopped = without.intersection(inputs) if differentiates else inputs
            self.stopped.update((made.name, node.name) for node in stopped)
            made = made._prev
        for tensor, copy in zip(straight, before, strict=True):
            given = torch.empty_like(tensor)
            torch.ops.argosy.own_gradient([tensor], [copy], [given], [given.clone()])
            self._carry(tensor)
        return result

    def _changed_without_gradients(self, function: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the tensors with gradients that an operation is about to change without them
        (4)."""
        if not self.marked or torch.is_grad_enabled():
            return []
        changed: list[Tensor] = []
        for target in written_by(function, args, kwargs):
            if isinstance(target, FunctionalTensor) and target.requires_grad and not target.is_leaf:
                if target._is_view():
                    actual = f"{function} under no_grad on a part of a tensor that has gradients"
                    raise _refused(
                        actual,
                        "gradients that can be followed",
                        "change a copy of the whole tensor",
                    )
                changed.append(target)
        return changed

    def _carry(self, tensor: Tensor) -> None:
        """Record that gradients go through a tensor, whatever operation made it."""
        if isinstance(tensor, FunctionalTensor) and (node := node_of(tensor)) is not None:
            self.carrying[node] = True

    def _check_gradients(self, tensor: FunctionalTensor, node: Node) -> None:
        """Raise an ``InputError`` for a tensor that has gradients but whose recorded operations
        pass none on."""
        if tensor.is_leaf:
            self.carrying[node] = True
        elif not self._carries(node):
            actual = "a tensor with gradients that was changed without them, such as through .data"
            raise _refused(
                actual,
                "gradients that can be followed",
                "change it by operations that have gradients",
            )

    def _carries(self, node: Node) -> bool:
        todo = [node]
        while todo:
            now = todo[-1]
            # The written graph omits these operations, so they detach nothing.
            same = str(now.target) in NOTHING
            read = [
                part
                for part in now.all_input_nodes
                if same or (now.name, part.name) not in self.stopped
            ]
            unknown = [part for part in read if part not in self.carrying]
            if now in self.carrying or not unknown:
                self.carrying.setdefault(now, any(self.carrying[part] for part in read))
                todo.pop()
            else:
                todo += unknown
        return self.carrying[node]

    def _valued(self, leaf: Any) -> Any:
        """Return a tensor that the program holds besides its model with its values."""
        if (
            self.recording is None
            or not isinstance(leaf, Tensor)
            or isinstance(leaf, FunctionalTensor)
        ):
            return leaf
        if not leaf.is_meta or type(leaf) is not Tensor:
            return leaf
        if leaf.numel() > MOST_CONSTANT:
            expected = f"at most {MOST_CONSTANT:,} in a tensor that is no parameter or buffer"
            raise _refused(
                f"{leaf.numel():,} elements", expected, "register it as a buffer of the model"
            )
        return self.recording.materialise([leaf])[0]

    def _check(self, function: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("generator") is not None:
            expected = "random numbers of torch's own generator, which are equal under every plan"
            raise _refused(f"generator= in {function}", expected, "leave generator= out")
        for target in written_by(function, args, kwargs):
            if type(target) is Tensor:
                actual = f"{function} on a tensor that is neither a parameter nor a buffer"
                expected = "no changes that outlast the step"
                raise _refused(actual, expected, "register it as a buffer of the model")


def _refused(found: str, expected: str, suggestion: str) -> InputError:
    """Return an error at the line of the user's program that is running."""
    return invalid(running_line() or "loss", found, expected, suggestion=suggestion)


def node_of(tensor: FunctionalTensor) -> Node | None:
    """Return the operation or placeholder of the trace whose result a tensor currently is."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
    inner = torch._from_functional_tensor(tensor.elem)
    slot = get_proxy_slot(inner, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _known(tensor: Tensor, tracer: Any) -> Tensor | None:
    """Return the value of a tensor that is made of numbers alone, such as a causal mask; None for
    any other."""
    node = node_of(tensor) if isinstance(tensor, FunctionalTensor) else None
    if node is None:
        return None
    values: dict[Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        return values[node] if _compute(node, values, tracer) else None


def _compute(node: Node, values: dict[Node, Any], tracer: Any) -> bool:
    """Run what a node of the trace needs and then the node; return False if it depends on weights
    or the batch, or is random."""
    if node in values:
        return True
    if node.op == "get_attr":
        values[node] = getattr(tracer.root, str(node.target))
        return True
    tags = getattr(node.target, "tags", ())
    if (
        node.op != "call_function"
        or torch.Tag.nondeterministic_seeded in tags
        or "argosy" in str(node.target)
    ):
        return False
    if not all(_compute(part, values, tracer) for part in node.all_input_nodes):
        return False
    args = map_arg(node.args, values.__getitem__)
    kwargs = {
        key: _CPU if key == "device" else part
        for key, part in map_arg(node.kwargs, values.__getitem__).items()
    }
    values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return True


@contextmanager
def own_gradients(*, marked: bool) -> Iterator[None]:
    """Apply (2) and (3) inside the block; only (3) without ``marked``, in a trace that holds the
    backward itself."""
    plain = getattr_static(Function, "apply")  # a class method, in C since torch 2.15

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            run, _, *rest = args
            return run(*rest)
        made = plain.__get__(None, cls)(*args, **kwargs)
        if marked and torch.is_grad_enabled():
            _mark(cls, args, made)
        return made

    def unchecked(*_: Any, **__: Any) -> Iterator[None]:
        yield

    with (
        patch.object(Function, "apply", classmethod(apply)),
        patch.object(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", unchecked),
    ):
        yield


def _mark(cls: Any, args: tuple[Any, ...], made: Any) -> None:
    """Trace the backward of an applied function and end it in a mark (2)."""
    outputs = list(made) if isinstance(made, (tuple, list)) else [made]
    results = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not results or not isinstance(results[0], FunctionalTensor):
        return
    node = results[0].grad_fn
    if not isinstance(node, BackwardCFunction) or any(
        not isinstance(leaf, Tensor) for leaf in outputs
    ):
        actual = f"the torch.autograd.Function {cls.__name__}"
        raise _refused(actual, "a backward that can be traced", "write it with operations of torch")
    with torch.no_grad():
        given = [torch.empty_like(leaf) for leaf in outputs]
        gradients = node.apply(*given)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        pairs = [
            (a, g)
            for a, g in zip(args, gradients, strict=False)
            if isinstance(a, Tensor) and a.requires_grad
        ]
        kept = [(a, g) for a, g in pairs if g is not None]
        torch.ops.argosy.own_gradient(
            outputs, [a for a, _ in kept], given, [g.clone() for _, g in kept]
        )


class Decided(TorchFunctionMode):
    """A mode that takes a branch on a random number between 0 and 1 if no number changes its
    outcome, and raises an error for other such branches and for hooks on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[int, Tensor] = {}
        """Single numbers that are drawn between 0 and 1, and results of comparing them, by ``id``;
        kept alive so that ids stay unique."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in HOOKS_OF_TENSORS:
            raise refused_hook(running_line() or "loss", "a hook on the gradient of a tensor")
        result = rewritten(function, args, kwargs)
        if result is not NotImplemented:
            return result
        of_drawn = bool(args) and id(args[0]) in self.drawn
        if of_drawn and function in _BRANCHES:
            expected = "the same operations in every step"
            suggestion = "set the rate at which layers are left out to 0"
            raise _refused("a branch that a random number decides", expected, suggestion)
        if (
            of_drawn
            and function in _COMPARISONS
            and isinstance(args[1], (int, float))
            and not 0 < args[1] < 1
        ):
            return _COMPARISONS[function] == (args[1] >= 1)
        result = function(*args, **(kwargs or {}))
        uniform = function in (torch.rand, Tensor.uniform_) and not (
            function is Tensor.uniform_ and len(args) > 1
        )
        compared = of_drawn and function in _COMPARISONS
        if (uniform or compared) and isinstance(result, Tensor) and result.numel() == 1:
            self.drawn[id(result)] = result
        return result


# Functions that turn a tensor into a number, on which programs branch.
_BRANCHES = {Tensor.__bool__, Tensor.item, Tensor.__float__}
_COMPARISONS: dict[Callable[..., Any], bool] = {
    **dict.fromkeys((Tensor.__lt__, Tensor.__le__, Tensor.lt, Tensor.le, torch.lt, torch.le), True),
    **dict.fromkeys(
        (Tensor.__gt__, Tensor.__ge__, Tensor.gt, Tensor.ge, torch.gt, torch.ge), False
    ),
}
"""Comparisons, with whether each tests for the smaller."""
