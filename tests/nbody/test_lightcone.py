"""The past light cone: every image of a particle is seen once, where and when light says."""

from __future__ import annotations

import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest

from argosy.errors import InputError
from argosy.nbody.cosmology import LIGHT, Cosmology
from argosy.nbody.files.lightcone import LightCone, LightConeSettings, distance
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.initial.conditions import initial_conditions
from argosy.nbody.particles import Box, Particles
from argosy.nbody.ranks import Alone
from argosy.nbody.run import RunSettings, run_box


def seen(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with h5py.File(folder / "lightcone.hdf5") as file:
        group = file["PartType1"]
        return (
            group["Coordinates"][()] / 1000,
            group["ExpansionFactors"][()],
            group["ParticleIDs"][()],
        )


def collected(
    folder: Path, *, drifts: int, speed: float, redshift: float = 0.05
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fifty particles that move evenly from a = 0.94 to today in a box of 40 Mpc/h."""
    random = np.random.default_rng(1)
    particles = Particles(
        positions=random.uniform(0, 40, (50, 3)),
        momenta=random.standard_normal((50, 3)),
        ids=np.arange(50),
    )
    box = Box(size=40.0, expansion=1.0, cosmology=Cosmology(), particles=particles)
    settings = LightConeSettings(redshift=redshift, observer=(0.25, 0.5, 0.0))
    cone = LightCone(settings=settings, box=box, ranks=Alone(), folder=folder / "steps")
    times = np.linspace(0.94, 1.0, drifts + 1)
    for step, (a, b) in enumerate(itertools.pairwise(times.tolist())):
        shift = speed * (b - a) * particles.momenta
        cone.drifting(particles, shift, a, b)
        particles = Particles(
            positions=np.mod(particles.positions + shift, 40.0),
            momenta=particles.momenta,
            ids=particles.ids,
        )
        cone.after_step(step)
    cone.finish(folder / "lightcone.hdf5", 50)
    return seen(folder)


def test_particles_at_rest_are_seen_at_their_distance(tmp_path: Path) -> None:
    places, expansions, ids = collected(tmp_path, drifts=5, speed=0.0)
    cosmology = Cosmology()
    random = np.random.default_rng(1)
    rest = random.uniform(0, 40, (50, 3)) - np.array([10.0, 20.0, 0.0])
    farthest = distance(cosmology, 1 / 1.05)
    offsets = 40.0 * np.array(list(itertools.product(range(-6, 7), repeat=3)))
    images = (rest[:, None] + offsets).reshape(-1, 3)
    expected = np.linalg.norm(images, axis=1)
    names = np.repeat(np.arange(50), len(offsets))[expected < farthest]
    assert sorted(ids.tolist()) == sorted(names.tolist())
    chi = np.linalg.norm(places, axis=1)
    np.testing.assert_allclose(np.sort(chi), np.sort(expected[expected < farthest]), atol=1e-9)
    assert chi == pytest.approx([distance(cosmology, float(a)) for a in expansions], abs=0.02)


def test_particles_that_move_are_seen_once_however_drifts_are_cut(tmp_path: Path) -> None:
    few, many = (
        collected(tmp_path / str(drifts), drifts=drifts, speed=30.0, redshift=0.06383)
        for drifts in (3, 12)
    )
    assert sorted(few[2].tolist()) == sorted(many[2].tolist())


def test_distances_are_those_of_an_empty_universe_without_matter() -> None:
    only_matter = Cosmology(matter=1.0, vacuum=0.0, baryons=0.0)
    assert distance(only_matter, 0.25) == pytest.approx(2 * LIGHT / 100 * (1 - 0.5), rel=1e-6)


def test_a_run_keeps_its_light_cone(tmp_path: Path) -> None:
    box = initial_conditions(box=30.0, per_side=8, redshift=9, seed=1)
    gravity = GravitySettings(mesh_cells=32, softening=0.1, threads=1)
    settings = RunSettings(
        gravity=gravity,
        steps=8,
        energy_samples=0,
        light_cone=LightConeSettings(redshift=0.03),
        restart_every=4,
    )
    run_box(box, tmp_path, settings)
    places, expansions, _ = seen(tmp_path)
    radius = distance(box.cosmology, 1 / 1.03)
    expected = 4 / 3 * np.pi * radius**3 / 30.0**3 * 8**3
    assert len(places) == pytest.approx(expected, rel=0.1)
    assert (np.linalg.norm(places, axis=1) <= radius + 0.02).all()
    assert (np.diff(expansions) >= 0).all()
    late = RunSettings(gravity=gravity, steps=8, light_cone=LightConeSettings(redshift=20))
    with pytest.raises(
        InputError, match="--light-cone: found 20, expected at most z = 9, where the run begins"
    ):
        run_box(box, tmp_path / "late", late)
