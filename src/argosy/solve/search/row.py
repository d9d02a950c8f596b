"""Determine the places of stages in the rows of their pools (``space.place``), from numbers of
devices alone.

A search knows how many devices of each pool are left. By the rule of ``space.place`` that fixes
where the next stage begins: in a node that an earlier stage uses partly, or with a new one. So the
transfer between two stages

    (1)  may stay inside a node only if the second one begins in a node that a pool of the first one
         shares,
    (2)  otherwise passes NICs, and
    (3)  passes the links between sites if the two are in different ones.

What follows a stage is therefore bounded separately for every *beginning*: in a new node of a site,
or in a node that devices of some pools use partly. If stages take whole nodes of one site there is
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

# Arrays of indices and of truth values.
Indices = NDArray[np.intp]
Flags = NDArray[np.bool_]


class Where(IntEnum):
    """The facts that are certain about the place of the next stage; another site is ``SITE`` plus
    its number."""

    ANYWHERE = 0
    OTHER_NODE = 1
    SITE = 2


class Steps(NamedTuple):
    """The results for stages that take the next devices of the rows, one case each."""

    left: Indices
    """[case, pool]: devices left behind the stage; negative if there are too few."""
    is_new: Flags
    """[case, pool]: whether the stage takes none of a pool or begins with a new node of it."""
    ends: Flags
    """[case]: whether the stage behind it is certainly in other nodes."""

    @property
    def begins(self) -> Flags:
        """Return [case]: whether the stage before it is certainly in other nodes."""
        return np.asarray(self.is_new.all(axis=-1))


def row_steps(counts: Indices, left: Indices, vector: Indices, ground: Ground) -> Steps:
    """Return the steps of stages; ``left`` and ``vector`` have one row for each case, or one for
    all."""
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
    """The numbered vectors up to ``counts`` in row order: how many devices of each pool are
    left."""

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
        """Return the states that have a vector of devices left, and the states that taking it leads
        to."""
        rich = np.nonzero((self.vectors >= np.array(vector)).all(axis=1))[0]
        return rich, rich - self.index(vector)


class VectorSteps(NamedTuple):
    """The facts about a stage that takes the next devices, for each vector."""

    is_short: Flags
    """Whether there are too few devices."""
    left: Indices
    state: Indices
    """The number of the state behind the stage; 0 if there are too few devices."""
    begins: Flags
    """Whether the stage before is certainly in another node."""
    ends: Flags
    """Whether the stage behind is certainly in another node."""


def vector_steps(states: States, devices: Vector, vectors: Indices, ground: Ground) -> VectorSteps:
    """Return the facts about the stage of each vector if ``devices`` are left."""
    steps = row_steps(states.counts, np.array(devices), vectors, ground)
    is_short = np.asarray((steps.left < 0).any(axis=1))
    state = np.where(is_short, 0, steps.left @ states.steps)
    return VectorSteps(is_short, steps.left, state, steps.begins, steps.ends)


class FollowingPlace(NamedTuple):
    """A place that may follow the stages of a vector."""

    where: int
    """The best ``Where`` of the next stage."""
    group: int
    """Number of the group of beginnings (``Beginnings.groups``) that this covers."""


class Moves(NamedTuple):
    """A stage of one vector with one sort of beginnings, which is taken from every state that has
    the devices."""

    beginnings: tuple[int, ...]
    before: Indices
    after: Indices


class Beginnings:
    """The sorts of beginnings that a search has, and which of them may follow the stages of each
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
        """For each pool, the beginning in a partly used node; None if stages take whole nodes."""
        self.count = self.num_sites + len(inside)
        self.site_of = [*range(self.num_sites), *(0 for _ in inside)]
        for pool in pools:
            beginning = self.inside[pool.index]
            if beginning is not None:
                self.site_of[beginning] = pool.site
        everything = tuple(range(self.count))
        self.groups: dict[tuple[int, ...], int] = {everything: 0}
        """Numbered sets of beginnings that are evaluated together; the first is all of them."""
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
            FollowingPlace(where, self.groups.setdefault(tuple(members), len(self.groups)))
            for where, members in sets.items()
        ]

    def grouped(self, values: FloatArray) -> FloatArray:
        """Return [group, ...]: the least over the beginnings of every group, from values per
        beginning."""
        if self.count == 1:
            return values
        return np.array([values[list(group)].min(axis=0) for group in self.groups])

    def moves(self, states: States, vector: Vector) -> list[Moves]:
        """Return the moves of a stage of a vector from all states, by its beginnings."""
        steps = row_steps(states.counts, states.vectors, np.array(vector), self.ground)
        before = np.nonzero((steps.left >= 0).all(axis=1))[0]
        after, is_new = steps.left[before] @ states.steps, steps.is_new[before]
        used = [pool for pool, number in zip(self.pools, vector, strict=True) if number]
        moves = []
        for pattern in np.unique(is_new, axis=0):
            which = (is_new == pattern).all(axis=1)
            begun = {self.inside[pool.index] for pool in used if not pattern[pool.index]}
            beginnings = begun or {pool.site for pool in used}
            ordered = tuple(sorted(beginning for beginning in beginnings if beginning is not None))
            moves.append(Moves(ordered, before[which], after[which]))
        return moves

    @cached_property
    def all_ways(self) -> Indices:
        """Return [way, where or group, vector]; -1 if a vector has fewer ways."""
        padded = [
            [*ways, *[FollowingPlace(-1, -1)] * (self.most_ways - len(ways))] for ways in self.ways
        ]
        return np.array(padded).transpose(1, 2, 0)

    @cached_property
    def most_ways(self) -> int:
        return max(map(len, self.ways))


def _joined(homes: Iterable[frozenset[str]]) -> list[int]:
    """Return for each set of nodes the number of the first set with which it has nodes in common,
    directly or through others."""
    sets = list(homes)
    number = list(range(len(sets)))
    for first in range(len(sets)):
        for second in range(first + 1, len(sets)):
            if not sets[first].isdisjoint(sets[second]) and number[first] != number[second]:
                old = number[second]
                number = [number[first] if current == old else current for current in number]
    return number
