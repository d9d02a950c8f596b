"""Send parts of tensors from rank to rank, from those that a rank holds before a change of plan to
those after it.

Elements that a rank already has are not sent: the same tensor stays if nothing changes, otherwise
they are copied. All elements of one dtype from one rank to another are one message. Elements that a
rank passes on to others of its node are sent once they have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from argosy.runtime.communication.boxes import Boxes, HeldPart, HeldParts
from argosy.runtime.processes.failure import in_contact
from argosy.runtime.state.moves import HeldPiece, RegionMove

# The first tag of migrations; other tags are smaller.
_TAG = 2**30
_DTYPES = sorted({str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)})
"""All dtypes of torch in a fixed order, so that each has a tag of its own."""

Key = tuple[str, str]
"""A weight's name and the kind of tensor, as in ``HeldPiece``."""


class About(NamedTuple):
    """Facts about a tensor that every rank knows, though only some ranks hold it."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: torch.dtype
    like_weight: bool
    """True if it is divided as its weight is."""


class Handover:
    """The sends and receives that one rank does in a migration."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        carrier: torch.device,
        tensors: Mapping[Key, About],
        group: dist.ProcessGroup,
    ) -> None:
        """Prepare an exchange over a ``group`` of all ranks; messages are sent from and received on
        the ``carrier``."""
        self.rank, self.device, self.carrier = rank, device, carrier
        self.tensors, self.group = tensors, group
        self.sent = self.received = 0

    def run(
        self,
        pieces: Sequence[HeldPiece],
        moves: Sequence[RegionMove],
        old: dict[Key, HeldParts],
        boxes: Mapping[Key, Boxes],
    ) -> dict[Key, HeldParts]:
        """Return this rank's part of given pieces under the new plan, with these ``boxes``; their
        old parts are removed from ``old``."""
        keys = [(piece.name, piece.what) for piece in pieces]
        new = {key: self._begin(key, boxes[key], old.get(key)) for key in keys if key in boxes}
        self._send_and_receive([move for move in moves if not move.is_passed_on], old, new)
        self._send_and_receive([move for move in moves if move.is_passed_on], new, new)
        for key in keys:
            old.pop(key, None)
        return new

    def _begin(self, key: Key, boxes: Boxes, had: HeldParts | None) -> HeldParts:
        """Return the parts under the new plan before messages arrive: the same tensors, or new ones
        with the elements that both have."""
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
        given: Mapping[Key, HeldParts],
        new: Mapping[Key, HeldParts],
    ) -> None:
        """Exchange one message for each pair of ranks and dtype."""
        bundles: dict[tuple[int, int, str], list[RegionMove]] = {}
        for move in moves:
            if self.rank in (move.source, move.target):
                dtype = self.tensors[move.piece.name, move.piece.what].dtype
                bundles.setdefault((move.source, move.target, str(dtype)), []).append(move)
        calls, arriving = [], []
        for (source, target, kind), bundle in sorted(bundles.items()):
            tag = _TAG + _DTYPES.index(kind)
            mine = given if source == self.rank else new
            parts = [mine[move.piece.name, move.piece.what].at(move.region) for move in bundle]
            if source == self.rank:
                message = torch.cat([part.reshape(-1) for part in parts]).to(self.carrier)
                calls.append(dist.P2POp(dist.isend, message, target, self.group, tag))
                self.sent += message.numel() * message.element_size()
            else:
                message = torch.empty(
                    sum(part.numel() for part in parts), dtype=parts[0].dtype, device=self.carrier
                )
                calls.append(dist.P2POp(dist.irecv, message, source, self.group, tag))
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
