"""Divide a sequence for context parallelism: every device has one piece from the front and one from
the back.

For a sequence of S tokens and devices with shares r_i of the work, f_i tokens are cut off the front
for device i and as many off the back, outermost first:

    (1)  f       largest remainders of r S / 2 over the whole numbers of floor(S / 2), at least one
                 each
    (2)  front   [F_i, F_i + f_i)            with F_i the sum of f before i
    (3)  back    [S - F_i - f_i, S - F_i)    the last device also has the middle token of an odd S

Under causal attention a token attends to those before it. The mean position of (2) and (3) together
is the middle of the sequence for every device, so attention costs a device its share r_i of the
work, as everything else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from argosy.space.operations.sharding import unit_counts

Piece = tuple[int, int]
"""The first token of a piece, and one past its last."""


@dataclass(frozen=True)
class SequenceParts:
    """A division of a sequence that assigns tokens to each device of a group.

    >>> SequenceParts(10, (1, 4)).pieces
    (((0, 1), (9, 10)), ((1, 5), (5, 9)))
    """

    length: int
    fronts: tuple[int, ...]
    """Tokens of each device's front piece, by (1)."""

    @classmethod
    def by_shares(cls, length: int, shares: Sequence[float]) -> SequenceParts:
        """Return parts in proportion to shares of the work; each device needs at least two
        tokens."""
        return cls(length, unit_counts(length // 2, shares))

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, Piece], ...]:
        """Return the front (2) and back (3) pieces of every device."""
        ends = list(accumulate(self.fronts))
        pieces = []
        for end, count in zip(ends, self.fronts, strict=True):
            begin = end - count
            back = end if end == ends[-1] else self.length - end
            pieces.append(((begin, end), (back, self.length - begin)))
        return tuple(pieces)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Return the number of tokens of every device."""
        return tuple(sum(end - begin for begin, end in pieces) for pieces in self.pieces)

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(count / self.length for count in self.counts)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Return the tokens of all devices, one device after the other."""
        return tuple(
            token for pieces in self.pieces for begin, end in pieces for token in range(begin, end)
        )
