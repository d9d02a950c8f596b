"""Rows on their way from rank to rank: what a rank holds of every tensor before and after, and the messages between.

Rows that a rank has already are not sent: the very tensor stays where nothing changes, else they are copied. All rows
of one dtype from one rank to another are one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.runtime.failure import in_contact
from argosy.runtime.rows import Move, Piece

_TAG = 2**30
"""Tags of migrations; others are smaller."""
_DTYPES = sorted({str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)})


class HeldRows(NamedTuple):
    """A tensor and which rows of the whole it is."""

    tensor: Tensor
    begin: int

    def between(self, begin: int, end: int) -> Tensor:
        """Some of them, counted in the whole."""
        return self.tensor[begin - self.begin : end - self.begin] if self.tensor.dim() else self.tensor


Key = tuple[str, str]
"""Name and what, as in ``Piece``."""


class About(NamedTuple):
    """What every rank knows of a tensor that some rank holds."""

    shape: tuple[int, ...]
    """Of the whole."""
    dtype: torch.dtype
    by_rows: bool
    """Whether it is divided as its weight is."""


class Handover:
    """Sends and receives of one rank."""

    def __init__(self, rank: int, device: torch.device, carrier: torch.device, tensors: Mapping[Key, About]) -> None:
        """Messages are sent from and arrive on the ``carrier``."""
        self.rank, self.device, self.carrier = rank, device, carrier
        self.tensors = tensors
        self.sent = self.received = 0

    def run(self, pieces: Sequence[Piece], moves: Sequence[Move], old: dict[Key, HeldRows]) -> dict[Key, HeldRows]:
        """This rank's rows of some pieces under the new plan; ``old`` loses its rows of them."""
        keys = {(piece.name, piece.what): piece for piece in pieces}
        new = {key: self._begin(piece, old.get(key)) for key, piece in keys.items() if self.rank in piece.after}
        self._send_and_receive(moves, old, new)
        for key in keys:
            old.pop(key, None)
        return new

    def _begin(self, piece: Piece, had: HeldRows | None) -> HeldRows:
        """What is there already: the very tensor, or a new one with the rows that both have."""
        begin, end = piece.after[self.rank]
        if had is not None and piece.before[self.rank] == (begin, end):
            return had
        told = self.tensors[piece.name, piece.what]
        shape = (end - begin, *told.shape[1:]) if told.shape else ()
        rows = HeldRows(torch.empty(shape, dtype=told.dtype, device=self.device), begin)
        if had is not None:
            low, high = max(begin, had.begin), min(end, piece.before[self.rank][1])
            if low < high:
                rows.between(low, high).copy_(had.between(low, high))
        return rows

    def _send_and_receive(
        self, moves: Sequence[Move], old: Mapping[Key, HeldRows], new: Mapping[Key, HeldRows]
    ) -> None:
        """One message for each pair of ranks and dtype."""
        bundles: dict[tuple[int, int, str], list[Move]] = {}
        for move in moves:
            if self.rank in (move.source, move.target):
                dtype = self.tensors[move.piece.name, move.piece.what].dtype
                bundles.setdefault((move.source, move.target, str(dtype)), []).append(move)
        calls, arriving = [], []
        for (source, target, kind), bundle in sorted(bundles.items()):
            tag = _TAG + _DTYPES.index(kind)
            mine = old if source == self.rank else new
            parts = [mine[move.piece.name, move.piece.what].between(move.begin, move.end) for move in bundle]
            if source == self.rank:
                message = torch.cat([part.reshape(-1) for part in parts]).to(self.carrier)
                calls.append(dist.P2POp(dist.isend, message, target, tag=tag))
                self.sent += message.numel() * message.element_size()
            else:
                message = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=self.carrier)
                calls.append(dist.P2POp(dist.irecv, message, source, tag=tag))
                arriving.append((parts, message))
                self.received += message.numel() * message.element_size()
        if calls:
            with in_contact("during a migration"):
                for work in dist.batch_isend_irecv(calls):
                    work.wait()
        for parts, message in arriving:
            for part, values in zip(parts, message.split([part.numel() for part in parts]), strict=True):
                part.copy_(values.view_as(part))
