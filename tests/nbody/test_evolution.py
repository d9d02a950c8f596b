"""Boxes through time: linear growth, agreement with GADGET-4, block steps, and what a run
conserves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from nbody.boxes import anchor, needs_anchor

from argosy.errors import InputError
from argosy.nbody.analysis.halos import find_halos
from argosy.nbody.analysis.power import power_spectrum
from argosy.nbody.cosmology import Cosmology
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.initial.conditions import Order, initial_conditions
from argosy.nbody.initial.spectrum import linear_power
from argosy.nbody.motion.evolve import (
    BlockSteps,
    LocalGravity,
    evolve,
    evolve_in_blocks,
    expansion_steps,
    halfway,
)
from argosy.nbody.particles import Box, Particles

GADGET = Cosmology(matter=0.308, vacuum=0.692, hubble=0.678, sigma8=0.9, index=1.0)


def anchor_box() -> tuple[Box, LocalGravity]:
    content = anchor()
    a = float(content["z63_a"])
    particles = Particles(
        positions=content["z63_pos"],
        momenta=content["z63_u"] * a**1.5,
        ids=np.arange(len(content["z63_pos"])),
    )
    gravity = GravitySettings(mesh_cells=64, softening=0.05, threads=2)
    engine = LocalGravity(
        size=50.0, strength=GADGET.particle_gravity(50.0, len(particles)), settings=gravity
    )
    return Box(size=50.0, expansion=a, cosmology=GADGET, particles=particles), engine


def power_ratio(positions: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ours, theirs = (power_spectrum(x, 50.0, 64) for x in (positions, reference))
    return ours.k, ours.power / theirs.power


def test_growth_in_an_empty_and_in_a_full_universe() -> None:
    only_matter = Cosmology(matter=1.0, vacuum=0.0)
    assert only_matter.growth(0.25) == pytest.approx(0.25, rel=1e-6)
    assert only_matter.growth_rate(0.25) == pytest.approx(1.0, rel=1e-5)
    # With matter alone p of a growing mode goes as a^1.5 and the force as a; for short steps
    # nothing depends on that.
    assert only_matter.kick(0.25, 0.49, 0.3) == pytest.approx(
        (0.49**1.5 - 0.25**1.5) / 0.3 / 150, rel=1e-6
    )
    assert only_matter.drift(0.25, 0.49, 0.3) == pytest.approx(
        (0.49 - 0.25) / 0.3**1.5 / 100, rel=1e-6
    )
    ours, a, b = Cosmology(), 0.5, 0.5001
    assert ours.kick(a, b, a) == pytest.approx((b - a) / (a**2 * ours.hubble_rate(a)), rel=1e-3)
    assert ours.drift(a, b, a) == pytest.approx((b - a) / (a**3 * ours.hubble_rate(a)), rel=1e-3)
    # Carroll, Press and Turner (1992): good to a per cent or so.
    lambda_dominated = Cosmology(matter=0.308, vacuum=0.692)
    fit = 2.5 * 0.308 / (0.308 ** (4 / 7) - 0.692 + (1 + 0.308 / 2) * (1 + 0.692 / 70))
    assert lambda_dominated.growth(1e-3) == pytest.approx(1e-3 / fit, rel=5e-3)
    assert lambda_dominated.growth_rate(1.0) == pytest.approx(0.308**0.55, rel=1e-2)


def test_the_linear_spectrum_has_the_variance_and_the_slopes_it_should() -> None:
    cosmology = Cosmology()
    k = np.geomspace(1e-4, 1e2, 20001)
    power = linear_power(cosmology, k)
    window = 3 * (np.sin(8 * k) - 8 * k * np.cos(8 * k)) / (8 * k) ** 3
    variance = np.sum((k**3 * power * window**2)[:-1] * np.diff(np.log(k))) / (2 * np.pi**2)
    assert np.sqrt(variance) == pytest.approx(cosmology.sigma8, rel=1e-3)
    assert np.log(power[10] / power[0]) / np.log(k[10] / k[0]) == pytest.approx(
        cosmology.index, abs=0.02
    )
    smooth = linear_power(replace(cosmology, baryons=0.0), k)
    acoustic = (k > 0.03) & (k < 0.3)
    wiggles = power[acoustic] / smooth[acoustic]
    assert (
        (wiggles[1:-1] > wiggles[:-2]) & (wiggles[1:-1] > wiggles[2:])
    ).sum() >= 2  # baryons leave their waves


@pytest.mark.parametrize("order", list(Order))
def test_initial_conditions_have_the_spectrum_asked_for(order: Order) -> None:
    box = initial_conditions(box=400.0, per_side=32, redshift=49, seed=1, order=order)
    measured = power_spectrum(box.particles.positions, 400.0, 32, subtract_shot_noise=False)
    linear = linear_power(box.cosmology, measured.k) * box.cosmology.growth(box.expansion) ** 2
    low = measured.k < 0.1
    scatter = np.sqrt(2 / measured.modes[low])
    assert (np.abs(measured.power[low] / linear[low] - 1) < 4 * scatter).all()
    again = initial_conditions(box=400.0, per_side=32, redshift=49, seed=1, order=order)
    assert np.array_equal(box.particles.positions, again.particles.positions)


def test_second_order_displacements_grow_as_they_should() -> None:
    """phi2 goes with the growth factor squared: 2LPT minus Zel'dovich at two redshifts."""

    def second(redshift: float) -> np.ndarray:
        both = [
            initial_conditions(
                box=50.0, per_side=8, redshift=redshift, seed=2, order=order
            ).particles.positions
            for order in (Order.SECOND, Order.ZELDOVICH)
        ]
        away = both[0] - both[1]
        return away - 50.0 * np.rint(away / 50.0)

    cosmology = Cosmology()
    growth = [cosmology.growth(1 / (1 + z)) for z in (49, 24)]
    ratio = np.linalg.norm(second(24)) / np.linalg.norm(second(49))
    assert ratio == pytest.approx((growth[1] / growth[0]) ** 2, rel=1e-3)


