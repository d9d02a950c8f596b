"""The torch path gives the forces of the numba path; here on whatever device there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from boxes import clustered

from argosy.nbody.gpu import for_gpu, gpu_forces
from argosy.nbody.gravity import compute_forces
from argosy.nbody.settings import Cloud, GravitySettings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("cloud", "leaf_size"), [(Cloud.CIC, 128), (Cloud.TSC, 64), (Cloud.PCS, 16)])
def test_forces_through_torch_are_those_of_the_threads(cloud: Cloud, leaf_size: int) -> None:
    positions = clustered(800, 10.0, seed=21)
    settings = GravitySettings(mesh_cells=32, softening=0.01, theta=0.6, cloud=cloud, threads=1, leaf_size=leaf_size)
    here = compute_forces(positions, 10.0, 2.0, settings).total
    there = gpu_forces(positions, 10.0, 2.0, settings, DEVICE)
    errors = np.linalg.norm(there.total - here, axis=1) / np.linalg.norm(here, axis=1)
    assert np.median(errors) <= 1e-6
    assert errors.max() <= 1e-4
    assert there.pairs > 0 and set(there.seconds) == {"tree", "mesh", "pairs", "all"}


def test_larger_leaves_do_not_lose_accuracy() -> None:
    positions = clustered(600, 10.0, seed=22)
    settings = GravitySettings(mesh_cells=32, softening=0.01, theta=0.0, threads=1)
    exact = compute_forces(positions, 10.0, 1.0, settings).total
    found = gpu_forces(positions, 10.0, 1.0, for_gpu(settings), DEVICE).total
    assert np.median(np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)) <= 1e-6
