"""Create a glass: particles without a lattice's order, whose forces on each other vanish.

Random particles repel each other until they rest. With the mean density n, the displacement that
removes a long wave is

    (1)  dx = -F / (4 pi n)

for the attractive force F of unit masses, so steps of that size, somewhat damped, converge within a
few dozen forces. A large glass consists of copies of a small one.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from argosy.nbody.force.gravity import compute_forces
from argosy.nbody.force.settings import DEFAULT, GravitySettings
from argosy.nbody.particles import Floats, wrapped

# Particles per side of the small glass that is computed; a larger one consists of copies.
_LARGEST_TILE, _SMALLEST_TILE = 16, 8
# A step moves particles by this share of (1).
_DAMPING = 0.6
# A glass is relaxed in this many steps.
_STEPS = 80
# The softening in mean separations; at smaller distances, repulsion hardly grows.
_SOFTENING = 0.1


def glass(per_side: int, box: float, seed: int) -> Floats:
    """Return ``per_side``^3 positions in a box; equal seeds give equal positions."""
    tile = _tile(per_side)
    copies = per_side // tile
    small = _settled(tile, seed) * (box / copies)
    corners = itertools.product(range(copies), repeat=3)
    whole = np.concatenate([small + np.array(corner) * (box / copies) for corner in corners])
    return wrapped(whole, box)


def _tile(per_side: int) -> int:
    """Return the largest divisor that can be a tile; the whole side if there is none."""
    sizes = range(min(per_side, _LARGEST_TILE), _SMALLEST_TILE - 1, -1)
    return next((size for size in sizes if per_side % size == 0), per_side)


def _settled(side: int, seed: int) -> Floats:
    """Compute a glass in a box of size 1."""
    positions = np.random.default_rng((seed, side)).uniform(0, 1, (side**3, 3))
    cells = max(2, math.ceil(DEFAULT.least_mesh / side)) * side
    settings = GravitySettings(mesh_cells=cells, softening=_SOFTENING / side)
    for _ in range(_STEPS):
        force = compute_forces(wrapped(positions, 1.0), 1.0, 1.0, settings).total
        positions = wrapped(positions - _DAMPING / (4 * math.pi * side**3) * force, 1.0)
    return positions
