"""Compute the power spectrum of particles: how strongly matter is clustered at each wavelength.

Two meshes, one shifted by half a cell, remove the strongest aliases (interlacing); the cloud of the
deposit is divided out; the shot noise of N random points, V/N, is subtracted. In bins of one
fundamental frequency,

    (1)  P(k) = mean over modes of |delta(k)|^2 / V - V/N,
         delta(k) as an integral over the box of volume V.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.fft

from argosy.errors import bad_input
from argosy.nbody.force.mesh import Modes, Slab, frequencies, wave_squares
from argosy.nbody.force.settings import Cloud
from argosy.nbody.particles import Floats, wrapped
from argosy.nbody.ranks import Alone


@dataclass(frozen=True, kw_only=True)
class PowerSpectrum:
    """A spectrum whose bins are one fundamental frequency wide; units are h/Mpc and (Mpc/h)^3."""

    k: Floats
    """The mean wave number of the bin's modes."""
    power: Floats
    modes: Floats
    """The number of modes in the average, counting k and -k."""
    shot_noise: float


def power_spectrum(
    positions: Floats, box: float, cells: int, *, subtract_shot_noise: bool = True
) -> PowerSpectrum:
    """Return (1) up to the Nyquist frequency of a mesh with ``cells`` cells per dimension."""
    if cells < 4:
        raise bad_input("at least 4 mesh cells", cells, "cells")
    volume, noise = box**3, box**3 / len(positions)
    contrast = _contrast_modes(positions, box, cells)
    wave = np.sqrt(wave_squares(cells, box))
    weight = np.full(wave.shape, 2.0)
    weight[..., 0] = 1
    if cells % 2 == 0:
        weight[..., -1] = 1
    step = 2 * np.pi / box
    edges = step * np.arange(0.5, cells // 2)
    strength = np.abs(contrast) ** 2 / volume
    modes, power, k = (
        np.histogram(wave, edges, weights=weight * values)[0] for values in (1.0, strength, wave)
    )
    return PowerSpectrum(
        k=k / modes,
        power=power / modes - noise * subtract_shot_noise,
        modes=modes,
        shot_noise=float(noise),
    )


def _contrast_modes(positions: Floats, box: float, cells: int) -> Modes:
    """Return delta(k) for a real transform, interlaced and divided by the cloud's own transform."""
    full, last = frequencies(cells, box)
    half = box / cells / 2
    total = np.zeros((cells, cells, cells // 2 + 1), np.complex128)
    for shift in (0.0, half):
        slab = Slab(box, cells, Cloud.PCS, Alone(), np.array((0, cells)))
        density = slab.density(wrapped(positions + shift, box))
        waves, wave = np.exp(1j * full * shift), np.exp(1j * last * shift)
        total += (
            scipy.fft.rfftn(density)
            * waves[:, None, None]
            * waves[None, :, None]
            * wave[None, None, :]
            / 2
        )
    spread, spread_last = (np.sinc(k * half / np.pi) ** Cloud.PCS.order for k in (full, last))
    total /= spread[:, None, None] * spread[None, :, None] * spread_last[None, None, :]
    total[0, 0, 0] = 0
    return total * (box**3 / len(positions))
