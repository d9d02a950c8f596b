"""Compute forces by several processes that all have a GPU: they divide tree and mesh.

    send particles to their owners -> send each rank what is within the cut-off of its own
    -> [ tree -> walk -> pairs ] + mesh

A grid of cells, half a cut-off wide or less, describes where a rank's particles are: the rank marks
their cells and all within the cut-off of them, and every other rank sends its particles there. Each
device then builds a tree over what it holds. A node at the edge lacks particles that are beyond the
cut-off of all targets, so forces agree with those of one device within the tolerance of the tree,
not to the last bit. Ranks exchange data through their hosts.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from argosy.nbody.force.gravity import NODE_PAIRS, mesh_shape
from argosy.nbody.force.hilbert import Keys
from argosy.nbody.force.tasks import Flags
from argosy.nbody.gpu.mesh import mesh_on_device
from argosy.nbody.gpu.sums import count_pairs, sum_on_device
from argosy.nbody.gpu.tree import device_keys, grow_on_device, walk_on_device
from argosy.nbody.particles import Floats, Names, Particles
from argosy.nbody.processes.shared import ForcePhase, SharedGravity, even_planes
from argosy.nbody.ranks import gather_equal

# The largest number of cells per dimension of the grid that describes where particles are.
_MOST_CELLS = 64


@dataclass(kw_only=True)
class SharedGpuGravity(SharedGravity):
    """An ``Engine`` that divides its work among ranks with a device each."""

    device: str
    exchanging: float = 0.0
    """Seconds spent on halos so far."""

    def forces(self, particles: Particles) -> tuple[Particles, Floats]:
        with ThreadPoolExecutor(1) as pool, self.ranks.occupancy.computing():
            particles, _ = self.settle(particles, np.zeros((len(particles), 0)))
            everyone = np.ones(len(particles), bool)
            short = self._tree(
                particles, self._settled[1], everyone, np.arange(len(particles)), pool
            )
            smooth = self._mesh(particles)
        self.account(particles)
        return particles, self.strength * (short + smooth)

    def keys(self, positions: Floats) -> Keys:
        return device_keys(torch.from_numpy(positions).to(self.device), self.size).cpu().numpy()

    def _tree(
        self,
        particles: Particles,
        _keys: Keys,
        active: Flags,
        places: Names,
        _pool: ThreadPoolExecutor,
    ) -> Floats:
        begin = self._now()
        split = self.settings.split(self.size)
        own = torch.from_numpy(particles.positions).to(self.device)
        flags = torch.from_numpy(active).to(self.device)
        halo = self._halo(own, flags, split.cutoff)
        waited = self._now()
        self.exchanging += waited - begin  # waiting for other ranks does not count as work
        if not active.any():
            self._spend(ForcePhase.TREE, 0.0, 0.0)
            self._spend(ForcePhase.PAIRS, 0.0, 0.0)
            return np.zeros((len(particles), 3))
        held = torch.cat([own, halo])
        targets = torch.cat([flags, torch.zeros(len(halo), dtype=torch.bool, device=own.device)])
        keys, order = torch.sort(device_keys(held, self.size), stable=True)
        along = held[order]
        tree = grow_on_device(keys, along, leaf_size=self.settings.leaf_size)
        before = torch.cumsum(torch.cat([flags.new_zeros(1), targets[order]]).to(torch.int64), 0)
        wanted = before[tree.end[tree.leaves]] > before[tree.start[tree.leaves]]
        tasks = walk_on_device(tree, self.size, split, self.settings.tolerance, wanted)
        walked = self._now()
        force = torch.empty_like(along)
        force[order] = sum_on_device(tree, along, tasks, self.size, split)
        counted = count_pairs(tree, tasks).double()
        leaf = torch.repeat_interleave(
            torch.arange(len(tree.leaves), device=own.device), (tree.end - tree.start)[tree.leaves]
        )
        sizes = (tree.end - tree.start)[tree.leaves].double()
        per_particle = torch.empty(len(along), dtype=torch.float64, device=own.device)
        per_particle[order] = ((counted[:, 1] + NODE_PAIRS * counted[:, 0]) / sizes)[leaf]
        summed = self._now()
        self._spend(ForcePhase.TREE, float(len(held)), walked - waited)
        self._spend(
            ForcePhase.PAIRS,
            float((counted[:, 1] + NODE_PAIRS * counted[:, 0]).sum()),
            summed - walked,
        )
        own_work = per_particle[: len(own)].cpu().numpy()
        self._work[places[active]] += own_work[active]
        return force[: len(own)].cpu().numpy()

    def _mesh(self, particles: Particles) -> Floats:
        begin = self._now()
        cells = self.settings.mesh_cells
        self.planes = self.planes or even_planes(cells, self.ranks.size)
        on_device = torch.from_numpy(particles.positions).to(self.device)
        device_force = mesh_on_device(
            on_device, mesh_shape(self.size, self.settings), self.mesh_ranks, self.planes
        )
        force: Floats = device_force.cpu().numpy()
        slab = self.planes[self.ranks.rank + 1] - self.planes[self.ranks.rank]
        self._spend(ForcePhase.MESH, float(slab * cells**2), self._now() - begin)
        return force

    def _now(self) -> float:
        """Return the time after all work of the device is done."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _halo(self, own: Tensor, active: Tensor, cutoff: float) -> Tensor:
        """Return other ranks' particles within the cut-off of the active ones."""
        cells = max(min(math.floor(4 * self.size / cutoff), _MOST_CELLS), 1)
        place = torch.clamp((own * (cells / self.size)).to(torch.int64), max=cells - 1)
        index = (place[:, 0] * cells + place[:, 1]) * cells + place[:, 2]
        marked = torch.zeros(cells**3, dtype=torch.bool, device=own.device)
        marked[index[active]] = True
        reach = math.ceil(cutoff * cells / self.size)
        wanted = _grown(marked.reshape(cells, cells, cells), reach).reshape(-1)
        wanted_by_rank = gather_equal(self.ranks, wanted.cpu().numpy())
        parts = []
        for rank, flags in enumerate(wanted_by_rank):
            mask = torch.from_numpy(np.array(flags)).to(own.device)[index]
            parts.append(own[mask].cpu().numpy() if rank != self.ranks.rank else np.zeros((0, 3)))
        received = np.concatenate(self.ranks.exchange(parts))
        return torch.from_numpy(received).to(own.device)


def _grown(marked: Tensor, reach: int) -> Tensor:
    """Return marked cells and those within ``reach`` of them along each axis, periodically."""
    for dim in range(3):
        spread = marked.clone()
        for shift in range(1, min(reach, marked.shape[dim] // 2) + 1):
            spread |= torch.roll(marked, shift, dim) | torch.roll(marked, -shift, dim)
        marked = spread
    return marked
