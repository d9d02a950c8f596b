"""Sum the gradients of a weight over its holders by the algorithm that the plan chose for their
stage.

    (1)  ring           the backend's own all-reduce
    (2)  tree           within a node up to its first member; over the first members two binary
                        trees, one for each half of the vector, in opposite orders, up to the root
                        and down again, piece by piece; down within the node. NCCL has trees of
                        its own, which its all-reduce chooses
    (3)  hierarchical   as (2), with the backend's all-reduce over the first members

Under ZeRO the sum is scattered and updated rows are gathered; hierarchically, a node's parts cross
between nodes once, through its first member. Vectors are copied to host memory if the backend
supports no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.cost.collective import tree_depth
from argosy.plan.plan import Algorithm, Collective, Plan
from argosy.runtime.communication.collectives import (
    Group,
    Part,
    Pending,
    PendingPart,
    begin_fill,
    begin_scatter_sum,
    gather_uneven,
    is_foreign,
    offsets,
    scatter_sum_uneven,
)
from argosy.runtime.communication.tags import Tag

Groups = Mapping[tuple[int, ...], dist.ProcessGroup | None]
"""Process groups by their ranks; None if this rank is not a member."""
# A tree sends a vector in pieces of at least this many bytes, and in at most this many pieces.
_PIECE_BYTES, _MOST_PIECES = 2**14, 64


class Done:
    """A sum or a fill that was complete as soon as it was begun."""

    def wait(self) -> None: ...


@dataclass(frozen=True)
class RingSum:
    """A sum that uses the backend's all-reduce (1)."""

    group: Group

    def begin(self, vector: Tensor) -> Pending:
        work: Pending | None = dist.all_reduce(vector, group=self.group, async_op=True)
        assert work is not None
        return work

    def begin_each(self, tensors: Sequence[Tensor]) -> Pending:
        """Begin to sum tensors in place, as one call of the backend."""
        group = self.group or dist.group.WORLD
        assert group is not None
        # Backends have no complex numbers.
        parts = [torch.view_as_real(part) if part.is_complex() else part for part in tensors]
        work: Pending = group.allreduce_coalesced(parts, dist.AllreduceCoalescedOptions())
        return work

    def begin_scatter(self, vector: Tensor, sizes: Sequence[int]) -> PendingPart:
        """Begin to add up this member's part of the sum."""
        return begin_scatter_sum(vector, sizes, group=self.group)

    def begin_fill(self, vector: Tensor, sizes: Sequence[int]) -> Pending:
        """Begin to fill a vector, which has this member's part, with the parts of all members."""
        return begin_fill(vector, sizes, group=self.group)


