"""Compute attention between devices that each hold a part of the sequence: keys and values are sent
around a ring.

With c devices, device i computes with its queries while keys and values pass it, those of device i
- s in step s:

    (1)  forward    in step s the current block is sent on to device i + 1 while its attention is
                    computed; outputs o and logarithms l of the sums of a block are merged:
                    l' = log(e^l + e^m),  o' = e^(l-l') o + e^(m-l') p
    (2)  backward   the blocks are sent around again. The gradients of a block follow it: device i
                    adds its own and sends them on, and the last device before the owner sends
                    them back to the owner

So a forward sends c - 1 blocks past a device, and a backward twice as many (``sim.tasks.exchange``,
(2)). The positions of two pieces determine whether queries attend to all of a block's piece, to
none of it, or to its tokens up to their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.runtime.communication.collectives import Group, is_foreign
from argosy.runtime.communication.marks import Exchanging
from argosy.runtime.communication.tags import Tag
from argosy.runtime.graphs import attention
from argosy.space.operations.sequence import SequenceParts


@dataclass(frozen=True)
class SequenceRing:
    """A device's place in a ring of devices that have parts of a sequence."""

    parts: SequenceParts
    group: Group
    rank: int
    exchanging: Exchanging

    @property
    def count(self) -> int:
        return len(self.parts.counts)

    def owner(self, step: int) -> int:
        """Return the owner of the block that this device has in a step."""
        return (self.rank - step) % self.count

    def begin(self, sent: Tensor, size: int, tag: int) -> Callable[[], Tensor]:
        """Begin to send a vector to the next device and to receive one of ``size`` elements from
        the previous one; return a function that waits for both."""
        foreign = is_foreign(sent, self.group)
        own = sent.cpu() if foreign else sent
        received = own.new_empty(size)
        after, before = ((self.rank + way) % self.count for way in (1, -1))
        operations = [
            dist.P2POp(dist.isend, own, group=self.group, group_peer=after, tag=tag),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=before, tag=tag),
        ]
        works = dist.batch_isend_irecv(operations)

        def wait() -> Tensor:
            with self.exchanging():
                for work in works:
                    work.wait()
            return received.to(sent.device) if foreign else received

        return wait

    def blocks(self, keys: Tensor, values: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the owner, keys and values of every block, this device's own first; the next block
        arrives meanwhile."""
        shapes = [
            _of_tokens(keys, count) + _of_tokens(values, count) for count in self.parts.counts
        ]
        block = torch.cat([keys.flatten(), values.flatten()])
        for step in range(self.count):
            owner, waiting = self.owner(step), None
            if step + 1 < self.count:
                coming = shapes[self.owner(step + 1)]
                waiting = self.begin(block, _size(coming[:4]) + _size(coming[4:]), Tag.RING_BLOCKS)
            shape = shapes[owner]
            first = _size(shape[:4])
            yield owner, block[:first].view(shape[:4]), block[first:].view(shape[4:])
            if waiting is not None:
                block = waiting()


def _of_tokens(tensor: Tensor, count: int) -> tuple[int, ...]:
    samples, heads, _, elements = tensor.shape
    return (samples, heads, count, elements)


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


@dataclass(frozen=True)
class Setting:
    """The settings that an attention has beside its operands."""

    causal: bool
    scale: float | None
    groups: int
    """The number of consecutive heads that have the same keys and values."""


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: SequenceRing, setting: Setting
) -> Tensor:
    """Return this device's tokens of the output; the mask, which gets no gradient, is that of the
    whole sequence."""
    assert mask is None or not mask.requires_grad
    return _RingAttention.apply(q, k, v, mask, ring, setting)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        ring: SequenceRing,
        setting: Setting,
    ) -> Tensor:
        """Compute the output of this device's queries by (1)."""
        pieces = _pieces_of(ring, ring.rank)
        outputs: list[tuple[Tensor, Tensor] | None] = [None] * len(pieces)
        for owner, keys, values in ring.blocks(_distinct(k, setting), _distinct(v, setting)):
            for at, pair in _pairs(ring, owner, setting):
                result = _attention(q[:, :, pieces[at][1]], keys, values, mask, setting, pair)
                outputs[at] = _merged(outputs[at], result)
        done = [pair for pair in outputs if pair is not None]
        out = torch.cat([output for output, _ in done], 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, torch.cat([total for _, total in done], 2))
        ctx.ring, ctx.setting = ring, setting
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Compute the gradients of queries, keys and values by (2)."""
        q, k, v, mask, out, total = ctx.saved_tensors
        ring, setting, gradient = ctx.ring, ctx.setting, gradients[0].contiguous()
        pieces = _pieces_of(ring, ring.rank)
        of_queries = torch.zeros_like(q)
        own: Tensor | None = None
        waiting: Callable[[], Tensor] | None = None
        for step, (owner, keys, values) in enumerate(
            ring.blocks(_distinct(k, setting), _distinct(v, setting))
        ):
            of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
            for at, pair in _pairs(ring, owner, setting):
                rows = pieces[at][1]
                given = (gradient[:, :, rows], q[:, :, rows], out[:, :, rows], total[:, :, rows])
                pair_gradients = _gradients(given, keys, values, mask, setting, pair)
                of_queries[:, :, rows] += pair_gradients[0]
                of_keys[:, :, pair.block] += pair_gradients[1]
                of_values[:, :, pair.block] += pair_gradients[2]
            block = torch.cat([of_keys.flatten(), of_values.flatten()])
            if step == 0:
                own = block
                continue
            if waiting is not None:
                block += waiting()
            coming = (ring.rank - step - 1) % ring.count
            size = block.numel() // keys.shape[2] * ring.parts.counts[coming]
            waiting = ring.begin(block, size, Tag.RING_GRADIENTS)
        assert own is not None
        if waiting is not None:
            own += waiting()
        first = _distinct(k, setting).numel()
        of_k = _repeated(own[:first].view(_distinct(k, setting).shape), setting)
        of_v = _repeated(own[first:].view(_distinct(v, setting).shape), setting)
        return of_queries, of_k, of_v, None, None, None


@dataclass(frozen=True)
class _Pair:
    """Tokens of queries with the tokens of a block that are attended to, by their positions in the
    sequence; the block's tokens also by their positions in it."""

    queries: slice
    keys: slice
    block: slice
    is_causal: bool
    """True if queries attend only to keys up to their own position."""


def _pieces_of(ring: SequenceRing, rank: int) -> list[tuple[tuple[int, int], slice]]:
    """Return a device's pieces: their positions in the sequence, and in the device's tensor."""
    pieces, at = [], 0
    for begin, end in ring.parts.pieces[rank]:
        pieces.append(((begin, end), slice(at, at + end - begin)))
        at += end - begin
    return pieces


def _pairs(ring: SequenceRing, owner: int, setting: Setting) -> Iterator[tuple[int, _Pair]]:
    """Yield the number of each of this device's pieces of queries with a piece of the block that it
    attends to."""
    for at, ((begin, end), _) in enumerate(_pieces_of(ring, ring.rank)):
        for (first, last), block in _pieces_of(ring, owner):
            if not setting.causal or first <= begin:
                is_causal = setting.causal and first == begin
                yield at, _Pair(slice(begin, end), slice(first, last), block, is_causal)


def _distinct(heads: Tensor, setting: Setting) -> Tensor:
    """Return keys or values without repeated heads, so that no head is sent twice."""
    return heads[:, :: setting.groups]


def _repeated(heads: Tensor, setting: Setting) -> Tensor:
    """Return a gradient of all heads from the sum over equal ones: the first has the sum, the
    others zero."""
    if setting.groups == 1:
        return heads
    samples, count, tokens, elements = heads.shape
    gradient = heads.new_zeros(samples, count * setting.groups, tokens, elements)
    gradient[:, :: setting.groups] = heads
    return gradient


def _part_of(mask: Tensor | None, pair: _Pair) -> Tensor | None:
    """Return the rows and columns of a mask that belong to a pair; a dim of one element holds for
    all tokens."""
    if mask is None:
        return None
    rows = mask[..., pair.queries, :] if mask.shape[-2] > 1 else mask
    return rows[..., pair.keys] if mask.shape[-1] > 1 else rows


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, setting: Setting, pair: _Pair
) -> tuple[Tensor, Tensor]:
    """Return the output and the logarithm of the sums of one pair."""
    operands = (q, keys[:, :, pair.block], values[:, :, pair.block])
    q, k, v = (tensor.contiguous() for tensor in operands)
    return attention.forward(q, k, v, pair.is_causal, _part_of(mask, pair), setting.scale)


def _gradients(
    given: tuple[Tensor, ...],
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    setting: Setting,
    pair: _Pair,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of one pair."""
    operands = (*given, keys[:, :, pair.block], values[:, :, pair.block])
    gradient, q, out, total, k, v = (tensor.contiguous() for tensor in operands)
    part = _part_of(mask, pair)
    return attention.backward(gradient, q, k, v, out, total, pair.is_causal, part, setting.scale)


def _merged(
    before: tuple[Tensor, Tensor] | None, block: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge the results of two blocks by (1), in the precision of the sums; a block that is fully
    masked adds nothing."""
    out, total = block
    out = out.to(total.dtype)
    if before is None:
        return out, total
    both = torch.logaddexp(before[1], total)
    weights = [
        torch.exp(log_sum - both).nan_to_num(0.0).unsqueeze(-1) for log_sum in (before[1], total)
    ]
    return before[0] * weights[0] + out * weights[1], both
