"""Compute forces by several processes: each owns a run of the Hilbert curve, some hold mesh slabs.

    send particles to their owners -> build the common tree -> fetch what will be opened
    -> [ mesh || tree ] -> measure, cut again

The mesh communicates over a group of its own, so that it runs beside the tree. Tree and mesh give
the same bits for any division, so a re-balance changes when a result is ready, not the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from argosy.nbody.force.gravity import (
    NODE_PAIRS,
    TreeForce,
    check_positions,
    mesh_shape,
    tree_force,
)
from argosy.nbody.force.hilbert import Keys, hilbert_keys
from argosy.nbody.force.mesh import mesh_force, mesh_potential
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.force.tasks import Flags
from argosy.nbody.particles import Floats, Names, Particles
from argosy.nbody.planning.balance import Balancer, BalanceSample, Ends, Leaves
from argosy.nbody.planning.pricing import PARTICLE_BYTES, STATE_BYTES
from argosy.nbody.processes.domain import (
    END_OF_CURVE,
    EssentialTree,
    essential_tree,
    sorted_order,
    to_owners,
)
from argosy.nbody.ranks import Ranks, gather, gather_equal, joined, send_rows, total


class ForcePhase(StrEnum):
    """The phases of a force, which have speeds of their own."""

    PAIRS = "pairs"
    TREE = "tree"
    MESH = "mesh"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The work and the time that a rank spent on one phase."""

    work: float
    """Pairs, with a node counted as ``NODE_PAIRS``; particles sorted and walked; or mesh cells."""
    seconds: float
    """CPU seconds, or those of a GPU; ``account`` scales them to the time that all phases take
    together."""


# The largest number of pieces that a rank's run of the curve is described by.
_PIECES = 1024

Clock = Callable[[ForcePhase, int, Effort], float]
"""A function that returns the seconds of a phase on a rank: measured ones in a run, or computed
from the work in an emulated run."""


def measured(_phase: ForcePhase, _rank: int, effort: Effort) -> float:
    """Return the measured seconds of a phase."""
    return effort.seconds


