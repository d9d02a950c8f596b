"""The exact force in a periodic box by Ewald's sums: slow, in float64, sharing nothing with the
code under test."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfc

Array = NDArray[np.float64]


def ewald_force(
    targets: Array, sources: Array, box: float, softening: float, modes: int = 11
) -> Array:
    """Sum over sources and all their images of (x_j - x_i) / r^3, softened with a cubic spline of
    radius 2.8 x."""
    return near_force(targets, sources, box, softening) + smooth_force(targets, sources, box, modes)


def near_force(targets: Array, sources: Array, box: float, softening: float) -> Array:
    """The part of the sum in real space, with the softening."""
    alpha = 8.0 / box
    force = np.zeros_like(targets)
    for begin in range(0, len(targets), 16):
        part = slice(begin, begin + 16)
        away = sources[None] - targets[part, None]
        away -= box * np.rint(away / box)
        r2 = (away**2).sum(axis=2)
        itself = r2 == 0
        r2[itself] = 1.0
        r = np.sqrt(r2)
        factor = (
            erfc(alpha * r) + 2 * alpha / np.sqrt(np.pi) * r * np.exp(-(alpha**2) * r2)
        ) / r**3
        close = (r < 2.8 * softening) & ~itself
        factor[close] += spline_factor(r[close], 2.8 * softening) - r[close] ** -3
        factor[itself] = 0.0
        force[part] = np.einsum("ij,ijd->id", factor, away)
    return force


def spline_factor(r: Array, h: float) -> Array:
    u = r / h
    inner = 10.666666666667 + u * u * (32.0 * u - 38.4)
    outer = (
        21.333333333333 - 48.0 * u + 38.4 * u**2 - 10.666666666667 * u**3 - 0.066666666667 / u**3
    )
    return np.where(u < 0.5, inner, outer) / h**3


def smooth_force(targets: Array, sources: Array, box: float, modes: int = 11) -> Array:
    """The part of the sum over waves."""
    alpha = 8.0 / box
    line = np.arange(-modes, modes + 1)
    n = np.stack(np.meshgrid(line, line, line, indexing="ij"), axis=-1).reshape(-1, 3)
    n = n[
        ((n**2).sum(axis=1) <= modes**2) & (n @ (modes**2 * 9, modes * 3, 1) > 0)
    ]  # one of k and -k
    force = np.zeros_like(targets)
    for k in np.array_split(n * (2 * np.pi / box), 1 + len(n) // 64):
        waves = np.exp(1j * (k @ sources.T)).sum(axis=1)
        k2 = (k**2).sum(axis=1)
        weight = 8 * np.pi / box**3 * np.exp(-k2 / (4 * alpha**2)) / k2
        phase = np.exp(-1j * (targets @ k.T))
        force += (weight * (phase * waves).imag) @ k
    return force
