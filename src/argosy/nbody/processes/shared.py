"""Forces by several processes: each owns a run of the Hilbert curve, some hold slabs of the mesh.

    send particles home -> grow the common tree -> fetch what will be opened -> [ mesh || tree ] -> measure, cut anew

The mesh talks over a group of its own, so that it runs beside the tree. Tree and mesh give the same
bits whoever holds what, so a re-balance changes when a result is there, not the result.
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
from argosy.nbody.ranks import Ranks, gather, total


class ForcePhase(StrEnum):
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


Clock = Callable[[ForcePhase, int, Effort], float]
"""Seconds of a phase on a rank; a run takes those measured, an emulated one makes them up from the
work."""


def measured(_phase: ForcePhase, _rank: int, effort: Effort) -> float:
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
    parts: tuple[float, ...] = ()
    """Up to where each rank's run goes before anything is measured, as a part of all particles; by
    default even."""
    clock: Clock = measured
    sum_tree: Callable[..., TreeForce] = tree_force
    """What walks the tree and sums pairs, as ``gravity.tree_force`` does."""
    starts: Keys | None = None
    """Where each rank's run of the curve begins."""
    seconds: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    """Of the last force, per rank: tree and mesh."""

    _settled: tuple[Floats, Keys] = field(
        default_factory=lambda: (np.zeros((0, 3)), np.zeros(0, np.int64))
    )
    """Positions as they were last settled, and their keys."""
    _efforts: dict[ForcePhase, Effort] = field(default_factory=dict)
    """Since the last account."""
    _work: Floats = field(default_factory=lambda: np.zeros(0))
    """Of every own particle since the last account, in pairs."""

    def forces(self, particles: Particles) -> tuple[Particles, Floats]:
        particles, _ = self.settle(particles, np.zeros((len(particles), 0)))
        with ThreadPoolExecutor(self.settings.threads + 1) as pool:
            smooth = pool.submit(self._mesh, particles)
            everyone, places = np.ones(len(particles), bool), np.arange(len(particles))
            short = self._tree(particles, self._known_keys(particles), everyone, places, pool)
            mesh = smooth.result()
        self.account(particles)
        return particles, self.strength * (short + mesh)

    def keys(self, positions: Floats) -> Keys:
        """Places along the curve."""
        return hilbert_keys(positions, self.size)

    def _known_keys(self, particles: Particles) -> Keys:
        """Those of the last ``settle``, if particles are where it left them."""
        settled, keys = self._settled
        return keys if settled is particles.positions else self.keys(particles.positions)

    def settle(self, particles: Particles, carried: Floats) -> tuple[Particles, Floats]:
        """Every particle on the rank whose run of the curve it is in, with its row of
        ``carried``."""
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
        """The tree's part on the ``active`` particles; on others it is anything."""
        keys = self._known_keys(particles)
        order = sorted_order(keys, particles.ids)
        force = np.empty((len(particles), 3))
        with ThreadPoolExecutor(self.settings.threads) as pool:
            force[order] = self._tree(
                particles.taken(order), keys[order], active[order], order, pool
            )
        return self.strength * force

    def smooth(self, particles: Particles) -> Floats:
        """The mesh's part."""
        return self.strength * self._mesh(particles)

    def most(self, value: int) -> int:
        """The largest over all ranks."""
        return int(np.concatenate(gather(self.ranks, np.array([value]))).max())

    def _tree(
        self,
        particles: Particles,
        keys: Keys,
        active: Flags,
        places: Names,
        pool: ThreadPoolExecutor,
    ) -> Floats:
        """Of particles sorted along the curve; ``places`` says where each stands among the rank's
        own."""
        split = self.settings.split(self.size)
        begin = time.thread_time()
        essential = self._essential(particles, keys, active)
        growing = time.thread_time() - begin
        sources = essential.tree, essential.targets, essential.positions
        found = self.sum_tree(*sources, self.size, split, self.settings, pool, essential.wanted)
        self._spend(ForcePhase.PAIRS, found.pair_equivalents, found.pair_seconds)
        self._spend(ForcePhase.TREE, float(len(essential.positions)), found.walk_seconds + growing)
        self._work[places[active]] += _particle_work(essential, found.work)
        force = np.zeros((len(particles), 3))
        force[active] = found.force[essential.own]
        return force

    def _essential(self, particles: Particles, keys: Keys, active: Flags) -> EssentialTree:
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
        """Half the sum of the potential over all ranks' particles; its time is not accounted
        for."""
        keys = self._known_keys(particles)
        order = sorted_order(keys, particles.ids)
        sorted_ones = particles.taken(order)
        essential = self._essential(sorted_ones, keys[order], np.ones(len(particles), bool))
        sources = essential.tree, essential.targets, essential.positions
        split, shape = self.settings.split(self.size), mesh_shape(self.size, self.settings)
        with ThreadPoolExecutor(self.settings.threads) as pool:
            found = tree_force(
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
            sorted_ones.positions, shape, ranks=self.mesh_ranks, planes=self.planes
        )
        own = np.array([found.potential[essential.own].sum() + smooth.sum()])
        return self.strength * float(total(self.ranks, own)[0]) / 2

    def _mesh(self, particles: Particles) -> Floats:
        begin = time.thread_time()  # of this thread: waiting for others is not its own slowness
        cells = self.settings.mesh_cells
        self.planes = self.planes or even_planes(cells, self.ranks.size)
        shape = mesh_shape(self.size, self.settings)
        force = mesh_force(particles.positions, shape, ranks=self.mesh_ranks, planes=self.planes)
        slab = self.planes[self.ranks.rank + 1] - self.planes[self.ranks.rank]
        self._spend(ForcePhase.MESH, float(slab * cells**2), time.thread_time() - begin)
        return force

    def _spend(self, phase: ForcePhase, work: float, seconds: float) -> None:
        before = self._efforts.get(phase, Effort(work=0.0, seconds=0.0))
        self._efforts[phase] = Effort(work=before.work + work, seconds=before.seconds + seconds)

    def account(self, particles: Particles) -> None:
        """Tell all ranks what this one took for its sorted particles since it last did, and cut
        anew if that pays."""
        efforts, work, rank = self._efforts, self._work, self.ranks.rank
        self._efforts, self._work = {}, np.zeros(len(particles))
        seconds = {phase: self.clock(phase, rank, effort) for phase, effort in efforts.items()}
        spent = np.array(
            [[seconds[ForcePhase.PAIRS] + seconds[ForcePhase.TREE], seconds[ForcePhase.MESH]]]
        )
        self.seconds = np.concatenate(gather(self.ranks, spent))
        if self.balancer is None:
            return
        keys, work, counts = _pieces(self._known_keys(particles), work, self.settings.leaf_size)
        rates = np.array(
            [
                [efforts[ForcePhase.PAIRS].work, seconds[ForcePhase.PAIRS]],
                [efforts[ForcePhase.TREE].work, seconds[ForcePhase.TREE]],
            ]
        )
        per_unit = _average_rates(np.stack(gather(self.ranks, rates[None])))
        rows = np.stack([work * per_unit[0] + counts * per_unit[1], counts], axis=1)
        parts, starts = gather(self.ranks, rows), gather(self.ranks, keys)
        ends = tuple(np.cumsum([len(part) for part in parts]).tolist())
        rows, all_keys = np.concatenate(parts), np.concatenate(starts)
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
        fresh = self.balancer.decide(look)
        if fresh is not None:
            self.starts = run_starts(all_keys, fresh)
            look = replace(look, ends=fresh)
        self.planes = self.balancer.slabs(look)


