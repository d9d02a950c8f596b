"""Describe how several devices share a tensor: whole on each, cut along a dim, or as partial sums.

A cut of a dim of n elements is written (outer, units): the dim is seen as

    (1)  n = outer x units x inner

and every device holds its share of the ``units``, for each of the ``outer`` repeats. ``outer`` = 1
is the plain cut into consecutive pieces; a larger value is the *strided* cut that survives a
reshape (heads of a fused query-key-value matrix, positions once samples and positions are one dim).
Shares of units follow the ratios, rounded so that none is lost:

    (2)  counts = largest remainders of ratio x units, at least one each

Because (2) depends on units alone, two tensors with the same units are always cut at the same
places, and in the flat order of elements a cut is just (repeats, units), with

    (3)  repeats = (product of the dims before) x outer

so a reshape maps a cut to the dim that (3) falls into, or to none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from argosy.errors import Mismatch

# The size of each dim of a tensor.
Shape = tuple[int, ...]
# Longer texts, in characters, are rejected before parsing: numbers with more digits are no sizes of
# tensors.
_LONGEST_STATE = 60


class Layout(StrEnum):
    """A layout that tells how devices share a tensor."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    PARTIAL = "partial"


# Numbers whose hash, unlike that of text, is equal in every process.
_NUMBER = {layout: number for number, layout in enumerate(Layout)}


@dataclass(frozen=True, eq=False)
class State:
    """A way in which a tensor is shared. ``dim``, ``units`` and ``outer`` have a meaning only if it
    is sharded.

    States are compared far more often than created, so equal states are one object: create them
    with the functions below, never directly.
    """

    layout: Layout
    dim: int = -1
    units: int = 0
    outer: int = 1

    def __post_init__(self) -> None:
        code = hash((_NUMBER[self.layout], self.dim, self.units, self.outer))
        object.__setattr__(self, "_code", code)  # the same in every process

    def __hash__(self) -> int:
        return self._code  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Callable[..., State], tuple[object, ...]]:
        return _state, (self.layout, self.dim, self.units, self.outer)

    def __str__(self) -> str:
        """
        >>> str(REPLICATED), str(PARTIAL), str(sharded(1, 8)), str(sharded(0, 12, outer=3))
        ('whole', 'partial', 'dim 1 / 8', 'dim 0 / 3x12')
        """
        if self.layout is not Layout.SHARDED:
            return "whole" if self.layout is Layout.REPLICATED else "partial"
        units = str(self.units) if self.outer == 1 else f"{self.outer}x{self.units}"
        return f"dim {self.dim} / {units}"

    @property
    def is_sharded(self) -> bool:
        return self.layout is Layout.SHARDED


@cache
def _state(layout: Layout, dim: int, units: int, outer: int) -> State:
    return State(layout, dim, units, outer)


REPLICATED = _state(Layout.REPLICATED, -1, 0, 1)
PARTIAL = _state(Layout.PARTIAL, -1, 0, 1)


@cache
def sharded(dim: int, units: int, outer: int = 1) -> State:
    return _state(Layout.SHARDED, dim, units, outer)


_CUT = re.compile(r"dim (\d+) / (?:(\d+)x)?(\d+)")


def parse_state(text: str) -> State:
    """Return the state with this text; raise Mismatch for any other text.

    >>> states = (REPLICATED, PARTIAL, sharded(0, 12, outer=3))
    >>> [parse_state(str(state)) is state for state in states]
    [True, True, True]
    """
    if text in ("whole", "partial"):
        return REPLICATED if text == "whole" else PARTIAL
    match = _CUT.fullmatch(text)
    if match is None or len(text) > _LONGEST_STATE:
        raise Mismatch(text, "whole, partial or a cut such as dim 1 / 8")
    dim, outer, units = (int(group or 0) for group in match.groups())
    return sharded(dim, units, outer=outer or 1)


def fits(shape: Shape, state: State) -> bool:
    """Return whether (1) holds for the dim that a state names."""
    return not state.is_sharded or (
        state.dim < len(shape) and shape[state.dim] % (state.outer * state.units) == 0
    )


def unit_counts(units: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Return how many of the units each device holds, by (2).

    >>> unit_counts(10, (0.7, 0.3)), unit_counts(8, (0.5, 0.3, 0.2))
    ((7, 3), (4, 2, 2))
    >>> unit_counts(4, (0.97, 0.01, 0.01, 0.01))
    (1, 1, 1, 1)
    """
    assert units >= len(ratios), "a dim with fewer units than devices is not cut"
    exact = [ratio * units for ratio in ratios]
    counts = [max(int(part + 1e-9), 1) for part in exact]
    # "At least one each" gave too many units: take some from those furthest above their share.
    while sum(counts) > units:
        giver = max(
            (index for index in range(len(counts)) if counts[index] > 1),
            key=lambda i: counts[i] - exact[i],
        )
        counts[giver] -= 1
    while sum(counts) < units:
        taker = max(range(len(counts)), key=lambda i: (exact[i] - counts[i], -i))
        counts[taker] += 1
    return tuple(counts)


def local_shape(shape: Shape, state: State, ratios: Sequence[float], rank: int) -> Shape:
    """Return the shape of the shard that one device holds."""
    if not state.is_sharded:
        return shape
    length = shape[state.dim] // state.units * unit_counts(state.units, ratios)[rank]
    return (*shape[: state.dim], length, *shape[state.dim + 1 :])


def flat_cut(shape: Shape, state: State) -> tuple[int, int]:
    """Return (repeats, units) of a sharded state in the flat order of elements, by (3)."""
    return math.prod(shape[: state.dim]) * state.outer, state.units


def from_flat_cut(shape: Shape, repeats: int, units: int) -> State | None:
    """Return the state of a tensor with a given flat cut, or None if no dim can carry it.

    >>> from_flat_cut((4, 6, 8), *flat_cut((24, 8), sharded(0, 6, outer=4)))
    State(layout=<Layout.SHARDED: 'sharded'>, dim=1, units=6, outer=1)
    >>> from_flat_cut((24, 8), *flat_cut((4, 6, 8), sharded(1, 3)))
    State(layout=<Layout.SHARDED: 'sharded'>, dim=0, units=3, outer=4)
    """
    before = 1
    for dim, size in enumerate(shape):
        if size > 1 and repeats % before == 0 and size % (repeats // before * units) == 0:
            return sharded(dim, units, outer=repeats // before)
        before *= size
    return None
