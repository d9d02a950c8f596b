"""Trace the training step of a torch program as a ``Graph``.

The forward, the loss and ``torch.autograd.grad`` run once on fake tensors under ``make_fx``,
functionalised, with the few decompositions of ``decompose``. The result is cleaned (copies and
detachments do nothing in a functional graph) and written as plain data. A forward alone, for
``forward``, is traced in the same way; ``flow`` adds what its differentiation needs. Fake and
functional tensors are private torch interfaces, so this folder depends on torch's version.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
)

from argosy.errors import bad_input
from argosy.workload.capture.blame import blamed
from argosy.workload.capture.decompose import TABLE, numbered_masks
from argosy.workload.capture.embeddings import check_embeddings
from argosy.workload.capture.flow import Decided, GradientFlow, own_gradients
from argosy.workload.capture.hooks import check_hooks
from argosy.workload.capture.initial import FakeModel, build_fake
from argosy.workload.capture.modules import OpaqueModuleError, OpaqueModules, capturing_modules
from argosy.workload.capture.rewritten import attention_as_on_cpus
from argosy.workload.capture.write import GraphWriter, StepInputs
from argosy.workload.graph import OWN_GRADIENT, Graph, Role

# A user's function that returns model, loss function and batch.
Build = Callable[[], tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]]

# Expected behaviour of model and loss, for error messages.
RUNS = "a model and a loss that run on the batch, forward and backward"
# Suggestion for an error in a trace.
ALONE = "if `loss(model, batch).backward()` works by itself, this operation cannot be traced"


def capture(build: Build, *, name: str = "program") -> Graph:
    """Return the training step of what ``build`` returns: (model, loss function, batch)."""
    return capture_fake(build_fake(build), name=name)


def capture_fake(
    fake: FakeModel,
    *,
    name: str = "program",
    samples: int | None = None,
) -> Graph:
    """Return the training step of a model that was built without values; each module keeps its
    training or evaluation mode. ``samples`` is the number of rows of its batch, if not its own."""
    return trace(fake, name=name, samples=samples).graph()


def num_samples(fake: FakeModel) -> int:
    """Return the first dim of the batch's first tensor; 1 if there is none."""
    first = next((leaf for leaf in tree_flatten(fake.batch)[0] if isinstance(leaf, Tensor)), None)
    return int(first.shape[0]) if first is not None and first.dim() else 1


def trace(
    fake: FakeModel,
    *,
    name: str,
    forward_only: bool = False,
    samples: int | None = None,
    device: torch.device | None = None,
    autocast: torch.dtype | None = None,
) -> GraphWriter:
    """Trace the step of a model and return its writer; with ``samples``, every tensor of the batch
    has that many rows. The trace begins again whenever it meets a module whose operations depend on
    data."""
    check_hooks(fake.model)
    check_embeddings(fake.model)
    known = OpaqueModules() if fake.opaque is None else fake.opaque
    way = _Way(name, forward_only, samples, device or torch.device("cpu"), autocast)
    while True:
        try:
            with capturing_modules(fake.model, known, samples or num_samples(fake)):
                return _trace_once(fake, way, known)
        except OpaqueModuleError:
            continue


@dataclass(frozen=True)
class _Way:
    """The way in which a model is traced, as ``trace`` describes it."""

    name: str
    forward_only: bool
    samples: int | None
    device: torch.device
    autocast: torch.dtype | None


