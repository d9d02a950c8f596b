"""A glass is quieter than noise and takes the spectrum of a lattice; a movie is a PNG that decoders
read."""

from __future__ import annotations

import io

import numpy as np
import pytest

from argosy.errors import InputError
from argosy.nbody.analysis.movie import movie, positions_between
from argosy.nbody.analysis.power import power_spectrum
from argosy.nbody.initial.conditions import ParticleLoad, initial_conditions
from argosy.nbody.initial.glass import glass
from argosy.nbody.particles import Box


def test_a_glass_is_far_below_shot_noise_and_repeats_with_its_seed() -> None:
    positions = glass(16, 32.0, seed=1)
    quiet = power_spectrum(positions, 32.0, 16, subtract_shot_noise=False)
    assert (quiet.power[:4] < 1e-3 * quiet.shot_noise).all()
    assert np.array_equal(glass(8, 1.0, seed=2), glass(8, 1.0, seed=2))
    assert glass(18, 1.0, seed=1).shape == (18**3, 3)


def test_a_displaced_glass_has_the_waves_of_a_displaced_lattice() -> None:
    grid, loaded = (
        initial_conditions(box=400.0, per_side=16, redshift=20, seed=1, load=load)
        for load in (ParticleLoad.GRID, ParticleLoad.GLASS)
    )
    first, second = (
        power_spectrum(box.particles.positions, 400.0, 16, subtract_shot_noise=False).power[:3]
        for box in (grid, loaded)
    )
    np.testing.assert_allclose(second, first, rtol=0.05)


def test_a_movie_goes_through_its_snapshots() -> None:
    image = pytest.importorskip("PIL.Image")
    boxes = [initial_conditions(box=50.0, per_side=8, redshift=z, seed=1) for z in (9, 4, 1)]
    passed = list(positions_between(boxes, 9))
    np.testing.assert_allclose(passed[0], boxes[0].particles.positions, atol=1e-9)
    np.testing.assert_allclose(passed[-1], boxes[-1].particles.positions, atol=1e-9)
    with image.open(io.BytesIO(movie(boxes[::-1], frames=5, pixels=32))) as film:
        assert (film.size, film.n_frames) == ((32, 32), 5)
        frames = []
        for number in range(5):
            film.seek(number)
            frames.append(np.asarray(film.convert("RGB")))
    assert len({frame.tobytes() for frame in frames}) == 5
    with pytest.raises(InputError, match="snapshots of two or more moments"):
        movie(boxes[:1])
    other = Box(
        size=50.0,
        expansion=1.0,
        cosmology=boxes[0].cosmology,
        particles=boxes[0].particles.taken(np.arange(100)),
    )
    with pytest.raises(InputError, match="other particles at z = 0"):
        movie([*boxes, other])
