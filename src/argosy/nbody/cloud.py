"""A particle's cloud on the mesh: which cells it covers with which weights, to deposit mass and to interpolate a field.

Positions times cells per length are mesh coordinates x. Over 2 cells (CIC), 3 (TSC) or 4 (PCS), the weights are the
B-splines of that order around x. Arrays hold a slab of planes of x from ``first`` on, followed by the planes above it
that clouds reach into; y and z are whole and wrap around. No sum here is re-ordered: every process finds the same cell.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from argosy.nbody.compiled import compiled_exactly
from argosy.nbody.particles import Floats

UNIT = 1 << 40
"""Parts of a particle's mass."""

Masses = NDArray[np.int64]


def first_planes(positions: Floats, per_length: float, order: int) -> Masses:
    """The plane of x where each particle's cloud begins; may be below 0."""
    planes = np.empty(len(positions), np.int64)
    _fill_first_planes(positions, per_length, order, planes)
    return planes


@compiled_exactly
def _weights(x: float, order: int, weights: Floats) -> int:
    """How a particle at ``x`` is spread over ``order`` cells, and the first of them."""
    if order == 2:
        base = math.floor(x)
        f = x - base
        weights[0], weights[1] = 1 - f, f
        return base
    if order == 3:
        base = math.floor(x + 0.5)
        f = x - base
        weights[0], weights[1], weights[2] = 0.5 * (0.5 - f) ** 2, 0.75 - f * f, 0.5 * (0.5 + f) ** 2
        return base - 1
    base = math.floor(x)
    f = x - base
    g = 1 - f
    weights[0], weights[3] = g * g * g / 6, f * f * f / 6
    weights[1], weights[2] = (4 - 6 * f * f + 3 * f * f * f) / 6, (4 - 6 * g * g + 3 * g * g * g) / 6
    return base - 1


@compiled_exactly
def _fill_first_planes(positions: Floats, per_length: float, order: int, planes: Masses) -> None:
    weights = np.empty(4)
    for p in range(positions.shape[0]):
        planes[p] = _weights(positions[p, 0] * per_length, order, weights)


@compiled_exactly
def deposit(positions: Floats, per_length: float, order: int, first: int, mass: Masses) -> None:
    """Add every particle's cloud to the cells it covers, in units of 1 / UNIT particles."""
    cells = mass.shape[1]
    wx, wy, wz = np.empty(4), np.empty(4), np.empty(4)
    ks = np.empty(4, np.int64)
    for p in range(positions.shape[0]):
        i0 = (_weights(positions[p, 0] * per_length, order, wx) + cells) % cells - first
        j0 = _weights(positions[p, 1] * per_length, order, wy) + cells
        k0 = _weights(positions[p, 2] * per_length, order, wz) + cells
        for c in range(order):
            ks[c] = (k0 + c) % cells
        for a in range(order):
            for b in range(order):
                j = (j0 + b) % cells
                w = wx[a] * wy[b] * UNIT
                for c in range(order):
                    mass[i0 + a, j, ks[c]] += np.int64(np.rint(w * wz[c]))


@compiled_exactly
def interpolate(
    positions: Floats, per_length: float, order: int, first: int, field: Floats, values: Floats, column: int
) -> None:
    """The field at every particle, over the same cloud."""
    cells = field.shape[1]
    wx, wy, wz = np.empty(4), np.empty(4), np.empty(4)
    ks = np.empty(4, np.int64)
    for p in range(positions.shape[0]):
        i0 = (_weights(positions[p, 0] * per_length, order, wx) + cells) % cells - first
        j0 = _weights(positions[p, 1] * per_length, order, wy) + cells
        k0 = _weights(positions[p, 2] * per_length, order, wz) + cells
        for c in range(order):
            ks[c] = (k0 + c) % cells
        value = 0.0
        for a in range(order):
            for b in range(order):
                j = (j0 + b) % cells
                row = 0.0
                for c in range(order):
                    row += wz[c] * field[i0 + a, j, ks[c]]
                value += wx[a] * wy[b] * row
        values[p, column] = value
