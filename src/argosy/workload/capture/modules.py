"""Capture the call of a module as one operation if what it computes depends on data.

A mixture of experts chooses its operations by the numbers that it computes, so it cannot be
captured operation by operation. The runtime, which has the module, runs it. Two kinds of modules
are captured so:

    (1)  a module of experts (``experts``), whose parameters have one entry per expert, and which is
         called with tokens, numbers of experts and weights: devices can share its experts
    (2)  the innermost module whose forward reads the contents of tensors, and with it all modules
         of its class. If its results have shapes that depend on the routing, or its call has other
         parts than tensors and plain numbers, the module around it is taken in its place. The model
         itself is never taken.

A trace of (2) is begun again whenever it meets such a module. Shapes, FLOP and the bytes that a
module keeps follow from an even routing (``routing``); along which dims its call may be divided is
tried on random numbers (``apart``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from argosy.workload.capture.blame import reads_contents
from argosy.workload.capture.described import Description, Descriptions, describe
from argosy.workload.capture.experts import check_no_dropout, described_experts, is_call, is_experts
from argosy.workload.capture.routing import UnforeseenError


@torch.library.custom_op("argosy::module", mutates_args=())
def module_op(
    given: list[Tensor], held: list[Tensor], call: str, sizes: list[int], labels: str, experts: int
) -> list[Tensor]:
    """Return the tensors that a module returns, and one that stands for what it keeps.

    ``sizes`` has the FLOP, then the rank and the shape of each result.
    """
    raise NotImplementedError("argosy::module is computed by the runtime")


@module_op.register_fake
def _(
    given: list[Tensor], held: list[Tensor], call: str, sizes: list[int], labels: str, experts: int
) -> list[Tensor]:
    at, made = 1, []
    for dtype in json.loads(call)[-1]:
        end = at + 1 + sizes[at]
        kind = getattr(torch, dtype)
        made.append(torch.empty(sizes[at + 1 : end], dtype=kind, device=given[0].device))
        at = end
    return made


@torch.library.custom_op("argosy::module_backward", mutates_args=())
def module_backward_op(
    gradients: list[Tensor], operands: list[Tensor], sizes: list[int], labels: str, experts: int
) -> list[Tensor]:
    """Return the gradients of all operands, which are what a module was given and holds, but the
    last, which stands for what it kept."""
    raise NotImplementedError("argosy::module_backward is computed by torch")


@module_backward_op.register_fake
def _(
    gradients: list[Tensor], operands: list[Tensor], sizes: list[int], labels: str, experts: int
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in operands[:-1]]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given, held, _, sizes, labels, experts = inputs
    ctx.num_given, ctx.flop, ctx.labels, ctx.experts = len(given), sizes[0], labels, experts
    ctx.made = [(result.shape, result.dtype, result.device) for result in output[:-1]]
    ctx.save_for_backward(*given, *held, output[-1])


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
    operands = list(ctx.saved_tensors)
    whole = [
        torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
        for gradient, (shape, dtype, device) in zip(gradients, ctx.made, strict=False)
        if dtype.is_floating_point
    ]
    labels = backward_labels(ctx.labels, [dtype.is_floating_point for _, dtype, _ in ctx.made])
    made = module_backward_op(whole, operands, [2 * ctx.flop], labels, ctx.experts)
    found = [
        gradient if operand.is_floating_point() else None
        for gradient, operand in zip(made, operands, strict=False)
    ]
    return found[: ctx.num_given], found[ctx.num_given :], None, None, None, None


module_op.register_autograd(_backward, setup_context=_set_up)


def backward_labels(labels: str, floating: Sequence[bool]) -> str:
    """Return the labels of a backward from those of a call, whose last result stands for what is
    kept.

    >>> backward_labels("t.,.->t.,.,t.", [True, False])
    't.,t.,.,t.->t.,.'
    """
    left, right = labels.split("->")
    *results, kept = right.split(",")
    gradients = [word for word, is_float in zip(results, floating, strict=True) if is_float]
    return ",".join([*gradients, left, kept]) + "->" + left


class OpaqueModuleError(Exception):
    """A module whose forward reads the contents of tensors; the trace begins again with it."""


@dataclass
class OpaqueModules:
    """The modules of one model that are captured as one operation each, found so far."""

    kinds: set[type] = field(default_factory=set)
    """Classes of modules that are captured by (2)."""
    passed: dict[type, str] = field(default_factory=dict)
    """Classes whose calls cannot be one operation, with the reason."""
    known: Descriptions = field(default_factory=Descriptions)

    def why(self) -> str:
        """Return why the last module that was passed over cannot be one operation."""
        return next(reversed(self.passed.values()), "")


class _Capturing:
    """A context in which modules of a model are captured by (1) and (2)."""

    def __init__(self, model: nn.Module, opaque: OpaqueModules, samples: int) -> None:
        self.model, self.opaque, self.samples = model, opaque, samples
        self.is_following = False
        """Whether a module is being described, so that those inside it run as they are."""

    def call(
        self, module: nn.Module, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self.is_following:
            return forward(*args, **kwargs)
        if is_experts(module) and is_call(args, kwargs):
            check_no_dropout(module)
            given = (*args, *kwargs.values())
            return self._record(module, path, described_experts(module, given), given, {})
        if type(module) in self.opaque.kinds:
            try:
                description = self._described(module, path, args, kwargs)
            except UnforeseenError as error:
                self.opaque.kinds.discard(type(module))
                self.opaque.passed[type(module)] = f"{path} {error}"
            else:
                return self._record(module, path, description, args, kwargs)
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            is_new = type(module) not in self.opaque.passed
            if isinstance(error, OpaqueModuleError) or not reads_contents(error) or not is_new:
                raise
            self.opaque.kinds.add(type(module))
            raise OpaqueModuleError(path) from error

    def _described(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> Description:
        self.is_following = True
        try:
            return describe(module, path, args, kwargs, self.samples, self.opaque.known)
        finally:
            self.is_following = False

    def _record(
        self, module: nn.Module, path: str, description: Description, args: Any, kwargs: Any
    ) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        plain = [None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves]
        sized = description.sized
        call = json.dumps([path, treespec_dumps(spec), plain, sized.dtypes])
        held = [*module.parameters(), *module.buffers()]
        if not torch.is_grad_enabled():  # seen as such inside the operation, too
            given, held = [t.detach() for t in given], [t.detach() for t in held]
        sizes = [sized.flop, *(n for shape in sized.shapes for n in (len(shape), *shape))]
        results = module_op(given, held, call, sizes, description.labels, description.experts)
        return tree_unflatten(description.filled(results), description.spec)


def module_path(call: str) -> str:
    """Return the path of the module that a recorded call is of."""
    path: str = json.loads(call)[0]
    return path


def called(module: nn.Module, call: str, given: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that a module returns for a recorded call, in the recorded dtypes."""
    _, spec, plain, dtypes = json.loads(call)
    tensors = iter(given)
    leaves = [next(tensors) if leaf is None else leaf[0] for leaf in plain]
    args, kwargs = tree_unflatten(leaves, treespec_loads(spec))
    leaves = tree_flatten(module.forward(*args, **kwargs))[0]
    made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [part.to(getattr(torch, name)) for part, name in zip(made, dtypes, strict=False)]


@contextmanager
def capturing_modules(model: nn.Module, opaque: OpaqueModules, samples: int) -> Iterator[None]:
    """Capture modules of a model by (1) and (2) in the context; raise ``OpaqueModuleError`` if a
    trace has to begin again."""
    capturing = _Capturing(model, opaque, samples)
    own: list[tuple[nn.Module, Any]] = []
    for path, module in model.named_modules():
        if path and not isinstance(module, torch.jit.ScriptModule):
            own.append((module, vars(module).get("forward")))
            module.forward = partial(capturing.call, module, path, module.forward)
    try:
        yield
    finally:
        for module, forward in own:
            if forward is None:
                del module.forward
            else:
                module.forward = forward
