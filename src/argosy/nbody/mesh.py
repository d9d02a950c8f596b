"""The long-range force on a mesh: deposit, Fourier transform, Green's function, gradient, interpolation.

A particle is a cloud over 2, 3 or 4 cells per dimension (CIC, TSC, PCS). With N cells of side L/N and W(k) the
transform of the cloud, a product of sinc^2, sinc^3 or sinc^4 (k_i L / 2N), the force of unit masses is, mode by mode,

    (1)  F(k) = -i k phi(k),   phi(k) = -4 pi exp(-k^2 r_s^2) / k^2 / W(k)^2 x density(k),   phi(0) = 0:

W once for the deposit, once for the interpolation. The gradient is taken in Fourier space; the highest frequency, whose
sign is not defined, has none. Depositing and interpolating with the same cloud makes the sum of all forces zero.
What is left is aliasing. It is worst where particles still stand near a lattice, whose waves are far stronger than the
density's: there CIC is wrong by 4 %, TSC by 0.25 %, PCS by 0.04 %, at the same number of transforms.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from argosy.errors import InfeasibleError
from argosy.nbody.compiled import compiled
from argosy.nbody.hilbert import Positions
from argosy.nbody.settings import Cloud
from argosy.nbody.tree import Floats
from argosy.units import SIZE

Modes = NDArray[np.complex128]


def mesh_force(
    positions: Positions, box: float, cells: int, scale: float, *, cloud: Cloud = Cloud.PCS, workers: int = 1
) -> Floats:
    """The smooth part of the force of unit masses on each other, (1)."""
    try:
        density = np.zeros((cells, cells, cells))
        deposit(positions, cells / box, cloud.order, density)
        modes = scipy.fft.rfftn(density, workers=workers)
        del density
        potential = modes * green(cells, box, scale, cloud)
        del modes
        force = np.empty((len(positions), 3))
        for axis in range(3):
            field = scipy.fft.irfftn(gradient(potential, axis, cells, box), s=(cells,) * 3, workers=workers)
            interpolate(positions, cells / box, cloud.order, field, force, axis)
    except MemoryError:
        need = SIZE.format(8.0 * cells**3)
        raise InfeasibleError(
            f"no memory for a mesh of {cells}^3 cells: several arrays of {need} are needed; use fewer cells"
        ) from None
    return force


def green(cells: int, box: float, scale: float, cloud: Cloud) -> Floats:
    """phi(k) / density(k) of (1) for every mode of a real transform; density as particles per cell."""
    full, last = frequencies(cells, box)
    spread, spread_last = (np.sinc(k * box / (2 * np.pi * cells)) ** cloud.order for k in (full, last))
    squares = full[:, None, None] ** 2 + full[None, :, None] ** 2 + last[None, None, :] ** 2
    squares[0, 0, 0] = 1
    factor = -4 * np.pi * np.exp(-squares * scale * scale) / squares * (cells / box) ** 3
    factor /= (spread[:, None, None] * spread[None, :, None] * spread_last[None, None, :]) ** 2
    factor[0, 0, 0] = 0
    return factor


def frequencies(cells: int, box: float) -> tuple[Floats, Floats]:
    """Wave numbers of a full and of the halved last dim."""
    step = box / cells
    return 2 * np.pi * scipy.fft.fftfreq(cells, step), 2 * np.pi * scipy.fft.rfftfreq(cells, step)


def gradient(potential: Modes, axis: int, cells: int, box: float) -> Modes:
    """-i k phi along one axis."""
    k = frequencies(cells, box)[axis == 2].copy()
    if cells % 2 == 0:
        k[cells // 2] = 0
    shape = [1, 1, 1]
    shape[axis] = len(k)
    return potential * (-1j * k).reshape(shape)


@compiled
def _weights(x: float, order: int, weights: Floats) -> int:
    """How a particle at ``x`` cells is spread over ``order`` cells, and the first of them."""
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


@compiled
def deposit(positions: Positions, per_length: float, order: int, density: Floats) -> None:
    """Add every particle's cloud to the cells it covers."""
    cells = density.shape[0]
    wx, wy, wz = np.empty(4), np.empty(4), np.empty(4)
    ks = np.empty(4, np.int64)
    for p in range(positions.shape[0]):
        i0 = _weights(positions[p, 0] * per_length, order, wx) + cells
        j0 = _weights(positions[p, 1] * per_length, order, wy) + cells
        k0 = _weights(positions[p, 2] * per_length, order, wz) + cells
        for c in range(order):
            ks[c] = (k0 + c) % cells
        for a in range(order):
            i = (i0 + a) % cells
            for b in range(order):
                j = (j0 + b) % cells
                w = wx[a] * wy[b]
                for c in range(order):
                    density[i, j, ks[c]] += w * wz[c]


@compiled
def interpolate(
    positions: Positions, per_length: float, order: int, field: Floats, values: Floats, column: int
) -> None:
    """The field at every particle, over the same cloud."""
    cells = field.shape[0]
    wx, wy, wz = np.empty(4), np.empty(4), np.empty(4)
    ks = np.empty(4, np.int64)
    for p in range(positions.shape[0]):
        i0 = _weights(positions[p, 0] * per_length, order, wx) + cells
        j0 = _weights(positions[p, 1] * per_length, order, wy) + cells
        k0 = _weights(positions[p, 2] * per_length, order, wz) + cells
        for c in range(order):
            ks[c] = (k0 + c) % cells
        value = 0.0
        for a in range(order):
            i = (i0 + a) % cells
            for b in range(order):
                j = (j0 + b) % cells
                row = 0.0
                for c in range(order):
                    row += wz[c] * field[i, j, ks[c]]
                value += wx[a] * wy[b] * row
        values[p, column] = value
