"""Locate the part of a tensor that a rank holds in the whole tensor, as boxes of consecutive
elements in every dim.

Rows are one box. A cut of a dim into (outer, units) with inner elements each
(``space.operations.sharding``) is ``outer`` boxes:

    (1)  repeat o of units [a, a + n)
             -> [(o units + a) inner, (o units + a + n) inner)  of the whole dim,
                [o n inner, (o + 1) n inner)                    of the part
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from argosy.cost.regions import Region, overlap
from argosy.space.operations.sharding import State, unit_counts

Shape = tuple[int, ...]
"""Sizes or positions by dim."""
Boxes = tuple[tuple["TensorBox", ...], ...]
"""For each of several tensors, the boxes of its part."""


class TensorBox(NamedTuple):
    """A block of elements that are consecutive in every dim."""

    whole: Shape
    """The position of its first element in the whole tensor."""
    local: Shape
    """The position of its first element in the held part."""
    sizes: Shape

    @property
    def region(self) -> Region:
        """Return begin and end in the whole tensor, by dim."""
        return tuple(
            (first, first + size) for first, size in zip(self.whole, self.sizes, strict=True)
        )

    def of(self, part: Tensor) -> Tensor:
        """Return the box as a view of the held part."""
        return _window(part, self.local, self.sizes)

    def out_of(self, whole: Tensor) -> Tensor:
        """Return the box as a view of the whole tensor."""
        return _window(whole, self.whole, self.sizes)


def rows(first: int, shape: Sequence[int]) -> tuple[TensorBox, ...]:
    """Return the box of a tensor of this shape that begins with a given row of the whole."""
    sizes = tuple(shape)
    return (
        TensorBox((first, *(0,) * (len(sizes) - 1)) if sizes else (), (0,) * len(sizes), sizes),
    )


def box_at(region: Region) -> TensorBox:
    """Return the box of a region that is held as a tensor of its own."""
    first = tuple(int(begin) for begin, _ in region)
    return TensorBox(first, (0,) * len(region), tuple(int(end - begin) for begin, end in region))


def boxes_of(
    shape: Shape, state: State, ratios: Sequence[float], member: int
) -> tuple[TensorBox, ...]:
    """Return the boxes of a member's part of a tensor (1)."""
    if not state.is_sharded:
        return rows(0, shape)
    counts = unit_counts(state.units, ratios)
    inner = shape[state.dim] // (state.outer * state.units)
    begin, length = sum(counts[:member]) * inner, counts[member] * inner
    boxes = []
    for repeat in range(state.outer):
        whole, local = [0] * len(shape), [0] * len(shape)
        whole[state.dim], local[state.dim] = repeat * state.units * inner + begin, repeat * length
        sizes = (*shape[: state.dim], length, *shape[state.dim + 1 :])
        boxes.append(TensorBox(tuple(whole), tuple(local), sizes))
    return tuple(boxes)


def rows_of(boxes: Sequence[TensorBox], begin: int, end: int) -> tuple[TensorBox, ...]:
    """Return the boxes that lie in given rows of the held part; for no rows, one box without
    elements."""
    if begin == end:
        nothing = boxes[0]
        return (nothing._replace(local=(0,) * len(nothing.local), sizes=(0, *nothing.sizes[1:])),)
    selected = []
    for box in boxes:
        first, last = max(begin, box.local[0]), min(end, box.local[0] + box.sizes[0])
        if first < last:
            skipped = first - box.local[0]
            whole = (box.whole[0] + skipped, *box.whole[1:])
            selected.append(
                TensorBox(whole, (first - begin, *box.local[1:]), (last - first, *box.sizes[1:]))
            )
    return tuple(selected)


def held_shape(boxes: Sequence[TensorBox]) -> Shape:
    """Return the shape of the held part that has these boxes."""
    ends = (
        [first + size for first, size in zip(box.local, box.sizes, strict=True)] for box in boxes
    )
    return tuple(map(max, zip(*ends, strict=True)))


class HeldPart(NamedTuple):
    """A part of a tensor that a rank holds, with its boxes in the whole."""

    tensor: Tensor
    boxes: tuple[TensorBox, ...]

    @staticmethod
    def empty(boxes: tuple[TensorBox, ...], **options: Any) -> HeldPart:
        """Return memory for given boxes; ``options`` are torch's."""
        return HeldPart(torch.empty(held_shape(boxes), **options), boxes)

    def has(self, region: Region) -> bool:
        """Return whether a region of the whole lies in one of the boxes."""
        return any(overlap(box.region, region) == region for box in self.boxes)

    def at(self, region: Region) -> Tensor:
        """Return a region of the whole, which must lie in one of the boxes, as a view."""
        box = next(box for box in self.boxes if overlap(box.region, region) == region)
        local = [first - begin for first, begin in zip(box.local, box.whole, strict=True)]
        view = self.tensor
        for dim, ((begin, end), shift) in enumerate(zip(region, local, strict=True)):
            view = view.narrow(dim, int(begin) + shift, int(end - begin))
        return view

    def take(self, source: HeldPart) -> None:
        """Copy the elements that both parts hold from ``source``."""
        for box in self.boxes:
            for given in source.boxes:
                common = overlap(box.region, given.region)
                if common is not None:
                    self.at(common).copy_(source.at(common))


class HeldParts(NamedTuple):
    """All parts of a tensor that a rank holds, in one tensor or several."""

    parts: tuple[HeldPart, ...]

    def at(self, region: Region) -> Tensor:
        """Return a region of the whole, which must lie in one of the boxes, as a view."""
        return next(part for part in self.parts if part.has(region)).at(region)


def _window(tensor: Tensor, begin: Shape, sizes: Shape) -> Tensor:
    for dim, (first, length) in enumerate(zip(begin, sizes, strict=True)):
        tensor = tensor.narrow(dim, first, length)
    return tensor
