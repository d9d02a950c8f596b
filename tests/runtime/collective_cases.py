"""What ranks do in the tests of uneven collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from argosy.errors import InputError
from argosy.runtime.collectives import GatherBy, gather_uneven, offsets, scatter_sum_uneven, sum_uneven


def vector(seed: int, size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gathers(sizes: Sequence[int], by: GatherBy) -> bool:
    rank, whole = dist.get_rank(), vector(7, sum(sizes))
    begin = offsets(sizes)[rank]
    gathered = gather_uneven(whole[begin : begin + sizes[rank]], sizes, by=by)
    return torch.equal(gathered, whole)


def scatters(sizes: Sequence[int]) -> bool:
    rank = dist.get_rank()
    vectors = [vector(member, sum(sizes)) for member in range(len(sizes))]
    total = vectors[0].clone()
    for other in vectors[1:]:
        total += other
    begin = offsets(sizes)[rank]
    part = scatter_sum_uneven(vectors[rank], sizes)
    return torch.equal(part, total[begin : begin + sizes[rank]]) and torch.equal(
        sum_uneven(vectors[rank], sizes), total
    )


def refuses(sizes: Sequence[int], found: int) -> str:
    """The message where the parts do not fit; nothing is sent, so the group stays in step."""
    try:
        gather_uneven(torch.zeros(found), sizes)
    except InputError as error:
        dist.barrier()
        return str(error)
    return ""