@dataclass(frozen=True)
class SingleRank:
    """The sum of one rank, which has nothing to send."""

    def begin(self, vector: Tensor) -> Pending:
        return Done()

    def begin_scatter(self, vector: Tensor, sizes: Sequence[int]) -> PendingPart:
        return Part(vector)

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

    def begin(self, vector: Tensor) -> Pending:
        if is_foreign(vector, self.group):
            host = vector.cpu()
            self.begin(host)
            vector.copy_(host)
            return Done()
        self._up(vector)
        if self.rank in self.firsts and len(self.firsts) > 1:
            if self.is_tree and dist.get_backend(self.group) != "nccl":
                _sum_by_trees(vector, self.firsts, self.rank, self.group)
            else:
                dist.all_reduce(vector, group=self.groups[self.firsts])
        if len(self.mine) > 1:
            dist.broadcast(vector, self.mine[0], group=self.groups[self.mine])
        return Done()

    def _up(self, vector: Tensor) -> None:
        if len(self.mine) > 1:
            dist.reduce(vector, self.mine[0], group=self.groups[self.mine])

    def begin_scatter(self, vector: Tensor, sizes: Sequence[int]) -> PendingPart:
        return Part(self.scatter(vector, sizes))

    def scatter(self, vector: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return this member's part of the sum."""
        if is_foreign(vector, self.group):
            return self.scatter(vector.cpu(), sizes).to(vector.device)
        vector, own = vector.clone(), sizes[self.ranks.index(self.rank)]
        self._up(vector)
        if self.rank != self.mine[0]:
            part = vector.new_empty(own)
            if own:
                dist.recv(part, self.mine[0], group=self.group, tag=Tag.INSIDE_NODE)
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
                dist.send(piece.contiguous(), rank, group=self.group, tag=Tag.INSIDE_NODE)
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
                dist.send(part.contiguous(), self.mine[0], group=self.group, tag=Tag.INSIDE_NODE)
        else:
            others = [part.new_empty(size) for size in inside[1:]]
            for rank, piece in zip(self.mine[1:], others, strict=True):
                if piece.numel():
                    dist.recv(piece, rank, group=self.group, tag=Tag.INSIDE_NODE)
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


def is_on_device(way: Way | None) -> TypeGuard[RingSum]:
    """Return whether a sum runs on the GPU beside its computation."""
    return isinstance(way, RingSum) and dist.get_backend(way.group) == "nccl"


def _sum_by_trees(vector: Tensor, ranks: tuple[int, ...], rank: int, group: Group) -> None:
    """Sum over the nodes' first members by (2).

    Both trees work at once, piece by piece: a piece goes up while earlier ones come down. Every
    rank takes pieces and trees in the same order, so none waits for a message that another sends
    only later.
    """
    middle = vector.numel() // 2
    halves = ((vector[:middle], ranks), (vector[middle:], ranks[::-1]))
    trees = [
        _Tree(half, order, rank, group, tag=Tag.TREES + 2 * number)
        for number, (half, order) in enumerate(halves)
    ]
    most = max(len(tree.pieces) for tree in trees)
    behind = 2 * tree_depth(len(ranks))
    for step in range(most + behind):
        for tree in trees:
            tree.send_up(step)
        for tree in trees:
            tree.send_down(step - behind)
    for tree in trees:
        tree.finish()


class _Tree:
    """The messages of one rank in a binary tree that sums a vector in place."""

    def __init__(
        self, vector: Tensor, order: tuple[int, ...], rank: int, group: Group, tag: int
    ) -> None:
        least = _PIECE_BYTES // vector.element_size()
        size = max(1, least, -(-vector.numel() // _MOST_PIECES))
        self.pieces = vector.split(size) if vector.numel() else ()
        self.group, self.tag = group, tag
        at = order.index(rank)
        self.parent = order[(at - 1) // 2] if at else None
        self.children = [order[child] for child in (2 * at + 1, 2 * at + 2) if child < len(order)]
        self.arriving = [
            [self._receive(torch.empty_like(piece), child, tag) for child in self.children]
            for piece in self.pieces
        ]
        self.returning: list[Pending] = []
        self.sent: list[Pending] = []

    def _receive(self, part: Tensor, rank: int, tag: int) -> tuple[Tensor, Pending]:
        work: Pending | None = dist.irecv(part, rank, group=self.group, tag=tag)
        assert work is not None
        return part, work

    def _send(self, part: Tensor, rank: int, tag: int) -> None:
        work: Pending | None = dist.isend(part, rank, group=self.group, tag=tag)
        assert work is not None
        self.sent.append(work)

    def send_up(self, index: int) -> None:
        """Add what the children have of a piece, and send the sum to the parent."""
        if index >= len(self.pieces):
            return
        piece = self.pieces[index]
        for part, work in self.arriving[index]:
            work.wait()
            piece += part
        self.arriving[index] = []
        if self.parent is not None:
            self._send(piece, self.parent, self.tag)
            # The whole sum arrives only after the parent has the part that is being sent.
            self.returning.append(self._receive(piece, self.parent, self.tag + 1)[1])

    def send_down(self, index: int) -> None:
        """Pass the whole sum of a piece on to the children."""
        if not 0 <= index < len(self.pieces):
            return
        if self.parent is not None:
            self.returning[index].wait()
        for child in self.children:
            self._send(self.pieces[index], child, self.tag + 1)

    def finish(self) -> None:
        """Wait until everything was sent."""
        for work in self.sent:
            work.wait()


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
