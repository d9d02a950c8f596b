"""Run look-ups and losses on the rows of a table, or on the classes, that one device of a group
holds.

A language model's output matrix may be cut along its classes. Then device i has the logits x_ik of
its own classes k only, and the group computes for every position

    (1)  n_i  = log sum over its own k of exp(x_ik)
    (2)  log p_ik = x_ik - log sum over i of exp(n_i)        one all-gather of n, a number each
    (3)  loss = - log p of the target                        on the device that holds it, else 0

so that no device ever has the logits of all classes. With g the gradient of (2), its backward is

    (4)  g_ik - exp(log p_ik) sum over all k of g_k          one all-reduce of a number each
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from argosy.runtime.communication.exchange import GroupExchange

EMBEDDING = "aten.embedding.default"
# A value of ATen's reduction argument.
_NO_REDUCTION = 0


class HeldRows(NamedTuple):
    """The rows or classes that a device holds."""

    first: int
    num_rows: int
    total: int
    """The number of rows or classes on all devices."""


def lookup(rows: HeldRows, table: Tensor, ids: Tensor, padding: int = -1, *_: Any) -> Tensor:
    """Return the rows of a table that this device holds, and zeros for the others."""
    own, places = _own(rows, ids)
    last = rows.first + rows.num_rows
    empty = padding - rows.first if rows.first <= padding < last else None
    return F.embedding(places, table, padding_idx=empty) * own.unsqueeze(-1)


def picked_losses(
    rows: HeldRows, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> tuple[Tensor, Tensor]:
    """Return the loss (3) of the targets that this device holds, and the weight of all targets that
    count."""
    is_counted = target != ignore
    own, places = _own(rows, target.where(is_counted, 0))
    counts = is_counted.to(x.dtype)
    if weight is not None:
        counts = counts * weight[target.clamp(0, len(weight) - 1)]
    dim = 1 if x.dim() > 1 else 0
    chosen = x.gather(dim, places.unsqueeze(dim)).squeeze(dim)
    losses = -torch.where(own & is_counted, chosen, 0.0) * counts
    return losses if reduction == _NO_REDUCTION else losses.sum(), counts.sum()


def normalised(exchange: GroupExchange, x: Tensor, dim: int, to_float: bool = False) -> Tensor:
    """Return log-probabilities (2) of the classes that this device holds, which are in ``dim``."""
    result: Tensor = _Normalised.apply(x.float() if to_float else x, dim, exchange)
    return result


def _own(rows: HeldRows, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of some rows this device holds, and their places there (any for the others).

    Torch refuses a number that no device has, on a GPU without waiting for it.
    """
    in_range = ((ids >= 0) & (ids < rows.total)).all()
    torch._assert_async(in_range, f"an index is out of range: expected 0 to {rows.total - 1}")
    own = (ids >= rows.first) & (ids < rows.first + rows.num_rows)
    return own, (ids - rows.first).clamp(0, rows.num_rows - 1)


class _Normalised(torch.autograd.Function):
    """A function that computes (2), with (4) as its backward. Sums are in float32 at least."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, exchange: GroupExchange) -> Tensor:
        wide = x if x.dtype is torch.float64 else x.float()
        own = torch.logsumexp(wide, dim)
        with exchange.exchanging():
            total = torch.logsumexp(exchange.all_parts(own), 0)
        result = (wide - total.unsqueeze(dim)).to(x.dtype)
        ctx.dim, ctx.exchange = dim, exchange
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (result,), (gradient,) = ctx.saved_tensors, gradients
        wide = gradient if gradient.dtype is torch.float64 else gradient.float()
        with ctx.exchange.exchanging():
            total = ctx.exchange.all_reduce(wide.sum(ctx.dim))
        own = wide - result.to(wide.dtype).exp() * total.unsqueeze(ctx.dim)
        return own.to(gradient.dtype), None, None
