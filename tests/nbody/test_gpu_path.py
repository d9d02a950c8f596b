"""The torch path gives the forces of the numba path; on the CPU, or with ``--gpu`` on the GPU that
is there."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from nbody.boxes import clustered
from nbody.thread_ranks import ThreadRanks, on_threads

from argosy.nbody.force.gravity import compute_forces, tree_force
from argosy.nbody.force.hilbert import hilbert_keys
from argosy.nbody.force.settings import Cloud, GravitySettings
from argosy.nbody.force.split import ForceSplit
from argosy.nbody.force.tasks import target_cells
from argosy.nbody.force.tree import MEASURED, build_tree
from argosy.nbody.gpu.force import GpuGravity, GpuTree, for_gpu, gpu_forces
from argosy.nbody.gpu.shared import SharedGpuGravity
from argosy.nbody.gpu.tree import device_keys, grow_on_device, walk_on_device
from argosy.nbody.initial.conditions import initial_conditions
from argosy.nbody.motion.evolve import (
    BlockSteps,
    LocalGravity,
    evolve,
    evolve_in_blocks,
    expansion_steps,
)
from argosy.nbody.particles import Particles
from argosy.nbody.planning.balance import Balancer
from argosy.nbody.processes.shared import SharedGravity

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
"""torch.compile meets it in torch itself."""


@pytest.mark.parametrize(
    ("cloud", "leaf_size"), [(Cloud.CIC, 128), (Cloud.TSC, 64), (Cloud.PCS, 16)]
)
def test_forces_through_torch_are_those_of_the_threads(cloud: Cloud, leaf_size: int) -> None:
    positions = clustered(800, 10.0, seed=21)
    settings = GravitySettings(
        mesh_cells=32, softening=0.01, tolerance=0.02, cloud=cloud, threads=1, leaf_size=leaf_size
    )
    here = compute_forces(positions, 10.0, 2.0, settings).total
    there = gpu_forces(positions, 10.0, 2.0, settings, DEVICE)
    errors = np.linalg.norm(there.total - here, axis=1) / np.linalg.norm(here, axis=1)
    assert np.median(errors) <= 1e-6
    assert errors.max() <= 2e-3  # a device accepts nodes leaf by leaf, within the same tolerance
    phases = {"copy", "sort", "tree", "walk", "pairs", "mesh", "all"}
    assert there.pairs > 0 and set(there.seconds) == phases


def test_larger_leaves_do_not_lose_accuracy() -> None:
    positions = clustered(600, 10.0, seed=22)
    settings = GravitySettings(mesh_cells=32, softening=0.01, tolerance=0.0, threads=1)
    exact = compute_forces(positions, 10.0, 1.0, settings).total
    found = gpu_forces(positions, 10.0, 1.0, for_gpu(settings), DEVICE).total
    errors = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert np.median(errors) <= 1e-6 and errors.max() <= 1e-4


def test_a_device_takes_the_steps_of_the_threads() -> None:
    """Plain and block steps, alone, by two ranks whose pairs a device sums, and by two with a
    device each."""
    box = initial_conditions(box=20.0, per_side=8, redshift=9, seed=3)
    strength = box.cosmology.particle_gravity(box.size, len(box.particles))
    settings = GravitySettings(
        mesh_cells=32, softening=0.05, tolerance=0.0, threads=1, cell_size=64, leaf_size=16
    )
    steps, blocks = (
        expansion_steps(box.expansion, 0.4, 3),
        BlockSteps(accuracy=0.001, most_levels=2),
    )
    on_cpu = LocalGravity(size=box.size, strength=strength, settings=settings)
    on_device = GpuGravity(size=box.size, strength=strength, settings=settings, device=DEVICE)

    def shared(ranks: ThreadRanks, mesh_ranks: ThreadRanks, *, all_on_devices: bool) -> Particles:
        common = {"size": box.size, "strength": strength, "settings": settings, "ranks": ranks}
        common |= {"mesh_ranks": mesh_ranks, "balancer": Balancer(capacity=(math.inf,) * 2)}
        if all_on_devices:
            engine = SharedGpuGravity(**common, device=DEVICE)
        else:
            engine = SharedGravity(**common, sum_tree=GpuTree(DEVICE))
        mine = box.particles.taken(np.flatnonzero(np.arange(len(box.particles)) % 2 == ranks.rank))
        return evolve_in_blocks(replace(box, particles=mine), steps, engine, blocks).particles

    plain = evolve(box, steps, on_cpu).particles.positions
    np.testing.assert_allclose(evolve(box, steps, on_device).particles.positions, plain, atol=1e-4)
    divided = evolve_in_blocks(box, steps, on_cpu, blocks).particles
    alone = evolve_in_blocks(box, steps, on_device, blocks).particles.positions
    np.testing.assert_allclose(alone, divided.positions, atol=1e-4)
    for all_on_devices in (False, True):
        parts = on_threads(2, partial(shared, all_on_devices=all_on_devices))
        together = np.concatenate([part.positions for part in parts])
        order = np.argsort(np.concatenate([part.ids for part in parts]))
        np.testing.assert_allclose(
            together[order], divided.positions[np.argsort(divided.ids)], atol=1e-4
        )


@pytest.mark.parametrize("planes", [(0, 11, 25, 40), (0, 40, 40, 40)])
def test_devices_that_divide_tree_and_mesh_have_the_forces_of_one(planes: tuple[int, ...]) -> None:
    positions = clustered(1500, 10.0, seed=25)
    settings = GravitySettings(mesh_cells=40, softening=0.01, threads=1, leaf_size=16)
    alone = gpu_forces(positions, 10.0, 2.0, settings, DEVICE).total
    particles = Particles(
        positions=positions, momenta=np.zeros_like(positions), ids=np.arange(1500)
    )

    def work(ranks: ThreadRanks, mesh_ranks: ThreadRanks) -> tuple[np.ndarray, np.ndarray]:
        common = {
            "size": 10.0,
            "strength": 2.0,
            "settings": settings,
            "ranks": ranks,
            "mesh_ranks": mesh_ranks,
        }
        engine = SharedGpuGravity(**common, device=DEVICE, planes=planes)
        engine.starts = np.array([0, 1 << 61, 1 << 61])  # the second owns nothing
        mine, force = engine.forces(particles.taken(np.arange(ranks.rank, 1500, 3)))
        return mine.ids, force

    found = on_threads(3, work)
    order = np.argsort(np.concatenate([ids for ids, _ in found]))
    together = np.concatenate([force for _, force in found])[order]
    errors = np.linalg.norm(together - alone, axis=1) / np.linalg.norm(alone, axis=1)
    assert np.median(errors) <= 1e-5 and np.percentile(errors, 99) <= 1e-3


@pytest.mark.parametrize("leaf_size", [1, 16, 100])
def test_a_tree_grown_on_a_device_is_that_of_the_host(leaf_size: int) -> None:
    positions = clustered(3000, 10.0, seed=23)
    positions[:50] = positions[0]  # more particles at one place than a leaf holds
    keys = hilbert_keys(positions, 10.0)
    found = device_keys(torch.from_numpy(positions).to(DEVICE), 10.0)
    assert np.array_equal(found.cpu().numpy(), keys)
    order = np.argsort(keys, kind="stable")
    along = torch.from_numpy(positions[order]).to(DEVICE)
    host = build_tree(keys[order], positions[order], leaf_size=leaf_size)
    there = grow_on_device(torch.from_numpy(keys[order]).to(DEVICE), along, leaf_size=leaf_size)
    assert len(there.start) == host.num_nodes
    by_run = [
        np.lexsort((-ends, starts))
        for starts, ends in ((host.start, host.end), (there.start.cpu(), there.end.cpu()))
    ]
    for name in ("start", "end", *MEASURED):
        ours, theirs = getattr(host, name)[by_run[0]], getattr(there, name).cpu().numpy()[by_run[1]]
        np.testing.assert_allclose(theirs, ours, rtol=1e-9, atol=1e-9)
    assert np.array_equal(host.start[host.leaves], there.start[there.leaves].cpu())


@pytest.mark.parametrize("tolerance", [0.0, 0.01])
def test_a_walk_on_a_device_lists_every_pair_within_the_cutoff_once(tolerance: float) -> None:
    count, cutoff = 500, 0.2
    positions = clustered(count, 1.0, seed=24)
    keys = hilbert_keys(positions, 1.0)
    positions = positions[np.argsort(keys)]
    there = torch.from_numpy(positions).to(DEVICE)
    tree = grow_on_device(torch.from_numpy(np.sort(keys)).to(DEVICE), there, leaf_size=8)
    tasks = walk_on_device(
        tree, 1.0, ForceSplit(scale=0.03, cutoff=cutoff, softening=3e-4), tolerance
    )
    starts, sources = tasks.starts.cpu().numpy(), tasks.sources.cpu().numpy()
    start, end, leaves = (getattr(tree, name).cpu().numpy() for name in ("start", "end", "leaves"))
    times = np.zeros((count, count), int)
    for leaf, target in enumerate(leaves):
        for source in sources[starts[3 * leaf] : starts[3 * leaf + 3]]:
            times[start[target] : end[target], start[source] : end[source]] += 1
    away = positions[None] - positions[:, None]
    away -= np.rint(away)
    assert times.max() == 1
    assert (times[(away**2).sum(axis=2) < cutoff**2] == 1).all()
    assert (tolerance > 0) == bool((np.diff(starts)[::3] > 0).any())


def test_a_device_counts_the_work_of_the_threads() -> None:
    positions = clustered(800, 10.0, seed=21)
    settings = GravitySettings(mesh_cells=32, softening=0.01, threads=1)
    keys = hilbert_keys(positions, 10.0)
    order = np.argsort(keys, kind="stable")
    tree = build_tree(keys[order], positions[order], leaf_size=settings.leaf_size)
    job = (
        tree,
        target_cells(tree, settings.cell_size),
        positions[order],
        10.0,
        settings.split(10.0),
        settings,
    )
    with ThreadPoolExecutor(1) as pool:
        here, there = tree_force(*job, pool), GpuTree(DEVICE)(*job, pool)
    assert np.array_equal(here.work[:, 0], there.work[:, 0])
    assert (
        here.work[:, 1] <= there.work[:, 1]
    ).all()  # threads leave out sources beyond the cut-off of a leaf
    assert here.pair_equivalents > 0
