"""Forces against Ewald's exact sums, against brute force, and the laws that they keep."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from nbody.boxes import Array, anchor, clustered, needs_anchor, relative_errors
from nbody.ewald import ewald_force, spline_factor
from scipy.special import erfc

from argosy.errors import InfeasibleError, InputError
from argosy.nbody.force.gravity import compute_forces, tree_force
from argosy.nbody.force.hilbert import hilbert_keys
from argosy.nbody.force.mesh import MeshShape, mesh_force
from argosy.nbody.force.settings import Cloud, GravitySettings
from argosy.nbody.force.tasks import target_cells
from argosy.nbody.force.tree import build_tree

ANCHOR = GravitySettings(mesh_cells=64, softening=0.05, threads=2)


def short_range(positions: Array, box: float, settings: GravitySettings) -> tuple[Array, Array]:
    """The tree's part alone, in curve order, and those positions."""
    keys = hilbert_keys(positions, box)
    order = np.argsort(keys)
    along = positions[order]
    tree = build_tree(keys[order], along, leaf_size=settings.leaf_size)
    with ThreadPoolExecutor(2) as pool:
        cells = target_cells(tree, settings.cell_size)
        force = tree_force(tree, cells, along, box, settings.split(box), settings, pool).force
    return force, along


@needs_anchor
@pytest.mark.parametrize(
    ("cloud", "median", "percentile_99"),
    [(Cloud.PCS, 1.2e-4, 1.5e-3), (Cloud.TSC, 3e-4, 2.5e-3), (Cloud.CIC, 1.5e-3, 1.2e-2)],
)
def test_forces_at_redshift_0_are_those_of_the_exact_sums(
    cloud: Cloud, median: float, percentile_99: float
) -> None:
    box = anchor()
    force = compute_forces(box["z0_pos"], 50.0, 1.0, replace(ANCHOR, cloud=cloud)).total
    errors = relative_errors(force[box["ewald_idx"].astype(int)], box["ewald_sum"])
    assert np.median(errors) <= median
    assert np.percentile(errors, 99) <= percentile_99


@needs_anchor
def test_forces_at_redshift_63_are_those_of_the_exact_sums() -> None:
    """Near a lattice all pulls almost cancel, and a mesh is at its worst."""
    positions = anchor()["z63_pos"]
    some = np.arange(5, len(positions), 1213)
    errors = relative_errors(
        compute_forces(positions, 50.0, 1.0, ANCHOR).total[some],
        ewald_force(positions[some], positions, 50.0, 0.05),
    )
    assert np.median(errors) <= 1e-3
    assert errors.max() <= 5e-3


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_forces_in_clustered_boxes_are_those_of_the_exact_sums(seed: int) -> None:
    positions = clustered(900, 7.0, seed)
    settings = GravitySettings(mesh_cells=32, softening=0.01, threads=1)
    errors = relative_errors(
        compute_forces(positions, 7.0, 1.0, settings).total,
        ewald_force(positions, positions, 7.0, 0.01),
    )
    assert np.median(errors) <= 5e-4
    assert np.percentile(errors, 99) <= 5e-3


@pytest.mark.parametrize(
    "distance", [0.001, 0.02, 0.06, 0.1, 0.139, 0.15, 0.3, 1.0, 2.0, 4.0, 5.0, 7.9]
)
def test_two_particles_attract_each_other_as_ewald_says(distance: float) -> None:
    """Through the softening, the short range, the hand-over to the mesh, and beyond; across the
    edge of the box."""
    direction = np.array([0.6, -0.48, 0.64])
    positions = np.mod(np.array([[0.1, 0.2, 15.9], [0.1, 0.2, 15.9] + distance * direction]), 16.0)
    settings = GravitySettings(mesh_cells=48, softening=0.05, threads=1)
    force = compute_forces(positions, 16.0, 3.0, settings).total
    exact = 3.0 * ewald_force(positions, positions, 16.0, 0.05)
    scale = max(np.abs(exact).max(), 3.0 / 16.0)
    np.testing.assert_allclose(force, exact, atol=2e-3 * scale)
    np.testing.assert_allclose(force[0], -force[1], atol=2e-6 * scale)


