"""What ranks do in the tests of attention around a ring."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from argosy.runtime.communication.marks import untold
from argosy.runtime.stages.ring import SequenceRing, Setting, ring_attention
from argosy.space.operations.sequence import SequenceParts

SAMPLES, HEADS, ELEMENTS = 2, 4, 8


def worst_error(
    length: int, shares: tuple[float, ...], *, causal: bool, groups: int, masked: bool
) -> float:
    """The largest difference between a ring's output and gradients and those of torch's attention
    on this rank's tokens."""
    rank = dist.get_rank()
    parts = SequenceParts.by_shares(length, shares)
    generator = torch.Generator().manual_seed(1)
    shape = (SAMPLES, HEADS // groups, length, ELEMENTS)
    q, wanted_gradient = (
        torch.randn(SAMPLES, HEADS, length, ELEMENTS, generator=generator).double()
        for _ in range(2)
    )
    k, v = (torch.randn(shape, generator=generator).double() for _ in range(2))
    k, v = (heads.repeat_interleave(groups, 1) for heads in (k, v))
    mask = None
    if masked:  # all but the first tokens are hidden, so that whole blocks count for nothing
        mask = (
            torch.zeros(SAMPLES, 1, 1, length)
            .masked_fill(torch.arange(length) > 1, float("-inf"))
            .double()
        )
    own = torch.tensor([token for begin, end in parts.pieces[rank] for token in range(begin, end)])
    whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    visible = None if mask is None else mask.expand(SAMPLES, 1, length, length)
    expected = F.scaled_dot_product_attention(*whole, attn_mask=visible, is_causal=causal)
    expected.backward(wanted_gradient)
    mine = [tensor[:, :, own].clone().requires_grad_() for tensor in (q, k, v)]
    ring = SequenceRing(parts, None, rank, untold)
    found = ring_attention(*mine, mask, ring, Setting(causal, None, groups))
    found.backward(wanted_gradient[:, :, own])
    errors = [found - expected[:, :, own]]
    for part, tensor in zip(mine, whole, strict=True):
        assert part.grad is not None and tensor.grad is not None
        given, true = part.grad, tensor.grad[:, :, own]
        if part is not mine[0]:  # heads with the same keys share one gradient
            given, true = (t.unflatten(1, (-1, groups)).sum(2) for t in (given, true))
        errors.append(given - true)
    return max(error.abs().max().item() for error in errors)


def worst_errors() -> list[float]:
    """Of all kinds of attention, on one rank."""
    shares = (0.5, 0.2, 0.3)
    return [
        worst_error(length, shares, causal=causal, groups=groups, masked=masked)
        for length in (6, 13)
        for causal, groups, masked in (
            (True, 1, False),
            (True, 2, False),
            (False, 2, False),
            (False, 1, True),
        )
    ]
