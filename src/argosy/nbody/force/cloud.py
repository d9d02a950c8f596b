"""Spread particles over mesh cells, to deposit mass and to interpolate a field.

Positions times cells per length are mesh coordinates x. A particle's cloud covers 2 cells (CIC), 3
(TSC) or 4 (PCS); the weights are the B-splines of that order around x. Arrays hold a slab of planes
of x from ``first`` on, followed by the planes above it that clouds reach into; y and z are whole,
followed by the cells that a cloud at their end reaches into. Masses are integers, and weights are
summed only within one cloud: every process computes the same mass in a cell, and the same field at
a particle.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from argosy.nbody.compiled import compiled, compiled_exactly, inlined
from argosy.nbody.particles import Floats

# The number of integer units of a particle's mass.
UNIT = 1 << 40

# Mass in units of 1 / UNIT particles; also numbers of planes.
Masses = NDArray[np.int64]
Fields = NDArray[np.float32]
"""Fields with the dims field, x, y, z."""


def first_planes(positions: Floats, per_length: float, order: int) -> Masses:
    """Return the plane of x at which each particle's cloud begins; it may be below 0."""
    planes = np.empty(len(positions), np.int64)
    _fill_first_planes(positions, per_length, order, planes)
    return planes


@compiled_exactly
def _weights(x: float, order: int, weights: Floats) -> int:
    """Set the weights of a particle at ``x`` over ``order`` cells, and return the first of them."""
    if order == 2:
        base = math.floor(x)
        f = x - base
        weights[0], weights[1] = 1 - f, f
        return base
    if order == 3:
        base = math.floor(x + 0.5)
        f = x - base
        weights[0], weights[1], weights[2] = (
            0.5 * (0.5 - f) ** 2,
            0.75 - f * f,
            0.5 * (0.5 + f) ** 2,
        )
        return base - 1
    base = math.floor(x)
    f = x - base
    g = 1 - f
    weights[0], weights[3] = g * g * g / 6, f * f * f / 6
    weights[1], weights[2] = (
        (4 - 6 * f * f + 3 * f * f * f) / 6,
        (4 - 6 * g * g + 3 * g * g * g) / 6,
    )
    return base - 1


@compiled_exactly
def _fill_first_planes(positions: Floats, per_length: float, order: int, planes: Masses) -> None:
    weights = np.empty(4)
    for p in range(positions.shape[0]):
        planes[p] = _weights(positions[p, 0] * per_length, order, weights)


@inlined
def _deposit_clouds(
    positions: Floats, per_length: float, order: int, first: int, mass: Masses
) -> None:
    cells = mass.shape[1] - order + 1
    wx, wy, wz = np.empty(4), np.empty(4), np.empty(4)
    for p in range(positions.shape[0]):
        i0 = (_weights(positions[p, 0] * per_length, order, wx) + cells) % cells - first
        j0 = (_weights(positions[p, 1] * per_length, order, wy) + cells) % cells
        k0 = (_weights(positions[p, 2] * per_length, order, wz) + cells) % cells
        for a in range(order):
            for b in range(order):
                w = wx[a] * wy[b] * UNIT
                for c in range(order):
                    mass[i0 + a, j0 + b, k0 + c] += np.int64(np.rint(w * wz[c]))


@compiled_exactly
def deposit(positions: Floats, per_length: float, order: int, first: int, mass: Masses) -> None:
    """Add every particle's cloud to the cells it covers, in units of 1 / UNIT particles."""
    if order == 4:
        _deposit_clouds(positions, per_length, 4, first, mass)
    elif order == 3:
        _deposit_clouds(positions, per_length, 3, first, mass)
    else:
        _deposit_clouds(positions, per_length, 2, first, mass)


def wrap_sums(mass: Masses, ghosts: int) -> Masses:
    """Return the mass, with the cells beyond the end of y and z added where they belong."""
    mass[:, :, :ghosts] += mass[:, :, -ghosts:]
    mass[:, :ghosts] += mass[:, -ghosts:]
    return mass[:, :-ghosts, :-ghosts]


@inlined
def _interpolate_clouds(
    positions: Floats, per_length: float, order: int, first: int, fields: Fields
) -> Floats:
    cells = fields.shape[2] - order + 1
    values = np.empty((positions.shape[0], fields.shape[0]))
    wx, wy, wz = np.empty(4), np.empty(4), np.empty(4)
    for p in range(positions.shape[0]):
        i0 = (_weights(positions[p, 0] * per_length, order, wx) + cells) % cells - first
        j0 = (_weights(positions[p, 1] * per_length, order, wy) + cells) % cells
        k0 = (_weights(positions[p, 2] * per_length, order, wz) + cells) % cells
        for field in range(fields.shape[0]):
            value = 0.0
            for a in range(order):
                for b in range(order):
                    row = 0.0
                    for c in range(order):
                        row += wz[c] * fields[field, i0 + a, j0 + b, k0 + c]
                    value += wx[a] * wy[b] * row
            values[p, field] = value
    return values


@compiled
def interpolate(
    positions: Floats, per_length: float, order: int, first: int, fields: Fields
) -> Floats:
    """Return every field at every particle, over the same cloud; sums are re-ordered within a cloud
    only."""
    if order == 4:
        return _interpolate_clouds(positions, per_length, 4, first, fields)
    if order == 3:
        return _interpolate_clouds(positions, per_length, 3, first, fields)
    return _interpolate_clouds(positions, per_length, 2, first, fields)
