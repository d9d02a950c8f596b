"""Gather the weights of an island from its processes on its lead, which is rank 0, in fragments,
and scatter them again.

Weights are listed by name, and cut into fragments of about equal size between weights: the
fragments are the same on every island, no matter how its plan divides weights. A part of a weight
that several processes hold is sent by the lead itself or else by the first of them, and returned to
all of them. Weights that are not trained are not exchanged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.errors import RunError
from argosy.runtime.communication.boxes import TensorBox
from argosy.runtime.processes.world import gather_texts

if TYPE_CHECKING:
    from argosy.runtime.step.trainer import Trainer

# The tag of these messages; their process group carries no other point-to-point messages.
_TAG = 11


@dataclass(frozen=True, kw_only=True)
class IslandPiece:
    """A box of a weight that a rank holds."""

    name: str
    box: TensorBox

    @property
    def key(self) -> tuple[object, ...]:
        return self.name, self.box.whole, self.box.sizes

    @property
    def count(self) -> int:
        return math.prod(self.box.sizes)


class Gathering:
    """An object with which the processes of one island send their weights to its lead and receive
    others. Every rank makes one."""

    def __init__(self, trainer: Trainer, fragments: int) -> None:
        self.group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.device = trainer.device
        self.parameters: dict[tuple[object, ...], Tensor] = {}
        """The parameters that this rank holds, by piece."""
        held_by = [
            json.loads(text) for text in gather_texts(self._description(trainer), trainer.device)
        ]
        self.dtype = (
            torch.float64 if any(name == "torch.float64" for name, _ in held_by) else torch.float32
        )
        shapes = {name: tuple(shape) for _, pieces in held_by for name, shape, *_ in pieces}
        self.fragment_of = _cut(shapes, fragments)
        self.shapes = [
            {name: shapes[name] for name in sorted(shapes) if self.fragment_of[name] == at}
            for at in range(fragments)
        ]
        self.kept = [
            [
                IslandPiece(name=name, box=TensorBox(tuple(whole), tuple(local), tuple(sizes)))
                for name, _, whole, local, sizes in pieces
            ]
            for _, pieces in held_by
        ]
        """The pieces that each rank holds, by rank."""
        sender: dict[tuple[object, ...], int] = {}
        for rank, pieces in enumerate(self.kept):
            for piece in pieces:
                sender.setdefault(piece.key, rank)
        self.sent = [
            [piece for piece in pieces if sender[piece.key] == rank]
            for rank, pieces in enumerate(self.kept)
        ]
        """The pieces that each rank sends, by rank."""
        self._check_whole(shapes)

    def _description(self, trainer: Trainer) -> str:
        """Record the parameters that this rank holds; return their dtype and their pieces as
        JSON."""
        own = []
        dtype = torch.float32
        for held in trainer.held():
            if held.parameter.requires_grad:
                dtype = torch.promote_types(dtype, held.parameter.dtype)
                for box in held.boxes:
                    piece = IslandPiece(name=held.name, box=box)
                    self.parameters[piece.key] = box.of(held.parameter.data)
                    sides = (held.shape, box.whole, box.local, box.sizes)
                    own.append([held.name, *map(list, sides)])
        return json.dumps([str(dtype), own])

    def _check_whole(self, shapes: dict[str, tuple[int, ...]]) -> None:
        counts = dict.fromkeys(shapes, 0)
        for pieces in self.sent:
            for piece in pieces:
                counts[piece.name] += piece.count
        for name, shape in shapes.items():
            if counts[name] < math.prod(shape):
                raise RunError(
                    f"Cannot exchange {name} because no process of the island holds a part of it."
                )

    def size(self, fragment: int) -> int:
        """Return the number of values of a fragment."""
        return sum(math.prod(shape) for shape in self.shapes[fragment].values())

    def gather(self, fragment: int) -> Tensor | None:
        """Return a fragment as one vector in host memory on the lead, None on other ranks. Every
        rank calls this."""
        own = self._of(self.sent[self.rank], fragment)
        flat = self._packed(own)
        if self.rank:
            if flat.numel():
                dist.send(flat, 0, group=self.group, tag=_TAG)
            return None
        whole = torch.empty(self.size(fragment), dtype=self.dtype)
        for rank, pieces in enumerate(self.sent):
            chosen = self._of(pieces, fragment)
            data = (
                flat
                if rank == 0
                else torch.empty(sum(piece.count for piece in chosen), dtype=self.dtype)
            )
            if rank and data.numel():
                dist.recv(data, rank, group=self.group, tag=_TAG)
            self._each(fragment, whole, chosen, data, outward=False)
        return whole

    def scatter(self, fragment: int, whole: Tensor | None, *, mixing: float) -> None:
        """Give every rank its part of the lead's vector, mixed with the share ``mixing`` of its
        present values.

        Every rank calls this, and the trainer's ``gradients.after_update`` afterwards.
        """
        chosen = self._of(self.kept[self.rank], fragment)
        data = torch.empty(sum(piece.count for piece in chosen), dtype=self.dtype)
        if self.rank == 0:
            assert whole is not None
            for rank in range(len(self.kept) - 1, -1, -1):
                pieces = self._of(self.kept[rank], fragment)
                part = torch.empty(sum(piece.count for piece in pieces), dtype=self.dtype)
                self._each(fragment, whole, pieces, part, outward=True)
                if rank == 0:
                    data = part
                elif part.numel():
                    dist.send(part, rank, group=self.group, tag=_TAG)
        elif data.numel():
            dist.recv(data, 0, group=self.group, tag=_TAG)
        begin = 0
        for piece in chosen:
            target = self.parameters[piece.key]
            new = data[begin : begin + piece.count].view(piece.box.sizes).to(target.device)
            target.copy_(torch.lerp(new, target.to(self.dtype), mixing) if mixing else new)
            begin += piece.count

    def tell(self, numbers: Sequence[int]) -> list[int]:
        """Return the lead's numbers on every rank; every rank calls this with the same number of
        them."""
        row = torch.tensor(list(numbers), dtype=torch.int64)
        dist.broadcast(row, 0, group=self.group)
        return [int(number) for number in row.tolist()]

    def _of(self, pieces: Sequence[IslandPiece], fragment: int) -> list[IslandPiece]:
        return [piece for piece in pieces if self.fragment_of[piece.name] == fragment]

    def _packed(self, pieces: Sequence[IslandPiece]) -> Tensor:
        parts = [self.parameters[piece.key].to("cpu", self.dtype).flatten() for piece in pieces]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

    def _each(
        self,
        fragment: int,
        whole: Tensor,
        pieces: Sequence[IslandPiece],
        data: Tensor,
        *,
        outward: bool,
    ) -> None:
        """Copy pieces between a fragment's vector and one in which they follow one another."""
        offsets, at = {}, 0
        for name, shape in self.shapes[fragment].items():
            offsets[name] = at
            at += math.prod(shape)
        begin = 0
        for piece in pieces:
            shape = self.shapes[fragment][piece.name]
            first = offsets[piece.name]
            window = piece.box.out_of(whole[first : first + math.prod(shape)].view(shape))
            part = data[begin : begin + piece.count].view(piece.box.sizes)
            if outward:
                part.copy_(window)
            else:
                window.copy_(part)
            begin += piece.count


def _cut(shapes: dict[str, tuple[int, ...]], fragments: int) -> dict[str, int]:
    """Return the fragment of every weight, in the order of names, with about equal numbers of
    values in each."""
    total = sum(math.prod(shape) for shape in shapes.values())
    fragment_of, seen = {}, 0
    for name in sorted(shapes):
        middle = seen + math.prod(shapes[name]) / 2
        fragment_of[name] = min(fragments - 1, int(fragments * middle / total))
        seen += math.prod(shapes[name])
    return fragment_of
