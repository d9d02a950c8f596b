"""Block steps by several ranks: the same particles as one process, though they change hands and are
re-balanced."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from nbody.boxes import clustered
from nbody.emulated import EmulatedClock
from nbody.thread_ranks import ThreadRanks, on_threads

from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.initial.conditions import initial_conditions
from argosy.nbody.motion.evolve import BlockSteps, LocalGravity, evolve_in_blocks, expansion_steps
from argosy.nbody.particles import Box, Particles
from argosy.nbody.planning.balance import Balancer
from argosy.nbody.processes.shared import SharedGravity

SETTINGS = GravitySettings(mesh_cells=32, softening=0.05, threads=1, cell_size=64, leaf_size=16)
BLOCKS = BlockSteps(accuracy=0.001, most_levels=3)
BOX = initial_conditions(box=20.0, per_side=10, redshift=9, seed=3)
STRENGTH = BOX.cosmology.particle_gravity(BOX.size, len(BOX.particles))
STEPS = expansion_steps(BOX.expansion, 0.6, 4)


def evolved_by(
    size: int,
    *,
    balanced: bool,
    whole: Box = BOX,
    settings: GravitySettings = SETTINGS,
    steps: tuple[float, ...] = STEPS,
    blocks: BlockSteps = BLOCKS,
) -> tuple[Particles, int]:
    """The particles of all ranks by id, and how often their runs were cut anew."""
    strength = whole.cosmology.particle_gravity(whole.size, len(whole.particles))

    def work(ranks: ThreadRanks, mesh_ranks: ThreadRanks) -> tuple[Particles, int]:
        mine = whole.particles.taken(
            np.flatnonzero(np.arange(len(whole.particles)) % size == ranks.rank)
        )
        balancer = Balancer(capacity=(math.inf,) * size) if balanced else None
        engine = SharedGravity(
            size=whole.size,
            strength=strength,
            settings=settings,
            ranks=ranks,
            mesh_ranks=mesh_ranks,
            balancer=balancer,
            clock=EmulatedClock([4.0, 2.0, 1.0, 1.0][:size]),
        )
        last = evolve_in_blocks(replace(whole, particles=mine), steps, engine, blocks)
        return last.particles, balancer.moves if balancer else 0

    found = on_threads(size, work)
    parts = [particles for particles, _ in found]
    order = np.argsort(np.concatenate([part.ids for part in parts]))
    positions = np.concatenate([part.positions for part in parts])
    momenta = np.concatenate([part.momenta for part in parts])
    ids = np.concatenate([part.ids for part in parts])
    return Particles(positions=positions, momenta=momenta, ids=ids).taken(order), found[0][1]


@pytest.mark.parametrize(("size", "balanced"), [(2, False), (3, False), (3, True)])
def test_ranks_take_the_block_steps_of_one(size: int, balanced: bool) -> None:
    alone, _ = evolved_by(1, balanced=False)
    together, moves = evolved_by(size, balanced=balanced)
    assert np.array_equal(together.ids, np.sort(BOX.particles.ids))
    assert np.array_equal(together.positions, alone.positions)
    assert np.array_equal(together.momenta, alone.momenta)
    assert (moves > 0) == balanced


@pytest.mark.parametrize("size", [2, 3, 4])
def test_particles_that_drift_within_a_step_do_not_change_the_forces(size: int) -> None:
    """Fast particles cross empty cells, which then belong to ranks in no order of the curve."""
    count = 3000
    particles = Particles(
        positions=clustered(count, 20.0, seed=3),
        momenta=np.random.default_rng(1).normal(0, 300, (count, 3)),
        ids=np.arange(count),
    )
    whole = Box(size=20.0, expansion=0.3, cosmology=BOX.cosmology, particles=particles)
    settings = replace(SETTINGS, cell_size=8, leaf_size=8)
    steps, blocks = expansion_steps(0.3, 0.4, 2), BlockSteps(accuracy=0.01, most_levels=2)
    alone, together = (
        evolved_by(
            ranks, balanced=False, whole=whole, settings=settings, steps=steps, blocks=blocks
        )[0]
        for ranks in (1, size)
    )
    assert np.array_equal(together.positions, alone.positions)
    assert np.array_equal(together.momenta, alone.momenta)


def test_one_rank_is_the_local_engine() -> None:
    engine = LocalGravity(size=BOX.size, strength=STRENGTH, settings=SETTINGS)
    local = evolve_in_blocks(BOX, STEPS, engine, BLOCKS).particles
    alone, _ = evolved_by(1, balanced=False)
    np.testing.assert_allclose(alone.positions, local.positions[np.argsort(local.ids)], atol=1e-7)
    coarse = evolve_in_blocks(BOX, STEPS, engine, BlockSteps(most_levels=0)).particles
    assert not np.allclose(coarse.positions, local.positions, atol=1e-4), (
        "the blocks make a difference here"
    )
