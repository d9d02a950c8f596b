"""A stage that computes: a range of a model's layers, with the user's loss around the last of them.

The user gives ``loss_fn(model, batch)``. A stage calls it with a stand-in for the model, which runs
the stage's own layers when it is called: on the first stage from the arguments it is called with,
on every other from what the stage before handed on. Where more stages follow, the call of
``loss_fn`` ends there; on the last it goes on to the loss.
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

from argosy.errors import InputError, Problem
from argosy.plan.plan import Recompute
from argosy.runtime.graphs.calls import function
from argosy.runtime.stages.carry import Carry
from argosy.runtime.stages.compiling import compiled
from argosy.runtime.stages.defer import Deferral
from argosy.runtime.stages.dropout import Randomness, drops, masking
from argosy.runtime.stages.moment import Moment
from argosy.runtime.stages.parameters import Weight
from argosy.runtime.stages.weighing import LossWatch, PartLoss
from argosy.space.operations.segments import KEPT_PRODUCTS

LossFunction = Callable[[Any, Any], Any]
"""``loss_fn(model, batch)``: a mean over the samples or the targets of the batch, or a pair of a
mean and the weight that parts of the batch are averaged by (``weighing``)."""

_KEPT = tuple(function(op) for op in KEPT_PRODUCTS)
"""What selective recomputation keeps: products with weights. Attention and everything cheap is
computed again."""


class StageProgram(Protocol):
    """What the executor needs of a stage, whoever built it."""

    deferral: Deferral | None
    """Where weight gradients are put off, under a schedule that splits backwards in two."""

    gate: LayerGate | None

    def begin(self, batch: Any, moment: Moment) -> None:
        """A step on a global batch begins; ``moment`` is that of all its samples."""

    def finish(self) -> None:
        """All micro-batches of a step have run."""

    @property
    def needs_batch(self) -> bool:
        """Whether it reads rows of the batch."""

    @property
    def num_layers(self) -> int:
        """Parts around which a gate may gather weights."""

    def __call__(self, carry: Carry, batch: Any, moment: Moment) -> Carry | PartLoss:
        """What the next stage gets, or on the last stage the loss of this part. ``carry`` is None
        on the first."""

    def users(self, weight: Weight) -> list[int]:
        """The parts that use a weight."""


class LayerGate(Protocol):
    """Something that happens around every layer, such as gathering its weights."""

    def run(self, index: int, layer: Callable[..., Any], arguments: Any, keywords: Any) -> Any: ...


class LayerStage:
    """A ``StageProgram`` made of a model's own layers."""

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
        """Called before the last layer, from where on the calls that make a loss are watched."""
        self.is_compiled = is_compiled
        self.calls: dict[object, Callable[..., Any]] = {}
        """Compiled functions: of the whole stage and of its layers."""

    def begin(self, batch: Any, moment: Moment) -> None:
        """Layers see nothing but their own samples."""

    def finish(self) -> None:
        """Layers change their buffers themselves."""

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
        """The stage's layers, one after the other."""
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
        """Some of the layers, each run by ``call``."""
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
        """Whether the stage runs compiled as a whole: no layer has to do with anything but its
        input."""
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
        """A layer within what is compiled, where torch knows checkpoints in these forms only."""
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
    """Weight gradients put off; inside recomputation, so that what is computed again puts off the
    same."""
    if deferral is None:
        return layer

    def run(*arguments: Any, **keywords: Any) -> Any:
        with deferral:
            return layer(*arguments, **keywords)

    return run


def recomputed(
    recompute: Recompute, layer: Callable[..., Any], *, draws: bool
) -> Callable[..., Any]:
    """A layer that keeps less and computes it again; what it ``draws`` from torch's generators it
    draws again, too."""
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
    contexts: tuple[Any, Any] = checkpoint.create_selective_checkpoint_contexts(list(_KEPT))
    return contexts


def _nothing_of(result: Any, device: torch.device) -> Tensor:
    """A zero that depends on all that the model returned: the loss of a part that counts for
    nothing. Its gradients are zero even if those of the part's own loss, such as a mean over no
    targets, are not numbers."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    return sum(
        ((leaf * 0.0).sum() for leaf in leaves if leaf.requires_grad),
        torch.zeros((), device=device),
    )


class _HandOn(BaseException):
    """Ends a ``loss_fn`` on a stage that is not the last; not an ``Exception``, so that no user
    code catches it."""

    def __init__(self, carry: Carry) -> None:
        super().__init__()
        self.carry = carry


class _StandIn:
    """What ``loss_fn`` gets in place of the model. Calling it runs the stage; its plain settings
    can be read."""

    def __init__(self, stage: LayerStage, carry: Carry) -> None:
        self._stage = stage
        self._carry = carry
        self._called = False
        self.result: Any = None
        """What the model returned."""

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
    raise InputError([Problem(path="loss_fn", found=found, expected=expected)])
