"""BullFrog follows second-order perturbation theory in few steps, and the true evolution in
many."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from argosy.nbody.analysis.power import power_spectrum
from argosy.nbody.cosmology import Cosmology
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.initial.conditions import initial_conditions
from argosy.nbody.motion.bullfrog import evolve_bullfrog, growth_at, kick_weight
from argosy.nbody.motion.evolve import LocalGravity, evolve, expansion_steps
from argosy.nbody.particles import Box


def setting(size: float, side: int, redshift: float) -> tuple[Box, LocalGravity]:
    box = initial_conditions(box=size, per_side=side, redshift=redshift, seed=3)
    settings = GravitySettings(mesh_cells=max(2 * side, 32), softening=size / side / 20, threads=2)
    return box, LocalGravity(
        size=size, strength=box.cosmology.particle_gravity(size, side**3), settings=settings
    )


def test_the_second_growth_function_is_known_without_a_vacuum() -> None:
    """With matter alone D = a and E = -3/7 a^2; with a vacuum the fit -3/7 Om^(-1/143) D^2 holds to
    1e-3."""
    for a, growth in zip(
        (0.1, 0.5, 1.0), growth_at(Cosmology(matter=1.0, vacuum=0.0), (0.1, 0.5, 1.0)), strict=True
    ):
        assert growth.second == pytest.approx(-3 / 7 * a**2, rel=1e-5)
        assert growth.slope == pytest.approx(-6 / 7 * a, rel=1e-5)
        assert growth.momentum == pytest.approx(100 * a**1.5, rel=1e-5)
    ours = Cosmology()
    for a, growth in zip((0.1, 0.5, 1.0), growth_at(ours, (0.1, 0.5, 1.0)), strict=True):
        fit = -3 / 7 * ours.matter_at(a) ** (-1 / 143) * growth.first**2
        assert growth.second == pytest.approx(fit, rel=1e-3)


def test_small_steps_have_the_weights_of_a_leapfrog() -> None:
    """With matter alone a kick changes v' = 1.5 (A - v) / D by a step: the weight goes to 1 - 1.5
    dD / D."""
    steps = np.linspace(0.5, 0.505, 3).tolist()
    for now, then in pairwise(growth_at(Cosmology(matter=1.0, vacuum=0.0), steps)):
        step, middle = then.first - now.first, (then.first + now.first) / 2
        assert kick_weight(now, then) == pytest.approx(
            1 - 1.5 * step / middle, abs=2 * (step / middle) ** 2
        )


def test_a_step_of_any_length_keeps_second_order_velocities() -> None:
    """The second-order part of the acceleration at the middle is e / D - D; mixed in, it leads to
    E' of the end."""
    cosmology = Cosmology()
    now, then = growth_at(cosmology, (0.05, 0.8))
    middle, step = (now.first + then.first) / 2, then.first - now.first
    acceleration = (now.second + now.slope * step / 2) / middle - middle
    weight = kick_weight(now, then)
    assert weight * now.slope + (1 - weight) * acceleration == pytest.approx(then.slope, rel=1e-9)


def test_four_steps_come_closer_than_four_of_a_leapfrog() -> None:
    """Positions from z = 24 to z = 2, against 200 small steps; the leapfrog is exact to first order
    only."""
    box, engine = setting(200.0, 16, 24)
    end = 1 / 3
    exact = evolve(box, expansion_steps(box.expansion, end, 200), engine).particles
    few = expansion_steps(box.expansion, end, 4)

    def miss(found: Box) -> float:
        away = found.particles.positions - exact.positions
        away -= box.size * np.rint(away / box.size)
        return float(np.sqrt((away**2).mean()))

    assert miss(evolve_bullfrog(box, few, engine)) < miss(evolve(box, few, engine)) < 0.01


def test_many_steps_are_those_of_a_leapfrog() -> None:
    box, engine = setting(100.0, 16, 24)
    steps = expansion_steps(box.expansion, 0.5, 100)
    ours, theirs = (
        power_spectrum(found.particles.positions, 100.0, 32).power
        for found in (evolve_bullfrog(box, steps, engine), evolve(box, steps, engine))
    )
    np.testing.assert_allclose(ours[:8], theirs[:8], rtol=0.01)


def test_a_run_goes_on_to_the_same_bits() -> None:
    box, engine = setting(50.0, 8, 9)
    steps = expansion_steps(box.expansion, 0.5, 4)
    kept: list[Box] = []
    whole = evolve_bullfrog(
        box, steps, engine, after_step=lambda _, now: kept.append(now)
    ).particles
    resumed = evolve_bullfrog(kept[1], steps, engine, first=2).particles
    assert np.array_equal(whole.positions, resumed.positions)
    assert np.array_equal(whole.momenta, resumed.momenta)
