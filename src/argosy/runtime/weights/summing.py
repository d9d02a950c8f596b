"""Sum the gradients of a weight over its holders by the algorithm that the plan chose for their
stage.

    (1)  ring           the backend's own all-reduce
    (2)  tree           within a node up to its first member; over the first members two binary
                        trees, one for each half of the vector, in opposite orders, up to the root
                        and down again; down within the node
    (3)  hierarchical   as (2), with the backend's all-reduce over the first members

Under ZeRO the sum is scattered and updated rows are gathered; hierarchically, a node's parts cross
between nodes once, through its first member. Vectors are copied to host memory if the backend
supports no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.plan.plan import Algorithm, Collective, Plan
from argosy.runtime.communication.collectives import (
    Group,
    Pending,
    begin_fill,
    gather_uneven,
    is_foreign,
    offsets,
    scatter_sum_uneven,
)

Groups = Mapping[tuple[int, ...], dist.ProcessGroup | None]
"""Process groups by their ranks; None if this rank is not a member."""
# The tag of messages between members; tags of micro-batches are smaller.
_TAG = 2**29


class PendingSum(Pending, Protocol):
    """A sum that was begun."""

    def is_completed(self) -> bool: ...


class Done:
    """A sum or a fill that was complete as soon as it was begun."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


