"""Gravity: the error of a force against its cost, for every row of
``nbody.force.settings.CHOICES``, in boxes of all kinds.

The reference is the same force with a smoother mesh (3 cells), a farther cut-off (8 scales) and
every pair computed; it agrees with Ewald's sums to 1e-5 or so. ``tests/nbody/test_force_errors.py``
holds the table to those sums themselves.
"""

from __future__ import annotations

import numpy as np

from argosy.nbody.force.gravity import compute_forces
from argosy.nbody.force.settings import CHOICES, GravitySettings
from argosy.nbody.initial.conditions import initial_conditions
from benchmarks.gravity import evolved_box
from benchmarks.registry import Benchmark, Row, cpu_seconds

SIDE = 32
SOFTENINGS = (1 / 30, 0.3, 1.0)
"""In mean separations."""


def measure() -> list[Row]:
    rows = []
    for name, positions in _boxes().items():
        for softening in SOFTENINGS:
            length = softening / SIDE
            exact = compute_forces(
                positions,
                1.0,
                1.0,
                GravitySettings(
                    mesh_cells=4 * SIDE,
                    softening=length,
                    split_cells=3.0,
                    cutoff_scales=8.0,
                    tolerance=0.0,
                    threads=2,
                ),
            ).total
            for choice in CHOICES:
                settings = GravitySettings(
                    mesh_cells=2 * SIDE,
                    softening=length,
                    split_cells=choice.split_cells,
                    cutoff_scales=choice.cutoff_scales,
                    tolerance=choice.tolerance,
                    threads=1,
                )
                rows += _errors(
                    f"{name}, softening {softening:.2g}, error {choice.error:g}",
                    positions,
                    exact,
                    settings,
                )
    return rows


def _errors(
    what: str, positions: np.ndarray, exact: np.ndarray, settings: GravitySettings
) -> list[Row]:
    found = compute_forces(positions, 1.0, 1.0, settings).total
    errors = 100 * np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    drift = np.linalg.norm(found.sum(axis=0)) / np.linalg.norm(found, axis=1).sum()
    seconds = cpu_seconds(lambda: compute_forces(positions, 1.0, 1.0, settings), repeats=3)
    return [
        Row(what=f"{what}: median", value=float(np.median(errors)), unit="%"),
        Row(what=f"{what}: 99th percentile", value=float(np.percentile(errors, 99)), unit="%"),
        Row(what=f"{what}: sum of forces over sum of magnitudes", value=float(drift), unit=""),
        Row(what=f"{what}: speed", value=len(positions) / seconds / 1e3, unit="k particles/s/core"),
    ]


def _boxes() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    clumps = random.uniform(0, 1, (4, 3))[random.integers(0, 4, SIDE**3)]
    scale = np.array([0.05, 0.02, 0.005, 0.001])[random.integers(0, 4, SIDE**3), None]
    early = initial_conditions(box=1.5 * SIDE, per_side=SIDE, redshift=63, seed=1)
    return {
        "random": random.uniform(0, 1, (SIDE**3, 3)),
        "clumps": np.mod(clumps + scale * random.standard_normal((SIDE**3, 3)), 1.0),
        "z = 63": early.particles.positions / early.size,
        "z = 0": evolved_box()[0] / 50.0,
    }


BENCHMARK = Benchmark(
    name="gravity-errors",
    shows="error of a force against its cost for each row of the table of accuracies",
    measure=measure,
)
