"""One process of a box on devices of speeds 8:4:2:1, from equal counts; one of them slows down in
mid-run."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import numpy as np
import torch.distributed
from nbody.boxes import clustered
from nbody.emulated import EmulatedClock

from argosy.nbody.force.gravity import compute_forces
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.particles import Particles, wrapped
from argosy.nbody.planning.balance import Balancer, Rules
from argosy.nbody.processes.shared import SharedGravity
from argosy.nbody.ranks import Ranks, TorchRanks, gather

SETTINGS = GravitySettings(mesh_cells=32, softening=0.01, threads=1, cell_size=128, leaf_size=16)


def balance_series(
    ranks: Ranks, mesh_ranks: Ranks, *, count: int, steps: int
) -> dict[str, list[float]]:
    """Slowest over ideal, force after force: from equal counts, then with rank 0 at half its
    speed."""
    positions = clustered(count, 10.0, seed=11)
    mine = np.arange(count) % ranks.size == ranks.rank
    particles = Particles(
        positions=positions[mine], momenta=np.zeros((mine.sum(), 3)), ids=np.flatnonzero(mine)
    )
    clock = EmulatedClock([8.0, 4.0, 2.0, 1.0])
    balancer = Balancer(capacity=(math.inf,) * ranks.size, rules=Rules(bandwidth=1e10))
    engine = SharedGravity(
        size=10.0,
        strength=1.0,
        settings=SETTINGS,
        ranks=ranks,
        mesh_ranks=mesh_ranks,
        balancer=balancer,
        clock=clock,
    )
    found: dict[str, list[float]] = {"start": [], "slowed": []}
    for series in found.values():
        for _ in range(steps):
            particles, force = engine.forces(particles)
            seconds = engine.seconds.sum(axis=1)
            series.append(float(seconds.max() * sum(clock.speeds) / (seconds * clock.speeds).sum()))
            # Everything moves a little, so that leaves change between forces.
            drift = 0.003 * np.random.default_rng(len(series)).standard_normal((count, 3))
            moved = wrapped(particles.positions + drift[particles.ids], 10.0)
            particles = replace(particles, positions=moved)
        clock.speeds[0] /= 2
    together = np.concatenate(
        gather(ranks, np.concatenate([particles.ids[:, None], particles.positions], axis=1))
    )
    order = np.argsort(together[:, 0])
    exact = compute_forces(together[order, 1:], 10.0, 1.0, SETTINGS).total
    owned, force = engine.forces(particles)
    scale = np.linalg.norm(exact, axis=1).mean()
    found["difference"] = [float(np.abs(force - exact[owned.ids]).max() / scale)]
    return found


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    ranks = TorchRanks()
    found = balance_series(ranks, TorchRanks(), count=int(sys.argv[1]), steps=int(sys.argv[2]))
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    torch.distributed.destroy_process_group()