def _particle_work(essential: EssentialTree, leaf_work: Floats) -> Floats:
    """Pairs of each active particle, with a node as so many: its part of its leaf's."""
    tree = essential.tree
    starts, sizes = tree.start[tree.leaves], (tree.end - tree.start)[tree.leaves]
    # Leaves without particles here begin at 0 and would hide the true one: look among those that
    # hold some.
    held = np.flatnonzero(sizes > 0)
    leaf = held[np.searchsorted(starts[held], essential.own, side="right") - 1]
    work: Floats = (leaf_work[leaf, 1] + NODE_PAIRS * leaf_work[leaf, 0]) / sizes[leaf]
    return work


def _pieces(keys: Keys, work: Floats, most: int) -> tuple[Keys, Floats, Floats]:
    """The sorted particles of a rank in pieces of ``most``: first key, work, particles of each."""
    first = np.arange(0, len(keys), most)
    counts = np.diff(np.append(first, len(keys))).astype(np.float64)
    totals = np.add.reduceat(work, first) if len(first) else np.zeros(0)
    return keys[first], totals, counts


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


def counted_starts(keys: Keys, parts: Sequence[float], ranks: Ranks) -> Keys:
    """Runs that end after such parts of all ranks' particles."""
    everyone = np.append(np.sort(np.concatenate(gather(ranks, keys))), END_OF_CURVE)
    cuts = [round(part * (len(everyone) - 1)) for part in parts[:-1]]
    return np.array([0, *everyone[cuts]], np.int64)


def even_planes(cells: int, ranks: int) -> tuple[int, ...]:
    return tuple(cells * rank // ranks for rank in range(ranks + 1))
