"""Replace views by strides with operations on elements by their places.

Tensors of a plan may lie in another order in memory than in the captured program, and torch has no
right gradient for writes into such views. ``adaptive_avg_pool2d`` and ``fill_diagonal_`` make such
views.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from argosy.errors import invalid
from argosy.workload.capture.blame import running_line


def _elements(x: Tensor, size: list[int], stride: list[int], offset: int | None) -> Tensor:
    """Return the places of a view by strides among the elements of a contiguous tensor."""
    if not x.is_contiguous():
        raise invalid(
            running_line() or "loss",
            "a view by strides of a tensor that is not contiguous",
            "views that do not depend on the order in memory",
            suggestion="call .contiguous() before it",
        )
    places = torch.full(size, offset or 0, device=x.device)
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        shape = [-1 if axis == dim else 1 for axis in range(len(size))]
        places = places + (torch.arange(count, device=x.device) * step).view(shape)
    return places.flatten()


def as_strided(x: Tensor, size: list[int], stride: list[int], offset: int | None = None) -> Tensor:
    """Return the elements of a view by strides: another shape of the same elements, elements of
    each row, or elements of all rows."""
    places = _elements(x, size, stride, offset)
    if not offset and _is_reshape(x, size, stride):
        return x.reshape(size)
    if x.dim() > 1 and not offset and _keeps_rows(x, size, stride):
        of_a_row = _elements(x[0], size[1:], stride[1:], 0)
        return x.flatten(1)[:, of_a_row].view(size)
    return x.flatten().index_select(0, places).view(size)


def _is_reshape(x: Tensor, size: list[int], stride: list[int]) -> bool:
    """Return whether a view has all elements of a contiguous tensor in their order."""
    steps = [step for count, step in zip(size, stride, strict=True) if count > 1]
    counts = [count for count in size if count > 1]
    in_order = [math.prod(counts[at + 1 :]) for at in range(len(counts))]
    return math.prod(size) == x.numel() and steps == in_order


def _keeps_rows(x: Tensor, size: list[int], stride: list[int]) -> bool:
    """Return whether row i of a view has elements of row i of a contiguous tensor alone."""
    last = sum((count - 1) * step for count, step in zip(size[1:], stride[1:], strict=True))
    return size[:1] == [x.shape[0]] and stride[0] == x.stride(0) and last < x.stride(0)


def as_strided_scatter(
    x: Tensor, source: Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> Tensor:
    """Write into the elements of a view by strides, such as those of a diagonal."""
    places = _elements(x, size, stride, offset)
    return x.flatten().scatter(0, places, source.flatten()).view(x.shape)
