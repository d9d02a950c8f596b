"""Forces by several processes: each owns a run of the Hilbert curve, some hold slabs of the mesh.

    send particles home -> grow the common tree -> fetch what will be opened -> [ mesh || tree ] -> measure, cut anew

The mesh talks over a group of its own, so that it runs beside the tree. Tree and mesh give the same bits whoever holds
what, so a re-balance changes when a result is there, not the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from argosy.nbody.balance import Balancer, Ends, Leaves, Look
from argosy.nbody.domain import END_OF_CURVE, EssentialTree, essential_tree, to_owners
from argosy.nbody.gravity import NODE_PAIRS, check_positions, tree_force
from argosy.nbody.hilbert import Keys, hilbert_keys
from argosy.nbody.mesh import mesh_force
from argosy.nbody.particles import Floats, Particles
from argosy.nbody.ranks import Ranks, gather
from argosy.nbody.settings import GravitySettings
from argosy.nbody.split import SPLINE

PARTICLE_BYTES = 400.0
"""Positions, momenta, forces and the tree's share, with what is held twice while particles travel."""


STATE_BYTES = 56.0
"""Position, momentum and id."""


class Phase(StrEnum):
    """What takes time, each at a speed of its own."""

    PAIRS = "pairs"
    TREE = "tree"
    MESH = "mesh"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What a rank did for one force."""

    work: float
    """Pairs, with a node as so many; particles sorted and walked; mesh cells."""
    seconds: float


Clock = Callable[[Phase, int, Effort], float]
"""Seconds of a phase on a rank; a run takes those measured, an emulated one makes them up from the work."""


def measured(_phase: Phase, _rank: int, effort: Effort) -> float:
    return effort.seconds


@dataclass(kw_only=True)
class SharedGravity:
    """An ``Engine`` over ranks."""

    size: float
    """Of the box."""
    strength: float
    """G m of a particle."""
    settings: GravitySettings
    ranks: Ranks
    mesh_ranks: Ranks
    """The same processes over another group."""
    balancer: Balancer | None = None
    planes: tuple[int, ...] = ()
    """Where each rank's slab begins, and the end; by default equal slabs."""
    clock: Clock = measured
    starts: Keys | None = None
    """Where each rank's run of the curve begins."""
    seconds: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    """Of the last force, per rank: tree and mesh."""

    def forces(self, particles: Particles) -> tuple[Particles, Floats]:
        if len(particles):
            check_positions(particles.positions, self.size)
        if self.starts is None:
            self.starts = equal_counts(hilbert_keys(particles.positions, self.size), self.ranks)
        particles = to_owners(particles, self.size, self.starts, self.ranks)
        planes = self.planes or even_planes(self.settings.mesh_cells, self.ranks.size)
        with ThreadPoolExecutor(self.settings.threads + 1) as pool:
            smooth = pool.submit(self._mesh, particles.positions, planes)
            begin = time.thread_time()
            essential = self._essential(particles)
            growing = time.thread_time() - begin
            sources = essential.tree, essential.targets, essential.positions
            split = self.settings.split(self.size)
            found = tree_force(*sources, self.size, split, self.settings, pool, essential.wanted)
            mesh, mesh_seconds = smooth.result()
        slab = planes[self.ranks.rank + 1] - planes[self.ranks.rank]
        efforts = {
            Phase.PAIRS: Effort(work=found.pair_equivalents, seconds=found.pair_seconds),
            Phase.TREE: Effort(work=float(len(essential.positions)), seconds=found.walk_seconds + growing),
            Phase.MESH: Effort(work=float(slab * self.settings.mesh_cells**2), seconds=mesh_seconds),
        }
        self._account(particles, essential, found.work, efforts, planes)
        return particles, self.strength * (found.force[essential.own] + mesh)

    def _essential(self, particles: Particles) -> EssentialTree:
        split = self.settings.split(self.size)
        return essential_tree(
            particles,
            self.size,
            ranks=self.ranks,
            cell_size=self.settings.cell_size,
            leaf_size=self.settings.leaf_size,
            cutoff=split.cutoff,
            softened=SPLINE * split.softening,
            theta=self.settings.theta,
        )

    def _mesh(self, positions: Floats, planes: Sequence[int]) -> tuple[Floats, float]:
        begin = time.thread_time()  # of this thread: waiting for others is not its own slowness
        force = mesh_force(
            positions,
            self.size,
            self.settings.mesh_cells,
            self.settings.split(self.size).scale,
            cloud=self.settings.cloud,
            ranks=self.mesh_ranks,
            planes=planes,
        )
        return force, time.thread_time() - begin

    def _account(
        self,
        particles: Particles,
        essential: EssentialTree,
        leaf_work: Floats,
        efforts: dict[Phase, Effort],
        planes: tuple[int, ...],
    ) -> None:
        """Tell all ranks what this one took, and cut anew where that pays."""
        rank = self.ranks.rank
        seconds = {phase: self.clock(phase, rank, effort) for phase, effort in efforts.items()}
        spent = np.array([[seconds[Phase.PAIRS] + seconds[Phase.TREE], seconds[Phase.MESH]]])
        self.seconds = np.concatenate(gather(self.ranks, spent))
        if self.balancer is None:
            return
        keys, work, counts = _own_leaves(particles, essential, leaf_work, self.size)
        rates = np.array(
            [[efforts[Phase.PAIRS].work, seconds[Phase.PAIRS]], [efforts[Phase.TREE].work, seconds[Phase.TREE]]]
        )
        per_unit = _average_rates(np.stack(gather(self.ranks, rates[None])))
        rows = np.stack([work * per_unit[0] + counts * per_unit[1], counts], axis=1)
        parts, starts = gather(self.ranks, rows), gather(self.ranks, keys)
        ends = tuple(np.cumsum([len(part) for part in parts]).tolist())
        rows, all_keys = np.concatenate(parts), np.concatenate(starts)
        leaves = Leaves(work=rows[:, 0], bytes=rows[:, 1] * PARTICLE_BYTES, sent=rows[:, 1] * STATE_BYTES)
        look = Look(leaves=leaves, ends=ends, tree_seconds=self.seconds[:, 0], mesh_seconds=self.seconds[:, 1])
        fresh = self.balancer.decide(look)
        if fresh is not None:
            self.starts = run_starts(all_keys, fresh)
        self.planes = self.balancer.slabs(planes, self.seconds[:, 1])


