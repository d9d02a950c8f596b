"""Turn a rank's training state into blocks of bytes for the agents' memory, and back, under any
plan.

Of a piece that several ranks hold, the first on each host sends a copy to the host's own agent. If
all of its holders are on one host, that rank also sends it to the agent of the next host; so the
loss of any one host loses nothing. Blocks are sent in a thread while training continues.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.cost.regions import Region, deliveries
from argosy.runtime.communication.boxes import HeldPart, TensorBox
from argosy.runtime.elastic.copies import BlockHeader, BlockRegion, BlockSource, CopyTime
from argosy.runtime.elastic.wire import asking, hear
from argosy.runtime.processes.failure import in_contact
from argosy.runtime.processes.world import gather_texts
from argosy.runtime.state.state import Stored, parts_of, take_state, trainer_state
from argosy.runtime.step.trainer import Trainer


class AgentPlace(NamedTuple):
    """The address at which an agent is reached."""

    address: str
    port: int


class SnapshotPart(NamedTuple):
    """A piece as a rank holds it: a block of an entry's elements, given by its first element and
    its size in every dim."""

    entry: str
    first: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]


@dataclass(frozen=True)
class Duties:
    """A list of the parts that a rank sends to agents, and of how much all ranks hold together."""

    near: frozenset[SnapshotPart]
    """Parts that are sent to the agent of its own host."""
    far: frozenset[SnapshotPart]
    """Parts that are sent to the agent of the next host."""
    entries: int
    elements: int


def divide_duties(held: Sequence[tuple[str, Sequence[SnapshotPart]]], rank: int) -> Duties:
    """Return the duties of a rank; ``held`` gives, by rank, its host and its parts."""
    holders: dict[SnapshotPart, list[int]] = {}
    for holder, (_, parts) in enumerate(held):
        for part in parts:
            holders.setdefault(part, []).append(holder)
    host = held[rank][0]
    near, far = set(), set()
    for part in held[rank][1]:
        here = [holder for holder in holders[part] if held[holder][0] == host]
        if here[0] == rank:
            near.add(part)
            if len(here) == len(holders[part]):
                far.add(part)
    shapes = {part.entry: part.whole for part in holders}
    return Duties(
        frozenset(near), frozenset(far), len(shapes), sum(map(math.prod, shapes.values()))
    )


class Copier:
    """An object that keeps copies of this rank's state in the agents' memory."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        generation: int,
        hosts: Sequence[str],
        near: AgentPlace,
        far: AgentPlace | None,
        token: str,
        patience: float,
        base: CopyTime,
    ) -> None:
        self.trainer, self.generation, self.hosts = trainer, generation, hosts
        self.near, self.far, self.token, self.patience = near, far, token, patience
        self.whole = base
        """The newest moment whose copies are known to be whole."""
        self.sent: CopyTime | None = None
        self.parts: list[SnapshotPart] = []
        self.thread: threading.Thread | None = None
        self.failed = False

    @property
    def is_busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def learn(self, *, busy: bool, failed: bool) -> None:
        """Update which copies are whole, from what the ranks report of the last copy."""
        if self.sent is not None and not busy:
            self.whole = self.whole if failed else self.sent
            self.sent = None

    def begin(self) -> None:
        """Copy the state, and send the copy in the background. Every rank calls this at the same
        step."""
        self.wait()
        state = {
            part: value
            for entry, held in trainer_state(self.trainer)
            for part, value in _parts(entry, held)
        }
        duties = self._duties(list(state))
        self.sent = (self.generation, self.trainer.steps)
        self.failed = False
        blocks = [(self.near, *self._block(state, duties, duties.near))]
        if self.far is not None and duties.far:
            same = duties.far == duties.near
            blocks.append(
                (self.far, *(blocks[0][1:] if same else self._block(state, duties, duties.far)))
            )
        self.thread = threading.Thread(
            target=self._send, args=(blocks, self.whole), name="copy", daemon=True
        )
        self.thread.start()

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _duties(self, parts: list[SnapshotPart]) -> Duties:
        """Return the duties of this rank, which are divided again if some rank has other parts than
        before, as after an optimizer's first step."""
        with in_contact("while copies were divided"):
            changed = torch.tensor(float(parts != self.parts), device=self.trainer.device)
            dist.all_reduce(changed)
            if changed.item():
                self.parts = parts
                held = map(json.loads, gather_texts(json.dumps(parts), self.trainer.device))
                known = [
                    (host, [_loaded(part) for part in own])
                    for host, own in zip(self.hosts, held, strict=True)
                ]
                self.duties = divide_duties(known, self.trainer.rank)
        return self.duties

    def _block(
        self, state: dict[SnapshotPart, Tensor], duties: Duties, parts: Iterable[SnapshotPart]
    ) -> tuple[BlockHeader, Tensor]:
        pieces, tensors, end = [], [], 0
        for part in sorted(parts):
            tensor = state[part].detach().cpu().contiguous().reshape(-1)
            begin, end = end, end + tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            pieces.append(BlockRegion(**part._asdict(), dtype=dtype, begin=begin, end=end))
            tensors.append(tensor.view(torch.uint8))
        header = BlockHeader(
            generation=self.generation,
            step=self.trainer.steps,
            rank=self.trainer.rank,
            scale=self.trainer.scale.value,
            calm=self.trainer.scale.calm,
            entries=duties.entries,
            elements=duties.elements,
            pieces=tuple(pieces),
        )
        return header, torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.uint8)

    def _send(
        self, blocks: list[tuple[AgentPlace, BlockHeader, Tensor]], keep_from: CopyTime
    ) -> None:
        try:
            for place, header, block in blocks:
                about = {"keep_from": keep_from, "header": header.to_dict(), "size": block.numel()}
                greeting = {"kind": "put", **about}
                with asking(
                    place.address, place.port, self.token, greeting, patience=self.patience
                ) as file:
                    file.write(block.numpy().data)
                    file.flush()
                    hear(file)
        except (OSError, ValueError):  # the agent went away, perhaps within its answer
            self.failed = True


