"""Keep copies of training state in the agents' memory, and find what can be restored from them.

A rank's copy is one block of bytes and a header that lists its pieces: regions of a weight, of
optimizer state, of a buffer. Copies of one generation and step belong together. They are *whole* if
their pieces cover every element that the ranks had at that time, which they counted together; so a
missing part that only a lost host held is detected. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from argosy.cost.regions import Region, volume

CopyTime = tuple[int, int]
"""Generation and steps done; a copy of a later generation is newer, no matter its step."""


@dataclass(frozen=True, kw_only=True)
class BlockRegion:
    """A region of one tensor, stored row by row within a block of bytes."""

    entry: str
    """``model.NAME`` or ``optimizer.NAME.WHAT``."""
    first: tuple[int, ...]
    """The index of its first element."""
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    """The shape of the whole tensor; empty for a scalar."""
    dtype: str
    begin: int
    """The index of its first byte in the block."""
    end: int

    @property
    def region(self) -> Region:
        return tuple(
            (first, first + size) for first, size in zip(self.first, self.sizes, strict=True)
        )

    def rows(self, begin: int, end: int) -> BlockRegion:
        """Return some of its rows, counted in the whole tensor; they are consecutive in the
        block."""
        if not self.sizes:
            return self
        size = (self.end - self.begin) // self.sizes[0]
        at = self.begin + (begin - self.first[0]) * size
        first, sizes = (begin, *self.first[1:]), (end - begin, *self.sizes[1:])
        return replace(self, first=first, sizes=sizes, begin=at, end=at + (end - begin) * size)


@dataclass(frozen=True, kw_only=True)
class BlockHeader:
    """A header that lists the content of a block."""

    generation: int
    step: int
    """Steps done."""
    rank: int
    scale: float
    """The loss scale."""
    calm: int = 0
    """Steps for which the loss scale has not changed (``LossScale``)."""
    entries: int
    """The number of distinct tensors that all ranks held together."""
    elements: int
    """The number of their elements, each counted once."""
    pieces: tuple[BlockRegion, ...]

    @property
    def moment(self) -> CopyTime:
        return self.generation, self.step

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(content: Mapping[str, Any]) -> BlockHeader:
        tuples = ("first", "sizes", "whole")
        pieces = tuple(
            BlockRegion(**{**piece, **{key: tuple(piece[key]) for key in tuples}})
            for piece in content["pieces"]
        )
        return BlockHeader(**{**content, "pieces": pieces})


@dataclass(frozen=True, kw_only=True)
class BlockSource:
    """A block and the agent that holds it."""

    address: str
    port: int
    header: BlockHeader


class Store:
    """The blocks that one agent holds."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int, int], tuple[BlockHeader, bytes]] = {}
        """Headers and blocks by generation, step and rank."""

    def put(self, header: BlockHeader, block: bytes, *, keep_from: CopyTime) -> None:
        """Store a block; blocks older than ``keep_from``, which is known to be whole, are freed."""
        self.blocks = {key: held for key, held in self.blocks.items() if key[:2] >= keep_from}
        self.blocks[header.generation, header.step, header.rank] = header, block

    def get(self, moment: CopyTime, rank: int, begin: int, end: int) -> memoryview:
        return memoryview(self.blocks[*moment, rank][1])[begin:end]

    def keep_only(self, moment: CopyTime | None) -> None:
        """Free all blocks but those that a new generation continues from."""
        self.blocks = {key: held for key, held in self.blocks.items() if key[:2] == moment}

    def headers(self) -> list[BlockHeader]:
        return [header for header, _ in self.blocks.values()]


def newest_whole(headers: Iterable[BlockHeader]) -> CopyTime | None:
    """Return the newest moment of which every element is held; None if there is none."""
    by_moment: dict[CopyTime, list[BlockHeader]] = {}
    for header in headers:
        by_moment.setdefault(header.moment, []).append(header)
    return max(
        (moment for moment, moment_headers in by_moment.items() if is_whole(moment_headers)),
        default=None,
    )


def is_whole(headers: Iterable[BlockHeader]) -> bool:
    """Return whether the headers of one moment cover every element that the ranks had then."""
    covered: dict[str, set[Region]] = {}
    counts = (0, 0)
    for header in headers:
        counts = header.entries, header.elements
        for piece in header.pieces:
            covered.setdefault(piece.entry, set()).add(piece.region)
    elements = sum(volume(sorted(regions)) for regions in covered.values())
    return (len(covered), elements) == counts and bool(counts[0])
