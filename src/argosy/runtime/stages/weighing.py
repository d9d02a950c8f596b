"""Weigh the loss of a part of the batch in the loss of the whole batch.

A part p of n samples with the loss l, of a batch of N samples, has a weight per sample f:

    (1)  whole loss   = sum_p n f l / sum_p n f
    (2)  gradient     = sum_p (n f / N) dl  *  N / sum_p n f
         (the second factor is known after the last part)

so that f = 1 is a mean over samples. For a mean over the targets that count, such as the tokens
that are not masked, f is their number per sample, divided by all targets per sample of the step's
first batch to keep numbers small. It is found by watching ``cross_entropy`` and ``nll_loss`` while
the loss is computed; for any other weighted mean ``loss_fn`` returns ``(loss, weight)``, and
``(loss, None)`` for a share of the whole loss, such as a sum divided by a number that the batch
contains: shares are added up. Any other loss is refused as soon as parts differ:

    (3)  targets per sample (if the loss is that mean), or those that count (if it is more than that
         mean), must be the same for all parts of a batch
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from argosy.errors import RunError, invalid

_MEANS = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}
"""Functions that compute a mean over targets, with their signatures."""
_DIVISIONS = {torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__}
"""Functions that divide."""
_MULTIPLES = {*_DIVISIONS, torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
"""Functions that return a multiple of their first argument."""
_SAME = {
    Tensor.float,
    Tensor.double,
    Tensor.to,
    Tensor.mean,
    torch.mean,
    Tensor.sum,
    torch.sum,
    Tensor.squeeze,
    Tensor.view,
    Tensor.view_as,
    Tensor.reshape,
}
"""Functions that leave the value of a scalar unchanged."""
_PAIR = "return (loss, weight), with the weight that its parts are averaged by, such as mask.sum()"
"""The suggestion in messages about ``loss_fn``."""


@dataclass(frozen=True)
class PartLoss:
    """The loss that a part of the batch has, with its weight."""

    loss: Tensor
    fill: Tensor | float = 1.0
    """f of (1), or the share of its targets that count if it is a mean over targets."""
    targets: Tensor | float = 0.0
    """The number that (3) compares; 0 if nothing is known."""
    is_over_targets: bool = False
    is_share: bool = False
    """True if the whole loss is the sum of such parts."""


class LossWatch(TorchFunctionMode):
    """A mode that finds what a loss is a mean over, from the calls that compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.means: dict[int, tuple[Tensor, Tensor, int]] = {}
        """Means over targets by identity, each with the weight of the targets that count and the
        number of all targets."""
        self.divides = False
        """True if a scalar that depends on the batch was divided by another."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function in _MEANS:
            self._mean(result, **_MEANS[function].bind(*args, **kwargs).arguments)
        elif (
            function in _DIVISIONS and _is_number(args[0]) and len(args) > 1 and _is_number(args[1])
        ):
            self.divides = self.divides or not args[1].requires_grad
        self._follow(function, args, result)
        return result

    def _mean(self, result: Tensor, *, target: Tensor, **options: Any) -> None:
        old = options.get("size_average"), options.get("reduce")
        if options.get("reduction", "mean") != "mean" or False in old or target.is_floating_point():
            return
        counted = target != options.get("ignore_index", -100)
        weights = options.get("weight")
        if weights is None:
            total: Tensor = counted.sum()
        else:
            total = weights[target.where(counted, 0)].where(counted, 0).sum()
        self.means[id(result)] = (result, total, target.numel())

    def _follow(self, function: Any, args: Any, result: Any) -> None:
        """Record that a multiple of a mean is a mean over the same targets."""
        if function is Tensor.view_as:  # its second argument gives the shape alone
            args = args[:1]
        known = [arg for arg in args if isinstance(arg, Tensor) and id(arg) in self.means]
        if len(known) != 1 or not isinstance(result, Tensor) or result.dim() > 0:
            return
        plain = sum(isinstance(arg, Tensor) for arg in args) == 1
        if plain and (function in _MULTIPLES or function in _SAME):
            self.means[id(result)] = (result, *self.means[id(known[0])][1:])

    def judged(self, loss: Any, samples: int) -> PartLoss:
        """Return the loss of a part of ``samples`` samples, from what ``loss_fn`` returned."""
        if isinstance(loss, tuple) and len(loss) == 2 and loss[1] is None:
            if self.means:
                actual = "a mean over targets with the weight None"
                expected = "a sum divided by a number of the batch"
                raise invalid("loss_fn", actual, expected)
            return PartLoss(_checked(loss[0]), is_share=True)
        if isinstance(loss, tuple) and len(loss) == 2:
            return PartLoss(_checked(loss[0]), _weight(loss[1]) / samples)
        _checked(loss)
        if id(loss) in self.means:
            _, total, count = self.means[id(loss)]
            return PartLoss(
                loss, total.double() / max(1, count), count / samples, is_over_targets=True
            )
        if self.divides:
            actual = "a mean over a part of the batch, divided by a number that depends on the part"
            raise invalid("loss_fn", actual, "a mean over samples", suggestion=_PAIR)
        counts = [total for _, total, _ in self.means.values()]
        return PartLoss(loss, 1.0, torch.stack(counts).sum().double() / samples if counts else 0.0)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _checked(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    actual = (
        f"a tensor of shape {tuple(loss.shape)}"
        if isinstance(loss, Tensor)
        else type(loss).__name__
    )
    expected = "a scalar tensor, the mean over samples, or a pair of one and its weight"
    raise invalid("loss_fn", actual, expected)


def _weight(weight: Any) -> Tensor | float:
    single = isinstance(weight, Tensor) and weight.dim() == 0
    if single or (isinstance(weight, (int, float)) and not isinstance(weight, bool)):
        return weight.detach().double() if isinstance(weight, Tensor) else float(weight)
    expected = "a number or a scalar tensor, such as mask.sum()"
    raise invalid("loss_fn", f"a weight of {type(weight).__name__}", expected)


class Tally:
    """The sums over the parts that this rank computed since the last update: of n f; of shares; and
    per batch of n, n t and n t t, with t the targets of (3)."""

    def __init__(self) -> None:
        self.plain = [0.0, 0.0]
        """Sums of numbers that are on the host."""
        self.measured: list[tuple[int, Tensor]] = []
        """Places and numbers that are still being computed on a device."""
        self.reference: float | None = None
        """Targets per sample of the first batch."""

    def begin_batch(self) -> None:
        self.plain += [0.0] * 3

    def weighted(self, part: PartLoss, samples: int) -> Tensor | float:
        """Return f of a part, after adding it to the sums."""
        fill = part.fill
        if part.is_over_targets:
            assert isinstance(part.targets, float)
            self.reference = self.reference or part.targets or None
            fill = fill * (part.targets / (self.reference or 1.0))
        last = len(self.plain)
        self._add(1 if part.is_share else 0, fill, samples)
        for place, value in enumerate((1.0, part.targets, part.targets * part.targets), last - 3):
            self._add(place, value, samples)
        return fill

    def _add(self, place: int, value: Tensor | float, samples: int) -> None:
        if isinstance(value, Tensor):
            self.measured.append((place, value.double() * samples))
        else:
            self.plain[place] += samples * value

    def sums(self, like: Tensor) -> Tensor:
        """Return all sums, on the device of ``like``."""
        totals = torch.tensor(self.plain, dtype=torch.float64).to(like.device, non_blocking=True)
        if self.measured:
            places = torch.tensor([place for place, _ in self.measured]).to(
                like.device, non_blocking=True
            )
            values = [value.to(like.device, non_blocking=True) for _, value in self.measured]
            totals.index_add_(0, places, torch.stack(values))
        return totals


@dataclass
class Accumulated:
    """Losses and weights that this rank computed since the last update."""

    begin: float = field(default_factory=time.perf_counter)
    tally: Tally = field(default_factory=Tally)
    losses: list[Tensor] = field(default_factory=list)
    """The weighted losses of micro-batches."""
    samples: int = 0
    """The samples of all ranks together."""


def weight_of(sums: Sequence[float], step: int, global_batch: int) -> float:
    """Return the divisor that turns the sum of weighted losses into the whole loss (2); raise a
    ``RunError`` if there is none."""
    total, shares, *batches = sums
    if total <= 0 and not shares:
        raise RunError(f"no target of step {step} counts: all are masked, or their weights are 0")
    if total and shares:
        raise RunError(f"loss_fn returned means as well as shares of the whole loss in step {step}")
    for first in range(0, len(batches), 3):
        samples, targets, squares = batches[first : first + 3]
        mean = targets / samples
        if squares / samples - mean * mean > 1e-6 * mean * mean:
            raise RunError(
                f"the loss of step {step} is a mean over numbers of targets that differ between "
                f"parts of the batch, and not only that mean; let loss_fn {_PAIR}"
            )
    return 1.0 if shares else total / global_batch