def _loaded(part: list[Any]) -> SnapshotPart:
    entry, first, sizes, whole = part
    return SnapshotPart(entry, tuple(first), tuple(sizes), tuple(whole))


def _parts(entry: str, held: Tensor) -> Iterator[tuple[SnapshotPart, Tensor]]:
    """Yield what a rank holds of an entry, region by region, as views."""
    whole = tuple(getattr(held, "whole", held.shape))
    for tensor, boxes in parts_of(held):
        for box in boxes:
            if all(box.sizes):
                yield SnapshotPart(entry, box.whole, box.sizes, whole), box.of(tensor)


def restore(
    trainer: Trainer,
    sources: Sequence[BlockSource],
    *,
    near: AgentPlace,
    token: str,
    patience: float,
) -> None:
    """Continue from copies of one moment, which any plan may have made."""
    places: dict[str, list[tuple[BlockSource, BlockRegion]]] = {}
    for source in sorted(sources, key=lambda source: (source.address, source.port) != near):
        for piece in source.header.pieces:
            places.setdefault(piece.entry, []).append((source, piece))
    stored = {
        entry: Stored(held[0][1].whole, getattr(torch, held[0][1].dtype))
        for entry, held in places.items()
    }
    header = sources[0].header
    trainer.begin_at(header.step)
    take_state(trainer, stored, Reading(places, token=token, patience=patience).fill)
    trainer.scale.value, trainer.scale.calm = header.scale, header.calm


class _Request(NamedTuple):
    """Rows of a piece, and the region of them that is copied into a tensor."""

    piece: BlockRegion
    region: Region
    target: Tensor


def _first(holders: list[int], _: int) -> int | None:
    return min(holders, default=None)


class Reading:
    """A reader that fetches regions from agents: each wanted element is read once, from
    the first source that has it, with one request per source."""

    def __init__(
        self,
        places: dict[str, list[tuple[BlockSource, BlockRegion]]],
        *,
        token: str,
        patience: float,
    ) -> None:
        self.places, self.token, self.patience = places, token, patience

    def fill(self, wanted: Mapping[str, Tensor]) -> None:
        """Read the wanted part of each entry into its tensor."""
        requests: dict[int, list[_Request]] = {}
        sources: dict[int, BlockSource] = {}
        for entry, tensor in wanted.items():
            there = {at: [piece.region] for at, (_, piece) in enumerate(self.places[entry])}
            for part in parts_of(tensor):
                for at, region in deliveries(-1, [box.region for box in part.boxes], there, _first):
                    assert at is not None, (
                        f"no copy has {region} of {entry}, though the copies are whole"
                    )
                    source, piece = self.places[entry][at]
                    sources[id(source)] = source
                    rows = piece.rows(*map(int, region[0])) if region else piece
                    requests.setdefault(id(source), []).append(
                        _Request(rows, region, part.at(region))
                    )
        for key, source_requests in requests.items():
            self._fetch(sources[key], source_requests)

    def _fetch(self, source: BlockSource, requests: list[_Request]) -> None:
        ranges = [(request.piece.begin, request.piece.end) for request in requests]
        header, place = source.header, (source.address, source.port)
        greeting = {"kind": "get", "moment": header.moment, "rank": header.rank, "ranges": ranges}
        with asking(*place, self.token, greeting, patience=self.patience) as file:
            for piece, region, part in requests:
                data = bytearray(file.read(piece.end - piece.begin))
                if len(data) < piece.end - piece.begin:
                    raise ConnectionError(
                        f"{source.address}:{source.port} closed the connection within a copy"
                    )
                rows = torch.frombuffer(data, dtype=getattr(torch, piece.dtype)).view(piece.sizes)
                box = TensorBox(piece.first, (0,) * len(piece.sizes), piece.sizes)
                part.copy_(HeldPart(rows, (box,)).at(region))
