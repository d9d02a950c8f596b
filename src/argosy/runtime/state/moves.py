"""Find what ranks send each other when one plan follows another. Needs no torch.

A piece is a weight, a tensor of its optimizer's state or a buffer. A rank holds regions of it,
before and after. It receives what it lacks as ``cost.moving`` prices it: from a rank of its own
node that held it, or else from one of its node that receives it too and passes it on, or else from
any rank that held it; of several, from the one that sends the fewest bytes so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from argosy.cost.regions import Region, outside, tiered_deliveries, volume
from argosy.units import MIB

# Bytes that are in flight together, which bounds the additional memory of a migration.
WAVE = 256 * MIB


@dataclass(frozen=True, kw_only=True)
class HeldPiece:
    """A tensor that ranks hold regions of, before and after a migration."""

    name: str
    """The name of the weight, or the path of the buffer."""
    what: str
    """``value``, the name of a state, or ``buffer``."""
    item_bytes: int
    """Bytes of one element."""
    before: Mapping[int, Sequence[Region]]
    """Regions by rank, before the migration."""
    after: Mapping[int, Sequence[Region]]


class RegionMove(NamedTuple):
    """A region of a piece that one rank sends to another."""

    piece: HeldPiece
    source: int
    target: int
    region: Region
    is_passed_on: bool = False
    """True if the source receives the region itself, in the same migration."""

    @property
    def bytes(self) -> int:
        return int(volume([self.region])) * self.piece.item_bytes


# The tier of sources that receive a region themselves, in the same migration.
_PASSED_ON = 1


def moves_between(pieces: Iterable[HeldPiece], roster: Sequence[str]) -> list[RegionMove]:
    """Return what ranks send each other, in the order of pieces; the list is equal on every
    rank."""
    nodes = [device.rpartition(".")[0] for device in roster]
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    moves: list[RegionMove] = []

    def idlest(ranks: list[int], _: int) -> int:
        return min(ranks, key=lambda rank: (sent[rank], rank))

    for piece in pieces:
        arrived: dict[int, list[Region]] = defaultdict(list)
        for target in sorted(piece.after, key=lambda rank: (received[rank], rank)):
            missing = outside(piece.after[target], piece.before.get(target, ()))
            if not missing:
                continue
            near = {rank for rank, node in enumerate(nodes) if node == nodes[target]} - {target}
            tiers = [
                {rank: regions for rank, regions in offers.items() if rank in near}
                for offers in (piece.before, arrived)
            ]
            for tier, source, region in tiered_deliveries(
                target, missing, [*tiers, piece.before], idlest
            ):
                moves.append(RegionMove(piece, source, target, region, tier == _PASSED_ON))
                sent[source] += moves[-1].bytes
                received[target] += moves[-1].bytes
                if tier != _PASSED_ON:
                    arrived[target].append(region)
    return moves


def waves(
    pieces: Sequence[HeldPiece], moves: Sequence[RegionMove], most: int = WAVE
) -> Iterator[tuple[list[HeldPiece], list[RegionMove]]]:
    """Yield pieces and their moves in portions of at most ``most`` bytes, but at least one weight
    or buffer each."""
    by_name: dict[str, tuple[list[HeldPiece], list[RegionMove]]] = {
        piece.name: ([], []) for piece in pieces
    }
    for piece in pieces:
        by_name[piece.name][0].append(piece)
    for move in moves:
        by_name[move.piece.name][1].append(move)
    portion: tuple[list[HeldPiece], list[RegionMove]] = ([], [])
    for named_pieces, named_moves in by_name.values():
        if portion[0] and sum(move.bytes for move in (*portion[1], *named_moves)) > most:
            yield portion
            portion = ([], [])
        portion = ([*portion[0], *named_pieces], [*portion[1], *named_moves])
    if portion[0]:
        yield portion
