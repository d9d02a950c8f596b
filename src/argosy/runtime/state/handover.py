"""Parts of tensors on their way from rank to rank: what a rank holds before and after, and the
messages between.

What a rank has already is not sent: the very tensor stays where nothing changes, else it is copied.
All that goes from one rank to another in one dtype is one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from argosy.runtime.communication.boxes import Boxes, HeldPart, HeldParts
from argosy.runtime.processes.failure import in_contact
from argosy.runtime.state.moves import HeldPiece, RegionMove

_TAG = 2**30
"""Tags of migrations; others are smaller."""
_DTYPES = sorted({str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)})

Key = tuple[str, str]
"""Name and what, as in ``HeldPiece``."""


class About(NamedTuple):
    """What every rank knows of a tensor that some rank holds."""

    shape: tuple[int, ...]
    """Of the whole."""
    dtype: torch.dtype
    like_weight: bool
    """Whether it is divided as its weight is."""


class Handover:
    """Sends and receives of one rank."""

    def __init__(
        self, rank: int, device: torch.device, carrier: torch.device, tensors: Mapping[Key, About]
    ) -> None:
        """Messages are sent from and arrive on the ``carrier``."""
        self.rank, self.device, self.carrier = rank, device, carrier
        self.tensors = tensors
        self.sent = self.received = 0

    def run(
        self,
        pieces: Sequence[HeldPiece],
        moves: Sequence[RegionMove],
        old: dict[Key, HeldParts],
        boxes: Mapping[Key, Boxes],
    ) -> dict[Key, HeldParts]:
        """This rank's part of some pieces under the new plan, with these ``boxes``; ``old`` loses
        its part of them."""
        keys = [(piece.name, piece.what) for piece in pieces]
        new = {key: self._begin(key, boxes[key], old.get(key)) for key in keys if key in boxes}
        self._send_and_receive(moves, old, new)
        for key in keys:
            old.pop(key, None)
        return new

    def _begin(self, key: Key, boxes: Boxes, had: HeldParts | None) -> HeldParts:
        """What is there already: the very tensors, or new ones with what both have."""
        if had is not None and tuple(part.boxes for part in had.parts) == boxes:
            return had
        dtype = self.tensors[key].dtype
        new = HeldParts(
            tuple(HeldPart.empty(own, dtype=dtype, device=self.device) for own in boxes)
        )
        for part in new.parts:
            for given in () if had is None else had.parts:
                part.take(given)
        return new

    def _send_and_receive(
        self,
        moves: Sequence[RegionMove],
        old: Mapping[Key, HeldParts],
        new: Mapping[Key, HeldParts],
    ) -> None:
        """One message for each pair of ranks and dtype."""
        bundles: dict[tuple[int, int, str], list[RegionMove]] = {}
        for move in moves:
            if self.rank in (move.source, move.target):
                dtype = self.tensors[move.piece.name, move.piece.what].dtype
                bundles.setdefault((move.source, move.target, str(dtype)), []).append(move)
        calls, arriving = [], []
        for (source, target, kind), bundle in sorted(bundles.items()):
            tag = _TAG + _DTYPES.index(kind)
            mine = old if source == self.rank else new
            parts = [mine[move.piece.name, move.piece.what].at(move.region) for move in bundle]
            if source == self.rank:
                message = torch.cat([part.reshape(-1) for part in parts]).to(self.carrier)
                calls.append(dist.P2POp(dist.isend, message, target, tag=tag))
                self.sent += message.numel() * message.element_size()
            else:
                message = torch.empty(
                    sum(part.numel() for part in parts), dtype=parts[0].dtype, device=self.carrier
                )
                calls.append(dist.P2POp(dist.irecv, message, source, tag=tag))
                arriving.append((parts, message))
                self.received += message.numel() * message.element_size()
        if calls:
            with in_contact("during a migration"):
                for work in dist.batch_isend_irecv(calls):
                    work.wait()
        for parts, message in arriving:
            for part, values in zip(
                parts, message.split([part.numel() for part in parts]), strict=True
            ):
                part.copy_(values.view_as(part))
