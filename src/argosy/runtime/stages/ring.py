"""Attention between devices that each have a part of the sequence: keys and values go around a ring
of them.

With c devices, device i works on its queries while keys and values pass it, those of device i - s
in step s:

    (1)  forward    in step s the block at hand goes on to device i + 1 while its attention is computed; outputs o and
                    logarithms l of the sums of a block are merged:  l' = log(e^l + e^m),  o' = e^(l-l') o + e^(m-l') p
    (2)  backward   the blocks go around again. The gradients of a block follow it: device i adds its own and sends
                    them on, and the last one before the owner sends them home

So a forward passes a device c - 1 blocks, and a backward twice as many (``sim.tasks.exchange``,
(2)). Which pieces of a block a piece of queries attends to follows from their places: all of it,
none, or those up to its own.
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
from argosy.runtime.graphs import attention
from argosy.space.operations.sequence import SequenceParts

_BLOCKS, _GRADIENTS = 2**29 + 1, 2**29 + 2
"""Tags of messages."""


@dataclass(frozen=True)
class SequenceRing:
    """A device's place among those that share a sequence."""

    parts: SequenceParts
    group: Group
    rank: int
    exchanging: Exchanging

    @property
    def count(self) -> int:
        return len(self.parts.counts)

    def owner(self, step: int) -> int:
        """Whose block is at hand in a step."""
        return (self.rank - step) % self.count

    def begin(self, sent: Tensor, size: int, tag: int) -> Callable[[], Tensor]:
        """Begin to send a vector to the next device and to receive one of ``size`` elements from
        the one before; what is returned waits for both."""
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
        """The owner, keys and values of every block, this device's own first; the next one arrives
        meanwhile."""
        shapes = [
            _of_tokens(keys, count) + _of_tokens(values, count) for count in self.parts.counts
        ]
        block = torch.cat([keys.flatten(), values.flatten()])
        for step in range(self.count):
            owner, waiting = self.owner(step), None
            if step + 1 < self.count:
                coming = shapes[self.owner(step + 1)]
                waiting = self.begin(block, _size(coming[:4]) + _size(coming[4:]), _BLOCKS)
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
    """What an attention computes beside its operands."""

    causal: bool
    scale: float | None
    groups: int
    """Heads in a row that have the same keys and values."""


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: SequenceRing, setting: Setting
) -> Tensor:
    """This device's tokens of the output; the mask, which gets no gradient, is that of the whole
    sequence."""
    assert mask is None or not mask.requires_grad
    result: Tensor = _RingAttention.apply(q, k, v, mask, ring, setting)  # type: ignore[no-untyped-call]
    return result


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
        """(1)"""
        pieces = _pieces_of(ring, ring.rank)
        outputs: list[tuple[Tensor, Tensor] | None] = [None] * len(pieces)
        for owner, keys, values in ring.blocks(_distinct(k, setting), _distinct(v, setting)):
            for at, pair in _pairs(ring, owner, setting):
                found = _attention(q[:, :, pieces[at][1]], keys, values, mask, setting, pair)
                outputs[at] = _merged(outputs[at], found)
        done = [pair for pair in outputs if pair is not None]
        out = torch.cat([output for output, _ in done], 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, torch.cat([total for _, total in done], 2))
        ctx.ring, ctx.setting = ring, setting
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """(2)"""
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
                found = _gradients(given, keys, values, mask, setting, pair)
                of_queries[:, :, rows] += found[0]
                of_keys[:, :, pair.block] += _summed(found[1], setting)
                of_values[:, :, pair.block] += _summed(found[2], setting)
            block = torch.cat([of_keys.flatten(), of_values.flatten()])
            if step == 0:
                own = block
                continue
            if waiting is not None:
                block += waiting()
            coming = (ring.rank - step - 1) % ring.count
            waiting = ring.begin(
                block, block.numel() // keys.shape[2] * ring.parts.counts[coming], _GRADIENTS
            )
        assert own is not None
        if waiting is not None:
            own += waiting()
        first = _distinct(k, setting).numel()
        of_k = _repeated(own[:first].view(_distinct(k, setting).shape), setting)
        of_v = _repeated(own[first:].view(_distinct(v, setting).shape), setting)
        return of_queries, of_k, of_v, None, None, None


