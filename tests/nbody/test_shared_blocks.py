"""Block steps by several ranks: the same particles as one process, though they change hands and are re-balanced."""

from __future__ import annotations

import math

import numpy as np
import pytest
from emulated import EmulatedClock
from thread_ranks import ThreadRanks, on_threads

from argosy.nbody.balance import Balancer
from argosy.nbody.evolve import BlockSteps, LocalGravity, evolve_in_blocks, expansion_steps
from argosy.nbody.initial import initial_conditions
from argosy.nbody.particles import Box, Particles
from argosy.nbody.settings import GravitySettings
from argosy.nbody.shared import SharedGravity

SETTINGS = GravitySettings(mesh_cells=32, softening=0.05, threads=1, cell_size=64, leaf_size=16)
BLOCKS = BlockSteps(accuracy=0.001, most_levels=3)
BOX = initial_conditions(box=20.0, per_side=10, redshift=9, seed=3)
STRENGTH = BOX.cosmology.particle_gravity(BOX.size, len(BOX.particles))
STEPS = expansion_steps(BOX.expansion, 0.6, 4)


def evolved_by(size: int, *, balanced: bool) -> tuple[Particles, int]:
    """The particles of all ranks by id, and how often their runs were cut anew."""

    def work(ranks: ThreadRanks, mesh_ranks: ThreadRanks) -> tuple[Particles, int]:
        mine = BOX.particles.taken(np.flatnonzero(np.arange(len(BOX.particles)) % size == ranks.rank))
        balancer = Balancer(capacity=(math.inf,) * size) if balanced else None
        engine = SharedGravity(
            size=BOX.size,
            strength=STRENGTH,
            settings=SETTINGS,
            ranks=ranks,
            mesh_ranks=mesh_ranks,
            balancer=balancer,
            clock=EmulatedClock([4.0, 2.0, 1.0][:size]),
        )
        box = Box(size=BOX.size, expansion=BOX.expansion, cosmology=BOX.cosmology, particles=mine)
        last = evolve_in_blocks(box, STEPS, engine, BLOCKS)
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


def test_one_rank_is_the_local_engine() -> None:
    engine = LocalGravity(size=BOX.size, strength=STRENGTH, settings=SETTINGS)
    local = evolve_in_blocks(BOX, STEPS, engine, BLOCKS).particles
    alone, _ = evolved_by(1, balanced=False)
    np.testing.assert_allclose(alone.positions, local.positions[np.argsort(local.ids)], atol=1e-7)
    coarse = evolve_in_blocks(BOX, STEPS, engine, BlockSteps(most_levels=0)).particles
    assert not np.allclose(coarse.positions, local.positions, atol=1e-4), "the blocks make a difference here"