def test_the_tree_without_acceptance_is_the_sum_over_all_pairs() -> None:
    box, settings = (
        10.0,
        GravitySettings(mesh_cells=40, softening=0.02, tolerance=0.0, leaf_size=20),
    )
    split = settings.split(box)
    found, positions = short_range(clustered(700, box, seed=4), box, settings)
    away = positions[None] - positions[:, None]
    away -= box * np.rint(away / box)
    r = np.sqrt((away**2).sum(axis=2))
    np.fill_diagonal(r, split.cutoff)
    u = r / (2 * split.scale)
    smooth = 1 / r**3 - (erfc(u) + 2 / np.sqrt(np.pi) * u * np.exp(-(u**2))) / r**3
    newton = np.where(r < 2.8 * split.softening, spline_factor(r, 2.8 * split.softening), 1 / r**3)
    factor = np.where(r < split.cutoff, newton - smooth, 0.0)
    exact = np.einsum("ij,ijd->id", factor, away)
    errors = np.linalg.norm(found - exact, axis=1) / np.where(
        r < split.cutoff, newton * r, 0.0
    ).sum(axis=1)
    assert errors.max() <= 1e-5


def test_a_smaller_tolerance_is_more_accurate() -> None:
    box, settings = 10.0, GravitySettings(mesh_cells=40, softening=0.002, leaf_size=16)
    positions = clustered(4000, box, seed=5)
    exact = short_range(positions, box, replace(settings, tolerance=0.0))[0]
    errors = [
        float(
            np.percentile(
                relative_errors(
                    short_range(positions, box, replace(settings, tolerance=tolerance))[0], exact
                ),
                95,
            )
        )
        for tolerance in (0.1, 0.03, 0.01, 0.003)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] <= 1e-3


def test_leaf_leaf_pairs_conserve_momentum() -> None:
    box, settings = 10.0, GravitySettings(mesh_cells=40, softening=0.01, tolerance=0.0)
    force, _ = short_range(clustered(3000, box, seed=6), box, settings)
    assert np.linalg.norm(force.sum(axis=0)) <= 1e-6 * np.linalg.norm(force, axis=1).sum()


def test_the_mesh_conserves_momentum() -> None:
    for cloud in Cloud:
        force = mesh_force(
            clustered(3000, 10.0, seed=7), MeshShape(box=10.0, cells=32, scale=0.4, cloud=cloud)
        )
        assert np.linalg.norm(force.sum(axis=0)) <= 1e-6 * np.linalg.norm(force, axis=1).sum()


def test_forces_do_not_depend_on_the_number_of_threads_or_the_order() -> None:
    positions = clustered(5000, 10.0, seed=8)
    settings = GravitySettings(mesh_cells=32, softening=0.01, threads=1)
    alone = compute_forces(positions, 10.0, 1.0, settings)
    threaded = compute_forces(positions, 10.0, 1.0, replace(settings, threads=3))
    assert np.array_equal(alone.total, threaded.total)
    assert np.array_equal(alone.work, threaded.work)
    mixed = np.random.default_rng(1).permutation(len(positions))
    shuffled = compute_forces(positions[mixed], 10.0, 1.0, settings)
    np.testing.assert_allclose(shuffled.total, alone.total[mixed], rtol=1e-9, atol=1e-9)


def test_particles_at_one_place_are_allowed() -> None:
    positions = np.full((200, 3), 3.0)
    force = compute_forces(
        positions, 10.0, 1.0, GravitySettings(mesh_cells=32, softening=0.1)
    ).total
    assert np.abs(force).max() <= 1e-7 * 200  # of 200 masses at a distance of 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            np.nan,
            "positions: found nan for particle 3, axis 1, expected coordinates of at least 0 and less than 10",
        ),
        (
            10.0,
            "positions: found 10 for particle 3, axis 1, expected coordinates of at least 0 and less than 10",
        ),
        (
            -0.5,
            "positions: found -0.5 for particle 3, axis 1, expected coordinates of at least 0 and less than 10",
        ),
    ],
)
def test_positions_outside_the_box_are_refused(value: float, message: str) -> None:
    positions = clustered(50, 10.0, seed=9)
    positions[3, 1] = value
    with pytest.raises(InputError, match="^" + message + "$"):
        compute_forces(positions, 10.0, 1.0, GravitySettings(mesh_cells=32, softening=0.1))


def test_a_mesh_that_is_too_coarse_for_the_cutoff_is_refused() -> None:
    with pytest.raises(
        InputError,
        match="mesh_cells: found 16, expected at least 32, so that the cut-off is within",
    ):
        GravitySettings(mesh_cells=16, softening=0.1).split(10.0)


def test_a_mesh_that_does_not_fit_into_memory_is_refused() -> None:
    with pytest.raises(
        InfeasibleError, match=r"no memory for a mesh of 30000\^3 cells: .* use fewer cells"
    ):
        mesh_force(clustered(50, 10.0, seed=9), MeshShape(box=10.0, cells=30000, scale=0.1))