@dataclass(kw_only=True)
class SharedGravity:
    """An ``Engine`` that divides its work among ranks."""

    size: float
    """The side of the box."""
    strength: float
    """G m of a particle."""
    settings: GravitySettings
    ranks: Ranks
    mesh_ranks: Ranks
    """The same processes over another group."""
    balancer: Balancer | None = None
    planes: tuple[int, ...] = ()
    """The first plane of each rank's slab, and the end; by default equal slabs."""
    parts: tuple[float, ...] = ()
    """The end of each rank's run before anything is measured, as a share of all particles; by
    default equal runs."""
    clock: Clock = measured
    sum_tree: Callable[..., TreeForce] = tree_force
    """The function that walks the tree and sums pairs, like ``gravity.tree_force``."""
    starts: Keys | None = None
    """The first key of each rank's run of the curve."""
    seconds: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    """Seconds of tree and mesh for the last force, per rank."""

    _settled: tuple[Floats, Keys] = field(
        default_factory=lambda: (np.zeros((0, 3)), np.zeros(0, np.int64))
    )
    """Positions of the last ``settle``, and their keys."""
    _efforts: dict[ForcePhase, Effort] = field(default_factory=dict)
    """Efforts since the last ``account``."""
    _work: Floats = field(default_factory=lambda: np.zeros(0))
    """The work of every own particle since the last ``account``, in pairs."""
    _walks: int = 0
    """The trees built since the last ``account``."""

    def forces(self, particles: Particles) -> tuple[Particles, Floats]:
        """Move particles to their owners, and return them with their forces."""
        occupancy = self.ranks.occupancy
        with ThreadPoolExecutor(self.settings.threads + 1) as pool, occupancy.computing():
            particles, _ = self.settle(particles, np.zeros((len(particles), 0)))
            smooth = pool.submit(self._mesh, particles)
            everyone, places = np.ones(len(particles), bool), np.arange(len(particles))
            short = self._tree(particles, self._known_keys(particles), everyone, places, pool)
            with occupancy.waiting():
                mesh = smooth.result()
        self.account(particles)
        return particles, self.strength * (short + mesh)

    def keys(self, positions: Floats) -> Keys:
        """Return the keys of positions along the curve."""
        return hilbert_keys(positions, self.size)

    def _known_keys(self, particles: Particles) -> Keys:
        """Return the keys of the last ``settle`` if the particles have not moved, else compute
        them."""
        settled, keys = self._settled
        return keys if settled is particles.positions else self.keys(particles.positions)

    def settle(self, particles: Particles, carried: Floats) -> tuple[Particles, Floats]:
        """Send every particle, with its row of ``carried``, to the rank whose run of the curve
        contains it."""
        if len(particles):
            check_positions(particles.positions, self.size)
        if self.starts is None:
            even = tuple((rank + 1) / self.ranks.size for rank in range(self.ranks.size))
            self.starts = counted_starts(
                self.keys(particles.positions), self.parts or even, self.ranks
            )
        if len(self._work) != len(particles):
            self._work = np.zeros(len(particles))
        rows = np.concatenate([carried, self._work[:, None]], axis=1)
        particles, rows, keys = to_owners(particles, rows, self.keys, self.starts, self.ranks)
        self._settled = particles.positions, keys
        self._work = rows[:, -1].copy()
        return particles, rows[:, :-1]

    def short(self, particles: Particles, active: Flags) -> Floats:
        """Return the tree's part of the force on the ``active`` particles; other rows are
        undefined."""
        keys = self._known_keys(particles)
        order = sorted_order(keys, particles.ids)
        force = np.empty((len(particles), 3))
        with (
            ThreadPoolExecutor(self.settings.threads) as pool,
            self.ranks.occupancy.computing(),
        ):
            force[order] = self._tree(
                particles.taken(order), keys[order], active[order], order, pool
            )
        return self.strength * force

    def smooth(self, particles: Particles) -> Floats:
        """Return the mesh's part of the force."""
        return self.strength * self._mesh(particles)

    def most(self, value: int) -> int:
        """Return the largest value over all ranks."""
        return int(np.concatenate(gather_equal(self.ranks, np.array([value]))).max())

    def _tree(
        self,
        particles: Particles,
        keys: Keys,
        active: Flags,
        places: Names,
        pool: ThreadPoolExecutor,
    ) -> Floats:
        """Return the tree's part of the force on particles that are sorted along the curve.

        ``places`` are their positions among the rank's own particles.
        """
        split = self.settings.split(self.size)
        begin = time.thread_time()
        essential = self._essential(particles, keys, active)
        growing = time.thread_time() - begin
        sources = essential.tree, essential.targets, essential.positions
        tree_result = self.sum_tree(
            *sources, self.size, split, self.settings, pool, essential.wanted
        )
        self._spend(ForcePhase.PAIRS, tree_result.pair_equivalents, tree_result.pair_seconds)
        self._spend(
            ForcePhase.TREE, float(len(essential.positions)), tree_result.walk_seconds + growing
        )
        self._work[places[active]] += _particle_work(essential, tree_result.work)
        self._walks += 1
        force = np.zeros((len(particles), 3))
        force[active] = tree_result.force[essential.own]
        return force

    def _essential(self, particles: Particles, keys: Keys, active: Flags) -> EssentialTree:
        """Build the essential tree of active particles."""
        split = self.settings.split(self.size)
        return essential_tree(
            particles,
            keys,
            active,
            self.size,
            ranks=self.ranks,
            cell_size=self.settings.cell_size,
            leaf_size=self.settings.leaf_size,
            cutoff=split.cutoff,
            softened=split.spline,
            tolerance=self.settings.tolerance,
        )

    def potential_energy(self, particles: Particles) -> float:
        """Return half the sum of the potential over all ranks' particles; its time is not accounted
        for."""
        keys = self._known_keys(particles)
        order = sorted_order(keys, particles.ids)
        sorted_particles = particles.taken(order)
        essential = self._essential(sorted_particles, keys[order], np.ones(len(particles), bool))
        sources = essential.tree, essential.targets, essential.positions
        split, shape = self.settings.split(self.size), mesh_shape(self.size, self.settings)
        with ThreadPoolExecutor(self.settings.threads) as pool:
            tree_result = tree_force(
                *sources,
                self.size,
                split,
                self.settings,
                pool,
                essential.wanted,
                with_potential=True,
            )
        self.planes = self.planes or even_planes(self.settings.mesh_cells, self.ranks.size)
        smooth = mesh_potential(
            sorted_particles.positions, shape, ranks=self.mesh_ranks, planes=self.planes
        )
        own = np.array([tree_result.potential[essential.own].sum() + smooth.sum()])
        return self.strength * float(total(self.ranks, own)[0]) / 2

    def _mesh(self, particles: Particles) -> Floats:
        """Return the mesh's part of the force per unit strength, and record its time."""
        begin = time.thread_time()  # CPU time of this thread: waiting for other ranks is excluded
        cells = self.settings.mesh_cells
        self.planes = self.planes or even_planes(cells, self.ranks.size)
        shape = mesh_shape(self.size, self.settings)
        with self.ranks.occupancy.computing():
            force = mesh_force(
                particles.positions, shape, ranks=self.mesh_ranks, planes=self.planes
            )
        slab = self.planes[self.ranks.rank + 1] - self.planes[self.ranks.rank]
        self._spend(ForcePhase.MESH, float(slab * cells**2), time.thread_time() - begin)
        return force

    def _spend(self, phase: ForcePhase, work: float, seconds: float) -> None:
        """Add work and seconds to a phase."""
        before = self._efforts.get(phase, Effort(work=0.0, seconds=0.0))
        self._efforts[phase] = Effort(work=before.work + work, seconds=before.seconds + seconds)

    def account(self, particles: Particles) -> None:
        """Share the times since the last call with all ranks, and cut the curve again if that pays.

        The particles must be sorted.
        """
        efforts, work, walks, rank = self._efforts, self._work, self._walks, self.ranks.rank
        self._efforts, self._work, self._walks = {}, np.zeros(len(particles)), 0
        # Phases overlap and share cores, so their CPU seconds only divide the time of all of them.
        scale = self.ranks.occupancy.taken() / max(
            sum(effort.seconds for effort in efforts.values()), 1e-9
        )
        seconds = {
            phase: self.clock(phase, rank, replace(effort, seconds=scale * effort.seconds))
            for phase, effort in efforts.items()
        }
        pairs = efforts[ForcePhase.PAIRS].work, seconds[ForcePhase.PAIRS]
        tree = walks * len(particles), seconds[ForcePhase.TREE]
        spent = np.array([[pairs, tree, (0.0, seconds[ForcePhase.MESH])]])
        phases = np.concatenate(gather_equal(self.ranks, spent))
        self.seconds = np.stack([phases[:, :2, 1].sum(axis=1), phases[:, 2, 1]], axis=1)
        if self.balancer is None:
            return
        most = max(self.settings.leaf_size, -(-len(particles) // _PIECES))
        keys, work, counts = _pieces(self._known_keys(particles), work, most)
        walked = _walked_pairs(phases[:, :2])
        rows = np.stack([work + walks * walked * counts, counts], axis=1)
        received = send_rows(self.ranks, (rows, keys), [slice(None)] * self.ranks.size)
        parts = [part for part, _ in received]
        ends = tuple(np.cumsum([len(part) for part in parts]).tolist())
        rows, all_keys = joined(received)
        leaves = Leaves(
            work=rows[:, 0], bytes=rows[:, 1] * PARTICLE_BYTES, sent=rows[:, 1] * STATE_BYTES
        )
        look = BalanceSample(
            leaves=leaves,
            ends=ends,
            tree_seconds=self.seconds[:, 0],
            mesh_seconds=self.seconds[:, 1],
            planes=self.planes,
        )
        self.planes = self.balancer.slabs(look)
        new_ends = self.balancer.decide(look, self.planes)
        if new_ends is not None:
            self.starts = run_starts(all_keys, new_ends)


def _particle_work(essential: EssentialTree, leaf_work: Floats) -> Floats:
    """Return the pairs of each active particle: its share of its leaf's, with a node as
    ``NODE_PAIRS``."""
    tree = essential.tree
    starts, sizes = tree.start[tree.leaves], (tree.end - tree.start)[tree.leaves]
    # Leaves without particles here begin at 0 and would hide the true one, so only leaves with
    # particles are searched.
    held = np.flatnonzero(sizes > 0)
    leaf = held[np.searchsorted(starts[held], essential.own, side="right") - 1]
    return (leaf_work[leaf, 1] + NODE_PAIRS * leaf_work[leaf, 0]) / sizes[leaf]


def _pieces(keys: Keys, work: Floats, most: int) -> tuple[Keys, Floats, Floats]:
    """Return the first key, the work and the particles of pieces of ``most`` sorted particles."""
    first = np.arange(0, len(keys), most)
    counts = np.diff(np.append(first, len(keys))).astype(np.float64)
    totals = np.add.reduceat(work, first) if len(first) else np.zeros(0)
    return keys[first], totals, counts


def _walked_pairs(rates: Floats) -> float:
    """Return the pairs that take as long as the tree of one particle, over all ranks.

    In pairs, a rank's speed does not depend on that of other ranks.
    """
    (pairs, seconds), (particles, growing) = rates.sum(axis=0)
    return float(growing / max(particles, 1.0) * pairs / seconds) if seconds > 0 else 1.0


def run_starts(leaf_keys: Keys, ends: Ends) -> Keys:
    """Return the first key of each rank's run; an empty run begins where the next one does."""
    begins = (0, *ends[:-1])
    keys = [leaf_keys[begin] if begin < len(leaf_keys) else END_OF_CURVE for begin in begins]
    return np.array([0, *keys[1:]], np.int64)


def counted_starts(keys: Keys, parts: Sequence[float], ranks: Ranks) -> Keys:
    """Return the starts of runs that end after these shares of all ranks' particles."""
    everyone = np.append(np.sort(np.concatenate(gather(ranks, keys))), END_OF_CURVE)
    cuts = [round(part * (len(everyone) - 1)) for part in parts[:-1]]
    return np.array([0, *everyone[cuts]], np.int64)


def even_planes(cells: int, ranks: int) -> tuple[int, ...]:
    """Return the first planes of equal slabs, and the end."""
    return tuple(cells * rank // ranks for rank in range(ranks + 1))