@dataclass(frozen=True)
class RingSum:
    """A sum that uses the backend's all-reduce (1)."""

    group: Group

    def begin(self, vector: Tensor) -> PendingSum:
        work: PendingSum | None = dist.all_reduce(vector, group=self.group, async_op=True)
        assert work is not None
        return work

    def scatter(self, vector: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return this member's part of the sum."""
        return scatter_sum_uneven(vector, sizes, group=self.group)

    def begin_fill(self, vector: Tensor, sizes: Sequence[int]) -> Pending:
        """Begin to fill a vector, which has this member's part, with the parts of all members."""
        return begin_fill(vector, sizes, group=self.group)


@dataclass(frozen=True)
class SingleRank:
    """The sum of one rank, which has nothing to send."""

    def begin(self, vector: Tensor) -> PendingSum:
        return Done()

    def scatter(self, vector: Tensor, sizes: Sequence[int]) -> Tensor:
        return vector

    def begin_fill(self, vector: Tensor, sizes: Sequence[int]) -> Pending:
        return Done()


@dataclass(frozen=True)
class Nodes:
    """A sum that runs within and between nodes, by (2) or (3)."""

    group: Group
    """The group of all holders."""
    ranks: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    """All ranks, grouped by node."""
    groups: Groups
    """The groups of every node and of the nodes' first members, if they have two or more ranks."""
    rank: int
    is_tree: bool

    @property
    def mine(self) -> tuple[int, ...]:
        return next(node for node in self.nodes if self.rank in node)

    @property
    def firsts(self) -> tuple[int, ...]:
        return tuple(node[0] for node in self.nodes)

    def begin(self, vector: Tensor) -> PendingSum:
        if is_foreign(vector, self.group):
            host = vector.cpu()
            self.begin(host)
            vector.copy_(host)
            return Done()
        self._up(vector)
        if self.rank in self.firsts and len(self.firsts) > 1:
            if self.is_tree:
                _sum_by_trees(vector, self.firsts, self.rank, self.group)
            else:
                dist.all_reduce(vector, group=self.groups[self.firsts])
        if len(self.mine) > 1:
            dist.broadcast(vector, self.mine[0], group=self.groups[self.mine])
        return Done()

    def _up(self, vector: Tensor) -> None:
        if len(self.mine) > 1:
            dist.reduce(vector, self.mine[0], group=self.groups[self.mine])

    def scatter(self, vector: Tensor, sizes: Sequence[int]) -> Tensor:
        if is_foreign(vector, self.group):
            return self.scatter(vector.cpu(), sizes).to(vector.device)
        vector, own = vector.clone(), sizes[self.ranks.index(self.rank)]
        self._up(vector)
        if self.rank != self.mine[0]:
            part = vector.new_empty(own)
            if own:
                dist.recv(part, self.mine[0], group=self.group, tag=_TAG)
            return part
        pieces = self._pieces(vector, sizes)
        if len(self.firsts) > 1:
            summed = scatter_sum_uneven(
                torch.cat(pieces), self._node_sizes(sizes), group=self.groups[self.firsts]
            )
        else:
            summed = torch.cat(pieces)
        inside = [sizes[self.ranks.index(rank)] for rank in self.mine]
        for rank, piece in list(zip(self.mine, summed.split(inside), strict=True))[1:]:
            if piece.numel():
                dist.send(piece.contiguous(), rank, group=self.group, tag=_TAG)
        return summed[:own].clone()

    def begin_fill(self, vector: Tensor, sizes: Sequence[int]) -> Pending:
        return _NodesFill(self, vector, sizes)

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the parts of all members, one after another."""
        if is_foreign(part, self.group):
            return self.gather(part.cpu(), sizes).to(part.device)
        inside = [sizes[self.ranks.index(rank)] for rank in self.mine]
        whole = part.new_empty(sum(sizes))
        if self.rank != self.mine[0]:
            if part.numel():
                dist.send(part.contiguous(), self.mine[0], group=self.group, tag=_TAG)
        else:
            others = [part.new_empty(size) for size in inside[1:]]
            for rank, piece in zip(self.mine[1:], others, strict=True):
                if piece.numel():
                    dist.recv(piece, rank, group=self.group, tag=_TAG)
            known = torch.cat([part, *others])
            if len(self.firsts) > 1:
                known = gather_uneven(
                    known, self._node_sizes(sizes), group=self.groups[self.firsts]
                )
            self._place(whole, known, sizes)
        if len(self.mine) > 1:
            dist.broadcast(whole, self.mine[0], group=self.groups[self.mine])
        return whole

    def _node_sizes(self, sizes: Sequence[int]) -> list[int]:
        return [sum(sizes[self.ranks.index(rank)] for rank in node) for node in self.nodes]

    def _pieces(self, vector: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the members' parts, node by node."""
        parts = vector.split(list(sizes))
        return [parts[self.ranks.index(rank)] for node in self.nodes for rank in node]

    def _place(self, whole: Tensor, known: Tensor, sizes: Sequence[int]) -> None:
        """Copy parts that are ordered node by node to the members' order."""
        order = [self.ranks.index(rank) for node in self.nodes for rank in node]
        begins = offsets(sizes)
        for member, piece in zip(order, known.split([sizes[at] for at in order]), strict=True):
            whole[begins[member] : begins[member] + sizes[member]] = piece


@dataclass(frozen=True)
class _NodesFill:
    """A fill that runs within and between nodes once it is waited for."""

    nodes: Nodes
    vector: Tensor
    sizes: Sequence[int]

    def wait(self) -> None:
        member = self.nodes.ranks.index(self.nodes.rank)
        part = self.vector.split(list(self.sizes))[member]
        self.vector.copy_(self.nodes.gather(part, self.sizes))


Way = RingSum | Nodes | SingleRank
"""A way in which ranks sum."""


def is_on_device(way: Way | None) -> bool:
    """Return whether a sum runs on the GPU beside its computation."""
    return isinstance(way, RingSum) and dist.get_backend(way.group) == "nccl"


def _sum_by_trees(vector: Tensor, ranks: tuple[int, ...], rank: int, group: Group) -> None:
    """Sum over the nodes' first members by (2); messages of the two trees are matched by their
    order."""
    middle = vector.numel() // 2
    for half, order in ((vector[:middle], ranks), (vector[middle:], ranks[::-1])):
        if not half.numel():
            continue
        at = order.index(rank)
        children = [order[child] for child in (2 * at + 1, 2 * at + 2) if child < len(order)]
        received = half.new_empty(half.shape)
        for child in children:
            dist.recv(received, child, group=group, tag=_TAG)
            half += received
        if at:
            parent = order[(at - 1) // 2]
            dist.send(half, parent, group=group, tag=_TAG)
            dist.recv(half, parent, group=group, tag=_TAG)
        for child in children:
            dist.send(half, child, group=group, tag=_TAG)


def nodes_among(ranks: Sequence[int], roster: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return ranks grouped by the node of their devices; ranks of a node are consecutive.
    ``roster`` lists devices by rank."""
    return tuple(
        tuple(group)
        for _, group in groupby(ranks, key=lambda rank: roster[rank].rpartition(".")[0])
    )


def algorithm_of(stages: Sequence[int], plan: Plan) -> Algorithm:
    """Return the algorithm that the plan chose for the weights of a stage; a ring for weights that
    several stages share."""
    return plan.algorithm(Collective.WEIGHTS, stages[0]) if len(stages) == 1 else Algorithm.RING


def groups_needed(
    ranks: tuple[int, ...], stages: Sequence[int], plan: Plan, roster: Sequence[str]
) -> list[tuple[int, ...]]:
    """Return the sets of ranks that sum among themselves when these ranks do."""
    if algorithm_of(stages, plan) is Algorithm.RING:
        return [ranks]
    nodes = nodes_among(ranks, roster)
    return [ranks, *nodes, tuple(node[0] for node in nodes)]


def way_of(
    ranks: tuple[int, ...],
    stages: Sequence[int],
    plan: Plan,
    groups: Groups,
    rank: int,
    roster: Sequence[str],
) -> Way | None:
    """Return how these ranks sum what they hold; None if there is only one."""
    if ranks not in groups:
        return None
    algorithm, nodes = algorithm_of(stages, plan), nodes_among(ranks, roster)
    if algorithm is Algorithm.RING or (algorithm is Algorithm.HIERARCHICAL and len(nodes) == 1):
        return RingSum(groups[ranks])
    if len(nodes) == 1:
        nodes = tuple((rank,) for rank in ranks)
    return Nodes(groups[ranks], ranks, nodes, groups, rank, algorithm is Algorithm.TREE)
