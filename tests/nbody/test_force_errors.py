"""The table of error against cost keeps its word in any box, at any softening, against Ewald's
exact sums."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from nbody.boxes import Array, clustered, relative_errors
from nbody.ewald import ewald_force, near_force, smooth_force

from argosy.errors import InputError
from argosy.nbody.force.gravity import compute_forces
from argosy.nbody.force.settings import CHOICES, Accuracy, GravitySettings, accuracy_for

SIDE = 16


def lattice(displacement: float, seed: int) -> Array:
    """Particles of a lattice in a box of 1, displaced at random by this part of their
    separation."""
    line = (np.arange(SIDE) + 0.5) / SIDE
    places = np.stack(np.meshgrid(line, line, line, indexing="ij"), axis=-1).reshape(-1, 3)
    shift = np.random.default_rng(seed).normal(0, displacement / SIDE, places.shape)
    return np.mod(places + shift, 1.0)


BOXES = {
    "random": np.random.default_rng(1).uniform(0, 1, (SIDE**3, 3)),
    "clustered": clustered(SIDE**3, 1.0, seed=2),
    "one clump": np.mod(np.random.default_rng(3).normal(0.5, 0.01, (SIDE**3, 3)), 1.0),
    "lattice": lattice(0.02, seed=4),
    "rough lattice": lattice(0.2, seed=5),
}


SOME = np.random.default_rng(6).choice(SIDE**3, 150, replace=False)


@cache
def waves(name: str) -> Array:
    """The sum over waves on some particles of a box, which no softening changes."""
    return smooth_force(BOXES[name][SOME], BOXES[name], 1.0)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: f"{choice.error:g}")
@pytest.mark.parametrize("softening", [0.0, 1 / 30, 0.3, 1.0])
@pytest.mark.parametrize("name", BOXES)
def test_errors_are_those_of_the_table(name: str, softening: float, choice: Accuracy) -> None:
    positions, length = BOXES[name], softening / SIDE
    settings = GravitySettings(
        mesh_cells=max(2, math.ceil(choice.least_mesh / SIDE)) * SIDE,
        softening=length,
        split_cells=choice.split_cells,
        cutoff_scales=choice.cutoff_scales,
        tolerance=choice.tolerance,
        threads=1,
    )
    force = compute_forces(positions, 1.0, 1.0, settings).total
    exact = waves(name) + near_force(positions[SOME], positions, 1.0, max(length, 1e-12))
    errors = relative_errors(force[SOME], exact)
    assert np.percentile(errors, 99) <= choice.error * (1 if softening < 1 else 4)
    assert np.linalg.norm(force.sum(axis=0)) <= 1e-4 * np.linalg.norm(force, axis=1).sum()


def test_the_cheapest_row_that_keeps_an_error_is_taken() -> None:
    taken = [accuracy_for(error).error for error in (1.0, 0.005, 0.0049, 0.002, 0.0015)]
    assert taken == [0.005, 0.005, 0.003, 0.0015, 0.0015]
    with pytest.raises(
        InputError, match=r"force_error: found 0.0001, expected a relative error of at least 0.0015"
    ):
        accuracy_for(0.0001)


def test_particles_at_one_place_attract_like_one_mass() -> None:
    """Hundreds of copies, in several leaves, whose centre of mass rounding moves by a bit; nothing
    is NaN."""
    places = np.array([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3 + 1e-9], [0.7, 0.2, 0.3]])
    positions = np.repeat(places, (300, 200, 100), axis=0)
    for softening in (0.0, 0.01):
        force = compute_forces(
            positions, 1.0, 1.0, GravitySettings(mesh_cells=32, softening=softening)
        ).total
        pull = ewald_force(places[2:], places[[0, 2]], 1.0, 0.01)[0] * 500
        assert np.isfinite(force).all()
        np.testing.assert_allclose(force[-1], pull, atol=3e-3 * np.linalg.norm(pull))


def test_a_softening_beyond_the_cutoff_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"softening: found 0.1, expected at most 0.08929: a softened force must end within",
    ):
        GravitySettings(mesh_cells=32, softening=0.1).split(1.0)