def test_long_waves_grow_as_linear_theory_says() -> None:
    """Today within 1 %. A coarser lattice grows less: 32 per side lose 1 % of the fundamental mode,
    16 lose 2.5 %."""
    box = initial_conditions(box=1500.0, per_side=48, redshift=9, seed=1)
    strength = box.cosmology.particle_gravity(1500.0, 48**3)
    engine = LocalGravity(
        size=1500.0, strength=strength, settings=GravitySettings(mesh_cells=48, softening=1.0)
    )
    later = evolve(box, expansion_steps(box.expansion, 1.0, 32), engine)
    before, after = (
        power_spectrum(x.particles.positions, 1500.0, 48, subtract_shot_noise=False).power[0]
        for x in (box, later)
    )
    growth = box.cosmology.growth(box.expansion) ** -2
    assert after / before == pytest.approx(growth, rel=0.01)


def test_a_growing_wave_grows_as_linear_theory_says_in_a_single_step() -> None:
    """Kicks and drifts of any length lead from Zel'dovich's displacements at one time to those at
    another."""
    cosmology = Cosmology()
    a, b, displacement = 0.05, 0.9, 0.7
    middle = halfway(a, b)
    force = 1.5 * 100**2 * cosmology.matter * displacement
    x, p = cosmology.growth(a) * displacement, cosmology.growing_momentum(a) * displacement
    p += force * cosmology.growth(a) * cosmology.kick(a, middle, a)
    x += p * cosmology.drift(a, b, middle)
    p += force * cosmology.growth(b) * cosmology.kick(middle, b, b)
    assert x == pytest.approx(cosmology.growth(b) * displacement, rel=1e-9)
    assert p == pytest.approx(cosmology.growing_momentum(b) * displacement, rel=1e-9)


@needs_anchor
def test_a_short_evolution_follows_gadget() -> None:
    """From z = 63 to z = 2 in 48 steps: the fundamental mode within 1 %, smaller scales a little
    low."""
    box, engine = anchor_box()
    content = anchor()
    later = evolve(box, expansion_steps(box.expansion, float(content["z2_a"]), 48), engine)
    k, ratio = power_ratio(later.particles.positions, content["z2_pos"])
    assert abs(ratio[0] - 1) < 0.01
    assert (np.abs(ratio[k <= 1.0] - 1) < 0.05).all()


@needs_anchor
@pytest.mark.exhaustive
def test_the_spectrum_today_is_gadgets_and_converges_with_steps() -> None:
    box, engine = anchor_box()
    content = anchor()
    worst = []
    for steps in (64, 128, 256):
        today = evolve(box, expansion_steps(box.expansion, 1.0, steps), engine)
        k, ratio = power_ratio(today.particles.positions, content["z0_pos"])
        worst.append(np.abs(ratio[k <= 2.0] - 1).max())
    assert worst[0] > worst[1] > worst[2]
    assert np.abs(ratio[k <= 0.5] - 1).max() < 0.01
    assert worst[2] < 0.03
    assert len(find_halos(today.particles.positions, 50.0)) == pytest.approx(
        len(content["fof_len"]), rel=0.1
    )


