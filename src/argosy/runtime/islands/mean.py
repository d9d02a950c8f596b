"""Compute the weighted mean of vectors over the leads of islands, compressed as the plan states.

    (1)  lead i sends slice j of its vector to lead j
    (2)  lead j adds up the slices in the order of leads, and sends the sum to all others

A sum is decoded from the same bytes everywhere, also by the lead that computed it, so that all
leads get equal vectors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from argosy.plan.islands import Compression
from argosy.runtime.islands.codec import decode, encode, encoded_size

# Tags of messages to the owner of a slice, from it, and of handed-over state.
_TO_OWNER, _FROM_OWNER, _STATE = 1, 2, 3


def weighted_mean(
    group: Any, weights: Sequence[float], own: Tensor, compression: Compression
) -> Tensor:
    """Return the sum over leads of weight times vector, divided by the sum of weights."""
    me, count = group.rank(), group.size()
    total = sum(weights)
    shares = [weight / total for weight in weights]
    if count == 1:
        return own.clone()
    bounds = [own.numel() * at // count for at in range(count + 1)]
    slices = [own[begin:end] for begin, end in itertools.pairwise(bounds)]
    others = [at for at in range(count) if at != me]
    size = encoded_size(slices[me].numel(), own.dtype, compression)
    arrived = {at: torch.empty(size, dtype=torch.uint8) for at in others}
    outgoing = {at: encode(slices[at], compression) for at in others}
    _swap(group, outgoing, arrived, _TO_OWNER)
    mean = torch.zeros_like(slices[me])
    for at in range(count):
        part = slices[me] if at == me else decode(arrived[at], mean.numel(), own.dtype, compression)
        mean.add_(part, alpha=shares[at])
    sizes = [encoded_size(piece.numel(), own.dtype, compression) for piece in slices]
    results = {at: torch.empty(sizes[at], dtype=torch.uint8) for at in others}
    mine = encode(mean, compression)
    _swap(group, dict.fromkeys(others, mine), results, _FROM_OWNER)
    results[me] = mine
    parts = [decode(results[at], slices[at].numel(), own.dtype, compression) for at in range(count)]
    return torch.cat(parts)


def _swap(group: Any, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], tag: int) -> None:
    works = [group.recv([data], at, tag) for at, data in incoming.items() if data.numel()]
    works += [group.send([data], at, tag) for at, data in outgoing.items() if data.numel()]
    for work in works:
        work.wait()


def gather_numbers(group: Any, own: Sequence[float]) -> list[list[float]]:
    """Return a row of numbers from every lead."""
    row = torch.tensor(own, dtype=torch.float64)
    rows = [torch.empty_like(row) for _ in range(group.size())]
    group.allgather([rows], [row]).wait()
    return [row_of_lead.tolist() for row_of_lead in rows]


def hand_over(group: Any, vectors: Sequence[Tensor], source: int, receivers: Sequence[int]) -> None:
    """Copy vectors from one lead to others; every lead of the group calls this."""
    for vector in vectors:
        if group.rank() == source:
            for receiver in receivers:
                group.send([vector], receiver, _STATE).wait()
        elif group.rank() in receivers:
            group.recv([vector], source, _STATE).wait()