def _trace_once(fake: FakeModel, way: _Way, opaque: OpaqueModules) -> GraphWriter:
    """Trace the step of a model; raise ``OpaqueModuleError`` for a module whose operations depend
    on data."""
    name, forward_only, device = way.name, way.forward_only, way.device
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    like = partial(_like, device)
    parameters, buffers = list(fake.model.named_parameters()), list(fake.model.named_buffers())
    with mode:
        weights = [like(tensor) for _, tensor in parameters]
        state = [like(tensor) for _, tensor in buffers]
        batch = tree_map_only(Tensor, lambda leaf: like(leaf, way.samples), fake.batch)
    leaves, spec = tree_flatten(batch)
    paths = tree_flatten_with_path(batch)[0]
    tensors = [(keystr(path), leaf) for path, leaf in paths if isinstance(leaf, Tensor)]
    root = StepRoot(fake, leaves, spec)
    flow = GradientFlow(fake.recording, marked=forward_only)

    def step(given: list[Tensor], held: list[Tensor], rows: list[Tensor]) -> Any:
        trained = _trained(given, [parameter for _, parameter in parameters])
        kept = [value.clone() for value in held]
        named = {
            f"model.{n}": t
            for (n, _), t in zip([*parameters, *buffers], [*trained, *kept], strict=True)
        }
        with flow, Decided(), own_gradients(marked=forward_only), _precision(device, way.autocast):
            loss = functional_call(root, named, tuple(rows))
        _check_loss(loss)
        gradients = [None] * len(trained) if forward_only else _gradients(loss, trained)
        return loss.detach(), gradients, trained, kept

    modules = ModuleStack(fake.model)
    flags, places = tracing_flags(), attention_as_on_cpus()
    passing = (OpaqueModuleError,)
    blame = blamed(name, expected=RUNS, suggestion=ALONE, why=opaque.why, passing=passing)
    with flags, places, modules, blame:
        made = trace_step(mode, step, weights, state, [tensor for _, tensor in tensors])
    names = [(n, Role.PARAMETER) for n, _ in parameters] + [(n, Role.BUFFER) for n, _ in buffers]
    names += [(n, Role.INPUT) for n, _ in tensors]
    trains = tuple(parameter.requires_grad for _, parameter in parameters)
    given = StepInputs(names=tuple(names), trains=trains, num_buffers=len(buffers))
    return GraphWriter(name, made, given, modules.of, flow.stopped if forward_only else None)


def _like(device: torch.device, tensor: Tensor, rows: int | None = None) -> Tensor:
    """Return an empty tensor like another one, with ``rows`` rows if they are given."""
    shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device=device)


def _trained(values: list[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return leaves with the values of parameters, which require gradients if these do."""
    return [
        value.detach().requires_grad_(parameter.requires_grad)
        for value, parameter in zip(values, parameters, strict=True)
    ]


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        actual = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise bad_input("a scalar tensor from the loss function", actual, "loss")


def _gradients(loss: Tensor, trained: list[Tensor]) -> list[Tensor | None]:
    """Return the gradient of each tensor; None for one that requires none or is not used."""
    wanted = [tensor for tensor in trained if tensor.requires_grad]
    results = iter(torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ())
    return [next(results) if tensor.requires_grad else None for tensor in trained]


def _precision(
    device: torch.device, autocast: torch.dtype | None
) -> contextlib.AbstractContextManager[Any]:
    if autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, autocast, cache_enabled=False)


class StepRoot(nn.Module):
    """A module that holds the model behind its loss function, so that parameters can be passed by
    name."""

    def __init__(self, fake: FakeModel, leaves: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.model, self.loss, self.leaves, self.spec = fake.model, fake.loss, leaves, spec

    def forward(self, *tensors: Tensor) -> Tensor:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self.loss(self.model, tree_unflatten(leaves, self.spec))


def trace_step(
    mode: FakeTensorMode, step: Callable[..., Any], *inputs: list[Tensor]
) -> fx.GraphModule:
    function = dispatch_functionalize(step, FunctionalTensorMode())
    make = make_fx(function, TABLE, "fake", _allow_non_fake_inputs=True, record_stack_traces=True)
    with mode, numbered_masks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # With oneDNN or cuDNN, a recurrent layer or a normalisation would be one operation that
        # only some devices have.
        with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
            traced = make(*inputs)
    traced.graph.eliminate_dead_code(
        lambda node: str(node.target) == OWN_GRADIENT or node.is_impure()
    )
    return traced


@contextmanager
def tracing_flags() -> Iterator[None]:
    """Set flags that libraries check before they read a tensor, and silence torch's log of errors,
    which are raised anyway."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with (
        patch.object(torch.compiler, "_is_compiling_flag", True),
        patch.object(torch.distributions.Distribution, "_validate_args", False),
        patch.object(log, "disabled", True),
    ):
        yield


class ModuleStack:
    """A context that records the module of each forward operation, by hooks that look at the graph
    so far."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths: list[str] = []
        self.of: dict[str, str] = {}
        self.seen = 0

    def __enter__(self) -> None:
        self.hooks = []
        for path, module in self.model.named_modules():
            self.hooks.append(
                module.register_forward_pre_hook(lambda *_, path=path: self._change(path))
            )
            self.hooks.append(module.register_forward_hook(lambda *_: self._change(None)))

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _change(self, path: str | None) -> None:
        mode = get_proxy_mode()
        if mode is None:  # a module is tried outside of the trace
            return
        nodes = mode.tracer.graph._len
        last = mode.tracer.graph._root._prev
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
