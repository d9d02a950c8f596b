"""What ranks do in the tests of uneven collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from argosy.cost.group import CollectiveMethod, GroupCollective
from argosy.errors import InputError
from argosy.runtime.communication.collectives import (
    GatherBy,
    begin_fill,
    gather_uneven,
    offsets,
    scatter_sum_uneven,
    sum_uneven,
)
from argosy.runtime.communication.differentiable import converted
from argosy.runtime.communication.exchange import GroupExchange
from argosy.space.operations.delivery import Conversion
from argosy.space.operations.sharding import PARTIAL, REPLICATED, State


def vector(seed: int, size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gathers(sizes: Sequence[int], by: GatherBy) -> bool:
    rank, whole = dist.get_rank(), vector(7, sum(sizes))
    begin = offsets(sizes)[rank]
    gathered = gather_uneven(whole[begin : begin + sizes[rank]], sizes, by=by)
    return torch.equal(gathered, whole)


def fills(sizes: Sequence[int]) -> bool:
    """Whether vectors that are filled at the same time have all parts."""
    rank, wholes = dist.get_rank(), [vector(seed, sum(sizes)) for seed in (7, 8)]
    begin = offsets(sizes)[rank]
    own = slice(begin, begin + sizes[rank])
    vectors = [torch.zeros_like(whole) for whole in wholes]
    for empty, whole in zip(vectors, wholes, strict=True):
        empty[own] = whole[own]
    for pending in [begin_fill(filled, sizes) for filled in vectors]:
        pending.wait()
    return all(map(torch.equal, vectors, wholes))


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


def converts(
    ratios: tuple[float, ...], before: State, after: State, kind: GroupCollective
) -> list[str]:
    """What differs from one process: a tensor in another state, and the gradient of what it was
    made of."""
    exchange, shape = GroupExchange(ratios), (6, 10)
    whole, gradient = (vector(seed, 60).view(shape) for seed in (1, 2))
    rank, found, step = dist.get_rank(), [], Conversion(kind, before, after)

    def part(state: State, tensor: torch.Tensor) -> torch.Tensor:
        """Of a partial sum, every rank has a part of each element."""
        return tensor * ratios[rank] if state == PARTIAL else exchange.take(tensor, state)

    own = part(before, whole).requires_grad_()
    result = converted(exchange, own, shape, step, CollectiveMethod.PADDED)
    wanted = part(after, whole)
    if not torch.allclose(result, wanted):
        found.append("forward")
    dual = {PARTIAL: REPLICATED, REPLICATED: PARTIAL}
    result.backward(part(dual.get(after, after), gradient))
    if own.grad is None or not torch.allclose(own.grad, part(dual.get(before, before), gradient)):
        found.append("backward")
    if before != PARTIAL:
        ids = (whole * 100).long()
        if not torch.equal(
            converted(exchange, part(before, ids), shape, step, CollectiveMethod.PADDED),
            part(after, ids),
        ):
            found.append("whole numbers")
    return found


def refuses(sizes: Sequence[int], found: int) -> str:
    """The message where the parts do not fit; nothing is sent, so the group stays in step."""
    try:
        gather_uneven(torch.zeros(found), sizes)
    except InputError as error:
        dist.barrier()
        return str(error)
    return ""