@dataclass(frozen=True)
class _Pair:
    """Tokens of queries and of a block, by their places in the sequence and, of the block, in
    it."""

    queries: slice
    keys: slice
    block: slice
    is_causal: bool
    """Whether queries attend to keys up to their own place only."""


def _pieces_of(ring: SequenceRing, rank: int) -> list[tuple[tuple[int, int], slice]]:
    """A device's pieces: their places in the sequence, and in what the device holds."""
    found, at = [], 0
    for begin, end in ring.parts.pieces[rank]:
        found.append(((begin, end), slice(at, at + end - begin)))
        at += end - begin
    return found


def _pairs(ring: SequenceRing, owner: int, setting: Setting) -> Iterator[tuple[int, _Pair]]:
    """Of this device's pieces of queries, by number, those that attend to pieces of a block."""
    for at, ((begin, end), _) in enumerate(_pieces_of(ring, ring.rank)):
        for (first, last), block in _pieces_of(ring, owner):
            if not setting.causal or first <= begin:
                is_causal = setting.causal and first == begin
                yield at, _Pair(slice(begin, end), slice(first, last), block, is_causal)


def _distinct(heads: Tensor, setting: Setting) -> Tensor:
    """Keys or values of which no head is sent twice."""
    return heads[:, :: setting.groups]


def _expanded(heads: Tensor, setting: Setting) -> Tensor:
    return heads.repeat_interleave(setting.groups, 1) if setting.groups > 1 else heads.contiguous()


def _summed(heads: Tensor, setting: Setting) -> Tensor:
    """The gradient of heads of which several are the same."""
    return heads.unflatten(1, (-1, setting.groups)).sum(2) if setting.groups > 1 else heads


def _repeated(heads: Tensor, setting: Setting) -> Tensor:
    """A gradient of all heads whose sum over equal ones is given: the first of them has it, the
    others zero."""
    if setting.groups == 1:
        return heads
    samples, count, tokens, elements = heads.shape
    every = heads.new_zeros(samples, count * setting.groups, tokens, elements)
    every[:, :: setting.groups] = heads
    return every


def _part_of(mask: Tensor | None, pair: _Pair) -> Tensor | None:
    """The rows and columns of a mask that a pair has; a dim of one element is for all tokens."""
    if mask is None:
        return None
    rows = mask[..., pair.queries, :] if mask.shape[-2] > 1 else mask
    return rows[..., pair.keys] if mask.shape[-1] > 1 else rows


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, setting: Setting, pair: _Pair
) -> tuple[Tensor, Tensor]:
    """Output and logarithm of the sums of one pair."""
    q, k, v = (
        q.contiguous(),
        *(_expanded(heads[:, :, pair.block], setting) for heads in (keys, values)),
    )
    part = _part_of(mask, pair)
    if part is None:
        out, total = attention.forward(q, k, v, 0.0, pair.is_causal, scale=setting.scale)
        return out, total
    return attention.math_forward(q, k, v, pair.is_causal, part, setting.scale)


def _gradients(
    given: tuple[Tensor, ...],
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    setting: Setting,
    pair: _Pair,
) -> Any:
    """Gradients of queries, keys and values of one pair."""
    gradient, q, out, total = (tensor.contiguous() for tensor in given)
    k, v = (_expanded(heads[:, :, pair.block], setting) for heads in (keys, values))
    part = _part_of(mask, pair)
    if part is None:
        return attention.backward(
            gradient, q, k, v, out, total, 0.0, pair.is_causal, scale=setting.scale
        )
    return attention.math_backward(
        gradient, q, k, v, out, total, pair.is_causal, part, setting.scale
    )


def _merged(
    before: tuple[Tensor, Tensor] | None, found: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """(1), in the precision of the sums; a block of which nothing counts adds nothing."""
    out, total = found
    out = out.to(total.dtype)
    if before is None:
        return out, total
    both = torch.logaddexp(before[1], total)
    weights = [torch.exp(one - both).nan_to_num(0.0).unsqueeze(-1) for one in (before[1], total)]
    return before[0] * weights[0] + out * weights[1], both