@needs_anchor
@pytest.mark.exhaustive
def test_block_steps_reach_with_fewer_steps_what_small_steps_do() -> None:
    box, engine = anchor_box()
    content = anchor()
    steps = expansion_steps(box.expansion, 1.0, 64)
    today = evolve_in_blocks(box, steps, engine, BlockSteps(most_levels=3))
    k, ratio = power_ratio(today.particles.positions, content["z0_pos"])
    assert np.abs(ratio[k <= 0.5] - 1).max() < 0.01
    assert np.abs(ratio[k <= 2.0] - 1).max() < 0.03


def test_block_steps_without_levels_are_plain_steps() -> None:
    box = initial_conditions(box=30.0, per_side=8, redshift=15, seed=4)
    strength = box.cosmology.particle_gravity(30.0, 512)
    engine = LocalGravity(
        size=30.0, strength=strength, settings=GravitySettings(mesh_cells=32, softening=0.1)
    )
    steps = expansion_steps(box.expansion, 0.5, 6)
    plain = evolve(box, steps, engine).particles
    blocks = evolve_in_blocks(box, steps, engine, BlockSteps(most_levels=0)).particles
    np.testing.assert_allclose(blocks.positions, plain.positions, atol=1e-9)
    divided = evolve_in_blocks(
        box, steps, engine, BlockSteps(accuracy=1e-4, most_levels=3)
    ).particles
    assert not np.allclose(divided.positions, plain.positions, atol=1e-6)


def test_total_momentum_is_conserved() -> None:
    box = initial_conditions(box=30.0, per_side=8, redshift=15, seed=4)
    strength = box.cosmology.particle_gravity(30.0, 512)
    settings = GravitySettings(mesh_cells=32, softening=0.1, tolerance=0.0)
    engine = LocalGravity(size=30.0, strength=strength, settings=settings)
    later = evolve(box, expansion_steps(box.expansion, 0.5, 6), engine).particles
    assert (
        np.linalg.norm(later.momenta.sum(axis=0))
        <= 1e-5 * np.linalg.norm(later.momenta, axis=1).sum()
    )


@needs_anchor
def test_friends_of_friends_are_gadgets() -> None:
    content = anchor()
    halos = find_halos(content["z0_pos"], 50.0)
    assert halos.sizes.tolist() == sorted(content["fof_len"].astype(int).tolist(), reverse=True)


def test_friends_of_friends_are_the_connected_components() -> None:
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import cKDTree

    positions = np.mod(np.random.default_rng(5).normal(0, 0.3, (2000, 3)), 1.0)
    length = 0.2 / 2000 ** (1 / 3)
    pairs = cKDTree(positions, boxsize=1.0).query_pairs(length, output_type="ndarray")
    links = coo_matrix((np.ones(len(pairs)), pairs.T), shape=(2000, 2000))
    _, label = connected_components(links, directed=False)
    sizes = np.sort(np.bincount(label))[::-1]
    halos = find_halos(positions, 1.0, least=2)
    assert halos.sizes.tolist() == sizes[sizes >= 2].tolist()
    assert (np.bincount(halos.member_of[halos.member_of >= 0]) == halos.sizes).all()


def test_a_halo_across_the_edge_has_its_centre_there() -> None:
    random = np.random.default_rng(6)
    clump = np.mod(random.normal(0, 0.01, (100, 3)), 10.0)
    positions = np.concatenate([clump, random.uniform(1, 9, (900, 3))])
    halo = find_halos(positions, 10.0, least=50)
    assert len(halo) == 1
    away = halo.centres[0] - 10.0 * np.rint(halo.centres[0] / 10.0)
    assert np.abs(away).max() < 0.01


def test_steps_are_uniform_in_the_root_and_meet_every_snapshot() -> None:
    steps = expansion_steps(0.04, 1.0, 4, also=(0.5, 2.0))
    assert steps == pytest.approx((0.04, 0.16, 0.36, 0.5, 0.64, 1.0))
    with pytest.raises(
        InputError, match=r"end: found 0.01, expected an end after the start at a = 0.04"
    ):
        expansion_steps(0.04, 0.01, 4)
    with pytest.raises(InputError, match="steps: found 0, expected at least 1 step"):
        expansion_steps(0.04, 1.0, 0)
