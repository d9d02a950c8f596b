"""Potentials against forces, and the energy of a run against what expansion leaves of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from nbody.boxes import clustered
from nbody.thread_ranks import on_threads

from argosy.nbody.force.gravity import compute_forces, compute_potential
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.initial.conditions import initial_conditions
from argosy.nbody.motion.energy import drift, read_samples
from argosy.nbody.motion.evolve import BlockSteps, LocalGravity
from argosy.nbody.particles import Particles
from argosy.nbody.processes.shared import SharedGravity
from argosy.nbody.run import RunSettings, run_box


@pytest.mark.parametrize(("tolerance", "within"), [(0.0, 1e-4), (0.01, 5e-3)])
def test_forces_are_the_slope_of_the_potential(tolerance: float, within: float) -> None:
    settings = GravitySettings(mesh_cells=40, softening=0.05, tolerance=tolerance, threads=1)
    positions = clustered(2000, 10.0, seed=3)
    direction = 1e-4 * np.random.default_rng(2).standard_normal(positions.shape)
    ahead, behind = (
        compute_potential(np.mod(positions + sign * direction, 10.0), 10.0, 1.0, settings).sum() / 2
        for sign in (1, -1)
    )
    work = (compute_forces(positions, 10.0, 1.0, settings).total * direction).sum()
    assert (behind - ahead) / 2 == pytest.approx(work, rel=within)


def test_several_processes_have_the_energy_of_one() -> None:
    positions = clustered(1500, 10.0, seed=4)
    settings = GravitySettings(mesh_cells=32, softening=0.05, threads=1)
    particles = Particles(
        positions=positions, momenta=np.zeros_like(positions), ids=np.arange(1500)
    )
    alone = LocalGravity(size=10.0, strength=2.0, settings=settings).potential_energy(particles)

    def energy(ranks: object, mesh_ranks: object) -> float:
        mine = particles.taken(np.arange(ranks.rank, 1500, 3))  # type: ignore[attr-defined]
        shared = SharedGravity(
            size=10.0, strength=2.0, settings=settings, ranks=ranks, mesh_ranks=mesh_ranks
        )  # type: ignore[arg-type]
        return shared.potential_energy(mine)

    assert on_threads(3, energy) == pytest.approx([alone] * 3, rel=1e-6)


def test_a_run_reports_its_drift_and_shorter_steps_lower_it(tmp_path: Path) -> None:
    box = initial_conditions(box=20.0, per_side=12, redshift=24, seed=3)
    gravity = GravitySettings(mesh_cells=36, softening=0.06, threads=1)
    drifts = []
    for steps in (12, 48):
        settings = RunSettings(
            gravity=gravity, steps=steps, energy_samples=12, restart_every=6, blocks=BlockSteps()
        )
        drifts.append(run_box(box, tmp_path / str(steps), settings).drift)
    assert abs(drifts[1].energy) < 0.01
    assert abs(drifts[1].energy) < abs(drifts[0].energy) < 0.2
    assert all(found.momentum < 1e-3 for found in drifts)
    samples = read_samples(tmp_path / "48" / "energy.csv", 48)
    assert [row.step for row in samples] == list(range(0, 49, 4))
    assert drift(samples) == drifts[1]
    assert [row.step for row in read_samples(tmp_path / "48" / "energy.csv", 17)][-1] == 16
