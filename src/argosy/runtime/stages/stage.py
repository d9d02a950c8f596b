"""Run a stage that is a range of a model's layers, with the user's loss after the last of them.

The user provides ``loss_fn(model, batch)``. A stage calls it with a stand-in for the model, which
runs the stage's own layers when it is called: on the first stage with the arguments of the call, on
every other with what the previous stage sent. On the last stage ``loss_fn`` continues to the loss;
on all others it ends after that call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from argosy.errors import invalid
from argosy.plan.plan import Recompute
from argosy.runtime.graphs.calls import function
from argosy.runtime.stages.carry import Carry
from argosy.runtime.stages.compiling import compiled
from argosy.runtime.stages.defer import Deferral
from argosy.runtime.stages.dropout import Randomness, masking
from argosy.runtime.stages.moment import Moment
from argosy.runtime.stages.parameters import Weight
from argosy.runtime.stages.weighing import LossWatch, PartLoss
from argosy.schedule import ActionKind
from argosy.space.operations.segments import KEPT_PRODUCTS
from argosy.workload.capture.experts import drops

LossFunction = Callable[[Any, Any], Any]
"""``loss_fn(model, batch)`` returns a mean over the samples or the targets of the batch, or a pair
of a mean and the weight with which parts of the batch are averaged (``weighing``)."""

_KEPT = tuple(function(op) for op in KEPT_PRODUCTS)
"""Operations whose results selective recomputation keeps: products with weights. Attention and all
cheap operations are recomputed."""


class StageProgram(Protocol):
    """The interface of a stage that the executor uses."""

    deferral: Deferral | None
    """The object that defers weight gradients, under a schedule that splits backwards in two."""

    gate: LayerGate | None

    def begin(self, batch: Any, moment: Moment) -> None:
        """Begin a step on a global batch; ``moment`` describes all its samples."""

    def finish(self) -> None:
        """End a step after all of its micro-batches have run."""

    @property
    def needs_batch(self) -> bool:
        """Return whether the stage reads rows of the batch."""

    @property
    def num_layers(self) -> int:
        """Return the number of parts around which a gate may gather weights."""

    def __call__(self, carry: Carry, batch: Any, moment: Moment) -> Carry | PartLoss:
        """Return what the next stage receives, or on the last stage the loss of this part.
        ``carry`` is None on the first stage."""

    def users(self, weight: Weight) -> list[int]:
        """Return the parts that use a weight."""


class LayerGate(Protocol):
    """A hook that runs around every layer, for example to gather its weights."""

    following: ActionKind | None
    """The action after the current one, if both are of this stage."""

    def run(self, index: int, layer: Callable[..., Any], arguments: Any, keywords: Any) -> Any: ...


class LayerStage:
    """A ``StageProgram`` that is made of a model's own layers."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        loss_fn: LossFunction,
        *,
        first: int,
        end: int,
        recompute: Recompute,
        autocast: torch.dtype | None = None,
        device: torch.device | None = None,
        seed: int = 0,
        is_compiled: bool = False,
    ) -> None:
        self.model = model
        self.layers = tuple(layers[first:end])
        self.loss_fn = loss_fn
        self.random = tuple(Randomness(masks=drops(layer) or None) for layer in self.layers)
        self.first = first
        self.is_first = first == 0
        self.is_last = end == len(layers)
        self.recompute = recompute
        self.autocast = autocast
        self.device = device or torch.device("cpu")
        self.seed = seed
        self.gate: LayerGate | None = None
        self.deferral: Deferral | None = None
        self.watching: Callable[[], object] = lambda: None
        """A function that is called before the last layer; the calls after it, which compute the
        loss, are watched."""
        self.is_compiled = is_compiled
        self.calls: dict[object, Callable[..., Any]] = {}
        """Compiled functions of the whole stage and of its layers."""

    def begin(self, batch: Any, moment: Moment) -> None:
        """Do nothing, since layers read only their own samples."""

    def finish(self) -> None:
        """Do nothing, since layers change their buffers themselves."""

    @property
    def needs_batch(self) -> bool:
        return self.is_first or self.is_last

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def users(self, weight: Weight) -> list[int]:
        held = [{id(module) for module in layer.modules()} for layer in self.layers]
        return [
            at
            for at, modules in enumerate(held)
            if any(id(module) in modules for module, _ in weight.places)
        ]

    def __call__(self, carry: Carry, batch: Any, moment: Moment) -> Carry | PartLoss:
        self.moment = moment
        if not self.is_first and not self.is_last:
            with self._precision():
                return self.run(carry)
        stand_in, watch = _StandIn(self, carry), LossWatch()
        with self._precision(), contextlib.ExitStack() as stack:
            self.watching = partial(stack.enter_context, watch)
            try:
                loss = self.loss_fn(stand_in, batch)
            except _HandOn as stop:
                return stop.carry
        part = watch.judged(loss, moment.samples)
        if not moment.is_padding and (not isinstance(loss, tuple) or float(part.fill)):
            return part
        return PartLoss(
            _nothing_of(stand_in.result, self.device), 0.0, part.targets, is_share=part.is_share
        )

    def run(
        self, carry: Carry, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Carry:
        """Run the stage's layers, one after the other."""
        keywords, last = keywords or {}, len(self.layers) - self.is_last
        if self._is_whole() and last:
            carry = self._compiled("layers", self._layers)(
                self._bare, 0, last, carry, arguments, keywords
            )
        else:
            carry = self._layers(self._layer, 0, last, carry, arguments, keywords)
        if self.is_last:
            self.watching()
            carry = self._layers(self._layer, last, last + 1, carry, arguments, keywords)
        return carry

    def _layers(
        self,
        call: Callable[..., Any],
        first: int,
        end: int,
        carry: Carry,
        arguments: Any,
        keywords: Any,
    ) -> Carry:
        """Run the layers from ``first`` up to ``end``, each by ``call``."""
        for index, layer in list(enumerate(self.layers))[first:end]:
            if index == 0 and self.is_first:
                carry = call(index, layer, arguments, keywords)
            elif index == len(self.layers) - 1 and self.is_last and hasattr(layer, "finish"):
                finish: Any = layer.finish
                carry = call(index, finish, (carry, *arguments), keywords)
            else:
                carry = call(index, layer, (carry,), {})
        return carry

    def _is_whole(self) -> bool:
        """Return whether the stage runs compiled as a whole: every layer depends on its input
        alone."""
        return (
            self.is_compiled
            and self.gate is None
            and all(known.masks is False for known in self.random)
        )

    def _compiled(self, key: object, call: Callable[..., Any]) -> Callable[..., Any]:
        if key not in self.calls:
            self.calls[key] = compiled(call)
        return self.calls[key]

    def _bare(self, index: int, layer: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        """Run a layer inside a compiled function, in which torch supports checkpoints in these
        forms only."""
        del index
        if self.recompute is Recompute.NONE:
            return layer(*arguments, **keywords)
        if self.recompute is Recompute.FULL:
            return checkpoint.checkpoint(layer, *arguments, use_reentrant=False, **keywords)
        context = functools.partial(checkpoint.create_selective_checkpoint_contexts, list(_KEPT))
        return checkpoint.checkpoint(
            layer, *arguments, use_reentrant=False, context_fn=context, **keywords
        )

    def _layer(self, index: int, layer: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        known = self.random[index]
        is_watched = self.is_last and index == len(self.layers) - 1
        if self.is_compiled and known.masks is False and not is_watched:
            layer = self._compiled(index, layer)
        if known.masks is not False:
            layer = masking(self.seed, self.first + index, self.moment, layer, known)
        layer = recomputed(
            self.recompute, deferring(self.deferral, layer), draws=known.others is not False
        )
        with known.watched(self.device):
            if self.gate is not None:
                return self.gate.run(index, layer, arguments, keywords)
            return layer(*arguments, **keywords)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast)


def deferring(deferral: Deferral | None, layer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer whose weight gradients are deferred. This goes inside recomputation, so that
    the recomputed layer defers the same."""
    if deferral is None:
        return layer

    def run(*arguments: Any, **keywords: Any) -> Any:
        with deferral:
            return layer(*arguments, **keywords)

    return run


def recomputed(
    recompute: Recompute, layer: Callable[..., Any], *, draws: bool
) -> Callable[..., Any]:
    """Return a layer that keeps fewer activations and recomputes the others; if it ``draws`` from
    torch's generators, it draws the same again."""
    match recompute:
        case Recompute.NONE:
            return layer
        case Recompute.FULL:
            context: Any = checkpoint.noop_context_fn
        case Recompute.SELECTIVE:
            context = _selective

    def run(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint.checkpoint(
            layer,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=draws,
            context_fn=context,
            **keywords,
        )

    return run


def _selective() -> tuple[Any, Any]:
    return checkpoint.create_selective_checkpoint_contexts(list(_KEPT))


def _nothing_of(result: Any, device: torch.device) -> Tensor:
    """Return a zero that depends on everything the model returned, as the loss of a part with
    weight zero. Its gradients are zero even if those of the part's own loss, such as a mean over no
    targets, are not numbers."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    return sum(
        ((leaf * 0.0).sum() for leaf in leaves if leaf.requires_grad),
        torch.zeros((), device=device),
    )


class _HandOn(BaseException):
    """A signal that ends ``loss_fn`` on a stage that is not the last; it is not an ``Exception``,
    so that no user code catches it."""

    def __init__(self, carry: Carry) -> None:
        super().__init__()
        self.carry = carry


class _StandIn:
    """An object that ``loss_fn`` gets in place of the model. Calling it runs the stage; plain
    attributes of the model can be read."""

    def __init__(self, stage: LayerStage, carry: Carry) -> None:
        self._stage = stage
        self._carry = carry
        self._called = False
        self.result: Any = None
        """The result of the model."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self._called:
            _refuse("a second call of the model", "one call of the model")
        self._called = True
        self.result = self._stage.run(self._carry, arguments, keywords)
        if self._stage.is_last:
            return self.result
        raise _HandOn(self.result)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage.model, name)
        if callable(value) or isinstance(value, Tensor | nn.Module):
            _refuse(
                f"model.{name}", "nothing of the model but calls of it: other stages hold the rest"
            )
        return value


def _refuse(found: str, expected: str) -> NoReturn:
    raise invalid("loss_fn", found, expected)