def _own_leaves(
    particles: Particles, essential: EssentialTree, leaf_work: Floats, box: float
) -> tuple[Keys, Floats, Floats]:
    """Of the leaves in which this rank owns particles: first own key, work of the own share, own particles."""
    starts = essential.tree.start[essential.tree.leaves]
    # Leaves without particles here begin at 0 and would hide the true one: look among those that hold some.
    held = np.flatnonzero(essential.tree.end[essential.tree.leaves] > starts)
    leaf = held[np.searchsorted(starts[held], essential.own, side="right") - 1]
    found, first, counts = np.unique(leaf, return_index=True, return_counts=True)
    keys = hilbert_keys(particles.positions[first], box)
    whole = (essential.tree.end - essential.tree.start)[essential.tree.leaves][found]
    work = (leaf_work[found, 1] + NODE_PAIRS * leaf_work[found, 0]) * counts / whole
    return keys, work, counts.astype(np.float64)


def _average_rates(rates: Floats) -> Floats:
    """Seconds per unit of pairs and of tree work, over all ranks."""
    totals = rates.reshape(-1, 2, 2).sum(axis=0)
    average: Floats = totals[:, 1] / np.maximum(totals[:, 0], 1.0)
    return average


def run_starts(leaf_keys: Keys, ends: Ends) -> Keys:
    """The first key of each rank's run; an empty run begins where the next one does."""
    begins = (0, *ends[:-1])
    keys = [leaf_keys[begin] if begin < len(leaf_keys) else END_OF_CURVE for begin in begins]
    return np.array([0, *keys[1:]], np.int64)


def equal_counts(keys: Keys, ranks: Ranks) -> Keys:
    """Runs with about the same number of particles, from every rank's keys."""
    everyone = np.sort(np.concatenate(gather(ranks, keys)))
    cuts = [len(everyone) * rank // ranks.size for rank in range(ranks.size)]
    return np.array([0, *everyone[cuts[1:]]], np.int64)


def even_planes(cells: int, ranks: int) -> tuple[int, ...]:
    return tuple(cells * rank // ranks for rank in range(ranks + 1))
