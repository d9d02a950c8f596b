"""Where stages stand in the rows of their pools (``space.place``), as far as numbers of devices say
it.

A search knows how many devices of each pool are left. By the rule of ``space.place`` that fixes
where the next stage begins: in a node that an earlier stage has begun, or with a new one. So the
hand-over between two stages

    (1)  may stay inside a node only if the second one begins in a node that a pool of the first one
         shares,
    (2)  otherwise passes NICs, and
    (3)  passes the links between sites if the two are in different ones.

What follows a stage is therefore bounded apart for every *beginning*: in a new node of a site, or
in a node that devices of some pools have begun. Where stages take whole nodes of one site there is
only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy.solve.search.kinds import Ground
from argosy.space.option import Vector
from argosy.space.pool import Pool
from argosy.space.price import FloatArray

Indices = NDArray[np.intp]
Flags = NDArray[np.bool_]


class Where(IntEnum):
    """What is certain of the place of the next stage; another site is ``SITE`` plus its number."""

    ANYWHERE = 0
    OTHER_NODE = 1
    SITE = 2


class Steps(NamedTuple):
    """Stages that take the next devices of the rows, one case each."""

    left: Indices
    """[case, pool]: devices behind the stage; negative where there are too few."""
    is_new: Flags
    """[case, pool]: whether the stage takes none of a pool or begins with a new node of it."""
    ends: Flags
    """[case]: whether the stage behind it is in other nodes for certain."""

    @property
    def begins(self) -> Flags:
        """[case]: whether the stage before it is in other nodes for certain."""
        return np.asarray(self.is_new.all(axis=-1))


def row_steps(counts: Indices, left: Indices, vector: Indices, ground: Ground) -> Steps:
    """``left`` and ``vector`` have one row for each case, or one for all."""
    sizes = np.array(ground.node_units)
    is_known = (sizes > 0) & np.array(ground.alone)
    sizes = np.maximum(sizes, 1)
    inside = (counts - left) % sizes
    passed = np.where((inside > 0) & (inside + vector > sizes) & (vector > 0), sizes - inside, 0)
    rest = left - passed - vector
    is_new = (is_known & ((inside + passed) % sizes == 0)) | (vector == 0)
    is_full = (is_known & ((counts - rest) % sizes == 0)) | (vector == 0)
    return Steps(rest, np.broadcast_to(is_new, rest.shape), np.asarray(is_full.all(axis=-1)))


class States:
    """How many devices of each pool are left, numbered: the vectors up to ``counts`` in row
    order."""

    def __init__(self, counts: Vector) -> None:
        self.counts = np.array(counts)
        self.sizes = tuple(number + 1 for number in counts)
        self.vectors = np.stack([axis.ravel() for axis in np.indices(self.sizes)], axis=1)
        steps = [int(np.prod(self.sizes[at + 1 :])) for at in range(len(counts))]
        self.steps = np.array(steps)

    def __len__(self) -> int:
        return len(self.vectors)

    def index(self, vector: Vector) -> int:
        return int(np.dot(vector, self.steps))

    def taking(self, vector: Vector) -> tuple[Indices, Indices]:
        """The states that have a vector to give, and what they become."""
        rich = np.nonzero((self.vectors >= np.array(vector)).all(axis=1))[0]
        return rich, rich - self.index(vector)


class FollowingPlace(NamedTuple):
    """What may follow the stages of a vector."""

    where: int
    """``Where`` the next stage is, at best."""
    group: int
    """Number of the group of beginnings (``Beginnings.groups``) that this covers."""


class Moves(NamedTuple):
    """A stage of one vector with one sort of beginnings, taken from every state that has the
    devices."""

    beginnings: tuple[int, ...]
    before: Indices
    after: Indices


class Beginnings:
    """The sorts of beginnings of a search, and which of them may follow the stages of each
    vector."""

    def __init__(self, pools: Sequence[Pool], ground: Ground, vectors: Sequence[Vector]) -> None:
        self.pools, self.ground = pools, ground
        self.num_sites = max(1, *(len(pool.far) for pool in pools))
        inside: dict[int, int] = {}
        homes = _joined([pool.homes for pool in pools])
        for pool in pools:
            if ground.node_units[pool.index] != 1 or not ground.alone[pool.index]:
                inside.setdefault(homes[pool.index], self.num_sites + len(inside))
        self.inside = [inside.get(home) for home in homes]
        """Per pool, the beginning in a node that was begun; None if stages take whole nodes."""
        self.count = self.num_sites + len(inside)
        self.site_of = [*range(self.num_sites), *(0 for _ in inside)]
        for pool in pools:
            beginning = self.inside[pool.index]
            if beginning is not None:
                self.site_of[beginning] = pool.site
        everything = tuple(range(self.count))
        self.groups: dict[tuple[int, ...], int] = {everything: 0}
        """Beginnings that are asked for together, numbered; the first is all of them."""
        self.ways = [self._ways(vector) for vector in vectors]

    def _ways(self, vector: Vector) -> list[FollowingPlace]:
        used = [pool for pool, number in zip(self.pools, vector, strict=True) if number]
        sites = {pool.site for pool in used}
        inside = {self.inside[pool.index] for pool in used} - {None}
        sets: dict[int, list[int]] = {}
        for beginning in range(self.count):
            if beginning in inside:
                where = int(Where.ANYWHERE)
            elif self.site_of[beginning] in sites:
                where = int(Where.OTHER_NODE)
            else:
                where = Where.SITE + self.site_of[beginning]
            sets.setdefault(where, []).append(beginning)
        return [
            FollowingPlace(where, self.groups.setdefault(tuple(some), len(self.groups)))
            for where, some in sets.items()
        ]

    def grouped(self, values: FloatArray) -> FloatArray:
        """[group, ...]: the least over the beginnings of every group, from values per beginning."""
        if self.count == 1:
            return values
        return np.array([values[list(group)].min(axis=0) for group in self.groups])

    def moves(self, states: States, vector: Vector) -> list[Moves]:
        """A stage of a vector from all states, by its beginnings."""
        steps = row_steps(states.counts, states.vectors, np.array(vector), self.ground)
        before = np.nonzero((steps.left >= 0).all(axis=1))[0]
        after, is_new = steps.left[before] @ states.steps, steps.is_new[before]
        used = [pool for pool, number in zip(self.pools, vector, strict=True) if number]
        found = []
        for pattern in np.unique(is_new, axis=0):
            which = (is_new == pattern).all(axis=1)
            begun = {self.inside[pool.index] for pool in used if not pattern[pool.index]}
            beginnings = begun or {pool.site for pool in used}
            ordered = tuple(sorted(one for one in beginnings if one is not None))
            found.append(Moves(ordered, before[which], after[which]))
        return found

    @cached_property
    def most_ways(self) -> int:
        return max(map(len, self.ways))


def _joined(homes: Iterable[frozenset[str]]) -> list[int]:
    """Per set of nodes, the number of the first set with which it has nodes in common, directly or
    through others."""
    sets = list(homes)
    number = list(range(len(sets)))
    for one in range(len(sets)):
        for other in range(one + 1, len(sets)):
            if not sets[one].isdisjoint(sets[other]) and number[one] != number[other]:
                old = number[other]
                number = [number[one] if each == old else each for each in number]
    return number
