"""Which rows change hands when one plan follows another, from whom to whom. Needs no torch.

A piece is a weight, a tensor of its optimizer's state or a buffer, with R rows (its first dim; 1 where it has none). A
rank holds an interval of them, before and after:

    (1)  it receives the rows that it holds after and not before
    (2)  from ranks that held them before: of several, from its own node, then from whoever sends the fewest bytes yet
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from argosy.cost.moving import missing

Interval = tuple[int, int]
"""Begin and end of rows."""
WAVE = 256 * 2**20
"""Bytes that are under way together."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Something that ranks hold rows of."""

    name: str
    """Of the weight, or of the layer whose buffer it is."""
    what: str
    """``value``, the name of a state, or that of a buffer."""
    row_bytes: int
    before: Mapping[int, Interval]
    """By rank."""
    after: Mapping[int, Interval]


class Move(NamedTuple):
    """Rows of a piece on their way."""

    piece: Piece
    source: int
    target: int
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        return (self.end - self.begin) * self.piece.row_bytes


def moves_between(pieces: Iterable[Piece], roster: Sequence[str]) -> list[Move]:
    """(1), (2), in the order of pieces; the same list on every rank."""
    nodes = [device.rpartition(".")[0] for device in roster]
    sent: dict[int, int] = defaultdict(int)
    moves = []
    for piece in pieces:
        for target, wanted in sorted(piece.after.items()):
            for begin, end in missing(wanted, piece.before.get(target, (0, 0))):
                for move in _deliver(piece, target, begin, end, nodes, sent):
                    sent[move.source] += move.bytes
                    moves.append(move)
    return moves


def _deliver(
    piece: Piece, target: int, begin: int, end: int, nodes: Sequence[str], sent: Mapping[int, int]
) -> Iterator[Move]:
    """(2)."""
    while begin < end:
        holders = [rank for rank, (first, last) in piece.before.items() if first <= begin < last]
        assert holders, f"nobody holds row {begin} of {piece.name} {piece.what}"
        source = min(holders, key=lambda rank: (nodes[rank] != nodes[target], sent[rank], rank))
        last = min(end, piece.before[source][1])
        yield Move(piece, source, target, begin, last)
        begin = last


def waves(pieces: Sequence[Piece], moves: Sequence[Move], most: int = WAVE) -> Iterator[tuple[list[Piece], list[Move]]]:
    """Pieces and their moves in portions of at most ``most`` bytes, one weight or layer at the least."""
    by_name: dict[str, tuple[list[Piece], list[Move]]] = {piece.name: ([], []) for piece in pieces}
    for piece in pieces:
        by_name[piece.name][0].append(piece)
    for move in moves:
        by_name[move.piece.name][1].append(move)
    some: tuple[list[Piece], list[Move]] = ([], [])
    for found, under_way in by_name.values():
        if some[0] and sum(move.bytes for move in (*some[1], *under_way)) > most:
            yield some
            some = ([], [])
        some = ([*some[0], *found], [*some[1], *under_way])
    if some[0]:
        yield some
