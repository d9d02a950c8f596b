"""Several ranks find the forces of one, to the last bit, wherever the curve and the mesh are
cut."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from nbody.boxes import clustered
from nbody.thread_ranks import ThreadRanks, on_threads

from argosy.nbody.force.gravity import compute_forces
from argosy.nbody.force.hilbert import hilbert_keys
from argosy.nbody.force.mesh import MeshShape, mesh_force
from argosy.nbody.force.settings import Cloud, GravitySettings
from argosy.nbody.force.tasks import target_cells
from argosy.nbody.force.tree import build_tree
from argosy.nbody.particles import Particles
from argosy.nbody.processes.domain import common_cells
from argosy.nbody.processes.shared import SharedGravity
from argosy.nbody.ranks import Alone, Occupancy

SETTINGS = GravitySettings(mesh_cells=32, softening=0.01, threads=1, cell_size=64, leaf_size=16)


def shares(positions: np.ndarray, size: int, seed: int = 1) -> list[Particles]:
    """Particles dealt out at random."""
    owner = np.random.default_rng(seed).integers(0, size, len(positions))
    ids = np.arange(len(positions))
    return [
        Particles(
            positions=positions[owner == rank],
            momenta=positions[owner == rank] + 1,
            ids=ids[owner == rank],
        )
        for rank in range(size)
    ]


def shared_forces(
    positions: np.ndarray, size: int, planes: tuple[int, ...] = (), starts: object = None
) -> np.ndarray:
    parts = shares(positions, size)

    def work(ranks: ThreadRanks, mesh_ranks: ThreadRanks) -> tuple[Particles, np.ndarray]:
        engine = SharedGravity(
            size=10.0,
            strength=2.0,
            settings=SETTINGS,
            ranks=ranks,
            mesh_ranks=mesh_ranks,
            planes=planes,
        )
        if starts is not None:
            engine.starts = np.asarray(starts, np.int64)
        return engine.forces(parts[ranks.rank])

    force = np.full_like(positions, np.nan)
    for particles, mine in on_threads(size, work):
        assert np.array_equal(particles.momenta, positions[particles.ids] + 1)
        force[particles.ids] = mine
    return force


@pytest.mark.parametrize(
    ("size", "planes"),
    [
        (1, ()),
        (2, ()),
        (3, (0, 20, 20, 32)),
        (4, ()),
        (5, (0, 1, 2, 3, 31, 32)),
        (3, (0, 0, 0, 32)),
    ],
)
def test_ranks_find_the_forces_of_one_process(size: int, planes: tuple[int, ...]) -> None:
    positions = clustered(3000, 10.0, seed=1)
    alone = compute_forces(positions, 10.0, 2.0, SETTINGS).total
    together = shared_forces(positions, size, planes)
    np.testing.assert_allclose(together, alone, rtol=1e-12, atol=1e-9)
    assert np.array_equal(together, shared_forces(positions, 1))


def test_a_rank_may_own_nothing() -> None:
    positions = clustered(500, 10.0, seed=2)
    alone = compute_forces(positions, 10.0, 2.0, SETTINGS).total
    np.testing.assert_allclose(
        shared_forces(positions, 3, starts=[0, 1 << 61, 1 << 61]), alone, rtol=1e-12, atol=1e-9
    )


@pytest.mark.parametrize("cloud", list(Cloud))
def test_slabs_are_one_mesh(cloud: Cloud) -> None:
    positions = clustered(800, 10.0, seed=3)
    shape = MeshShape(box=10.0, cells=12, scale=0.8, cloud=cloud)
    alone = mesh_force(positions, shape)
    for planes in ((0, 1, 2, 12), (0, 0, 11, 12), (0, 12, 12, 12)):
        parts = np.array_split(np.arange(800), 3)
        found = on_threads(
            3,
            lambda ranks, _, planes=planes, parts=parts: mesh_force(
                positions[parts[ranks.rank]], shape, ranks=ranks, planes=planes
            ),
        )
        assert np.array_equal(np.concatenate(found), alone)


@pytest.mark.parametrize("size", [1, 3])
def test_cells_are_those_of_the_one_tree(size: int) -> None:
    positions = clustered(2000, 10.0, seed=4)
    keys = np.sort(hilbert_keys(positions, 10.0))
    tree = build_tree(keys, positions, leaf_size=8, least_bits=0)
    nodes = target_cells(tree, 40)
    dealt = np.random.default_rng(5).integers(0, size, len(keys))
    found = (
        [common_cells(keys, 40, Alone())]
        if size == 1
        else on_threads(size, lambda ranks, _: common_cells(keys[dealt == ranks.rank], 40, ranks))
    )
    for cells in found:
        begins, ends = (
            np.searchsorted(keys, cells.low),
            np.searchsorted(keys, cells.high, side="right"),
        )
        assert begins.tolist() == tree.start[nodes].tolist()
        assert ends.tolist() == tree.end[nodes].tolist()


def test_a_process_computes_while_one_of_its_threads_does() -> None:
    occupancy = Occupancy()
    begin = time.perf_counter()
    with occupancy.computing(), ThreadPoolExecutor(1) as pool:

        def beside() -> None:
            with occupancy.computing():
                time.sleep(0.05)

        done = pool.submit(beside)
        with occupancy.waiting():
            done.result()  # the other thread computes
            time.sleep(0.2)  # none does
    spent = time.perf_counter() - begin
    assert 0.04 <= occupancy.taken() <= spent - 0.19
    assert occupancy.taken() == 0.0


def test_cells_of_particles_at_one_place_end() -> None:
    cells = common_cells(np.full(100, 5, np.int64), 10, Alone())
    assert (cells.low.tolist(), cells.high.tolist()) == ([5], [5])
