"""Compute the linear power spectrum of matter.

It is Eisenstein and Hu's fit (1998) with baryons, or the older shape parameter.

    (1)  P(k) = A k^n T(k)^2,   A such that the variance in spheres of 8 Mpc/h is sigma8^2:
    (2)  sigma8^2 = integral of k^2 P(k) W(8k)^2 dk / (2 pi^2),   W(x) = 3 (sin x - x cos x) / x^3.

T is Omega_b/Omega_m of the baryons' transfer function plus the rest of the cold matter's; numbers
in the code are those of the fit. With a shape parameter Gamma, T = [1 + (a q + (b q)^1.5 + (c
q)^2)^1.13]^(-1/1.13), q = k / Gamma, after Efstathiou, Bond and White (1992).
"""

from __future__ import annotations

import math

import numpy as np

from argosy.errors import bad_input, impossible
from argosy.nbody.cosmology import LIGHT, Cosmology
from argosy.nbody.force.tree import Floats

# The temperature of the cosmic microwave background in kelvin.
_CMB_KELVIN = 2.7255
# The Hubble length c / H0 in Mpc/h; H0 is 100 km/s per Mpc/h.
_HUBBLE_LENGTH = LIGHT / 100
# The wave number at which A_s is given, 1/Mpc.
_PIVOT = 0.05
# Primordial amplitudes outside this range are taken for input errors.
_FAINTEST, _BRIGHTEST = 1e-12, 1e-6


def linear_power(cosmology: Cosmology, k: Floats, shape: float | None = None) -> Floats:
    """Return the linear power spectrum today in (Mpc/h)^3 (1); k is in h/Mpc.

    If ``shape`` is given, it is Gamma; else the fit of Eisenstein and Hu is used.
    """
    if cosmology.sigma8 is None:
        reason = "the cosmology has no sigma8"
        raise impossible("compute the linear spectrum", reason, "adding sigma8")
    waves = np.geomspace(1e-4, 1e2, 4096)
    density = (
        waves**3 * _shape_of(cosmology, waves, shape) * _sphere(8 * waves) ** 2 / (2 * np.pi**2)
    )
    variance = np.dot(density[1:] + density[:-1], np.diff(np.log(waves))) / 2
    return cosmology.sigma8**2 / variance * _shape_of(cosmology, k, shape)


def sigma8_of(cosmology: Cosmology, amplitude: float) -> float:
    """Return sigma8 of primordial curvature perturbations of variance A_s at 0.05 per Mpc.

    T is that of Eisenstein and Hu:

        (3)  P(k) = 2 pi^2 / k^3 x A_s (k / k_p)^(n - 1) x [2/5 (k c / H0)^2 T(k) g / Om]^2,
             g = D(1) / D(a) x a, a early.
    """
    if not _FAINTEST <= amplitude <= _BRIGHTEST:
        raise bad_input(f"a number from {_FAINTEST:g} to {_BRIGHTEST:g}", amplitude, "A_s")
    waves = np.geomspace(1e-4, 1e2, 4096)
    early = 1e-3
    growth = early / cosmology.growth(early)
    potential = (
        0.4
        * (waves * _HUBBLE_LENGTH) ** 2
        / cosmology.matter
        * growth
        * eisenstein_hu(cosmology, waves)
    )
    curvature = amplitude * (waves * cosmology.hubble / _PIVOT) ** (cosmology.index - 1)
    density = curvature * potential**2 * _sphere(8 * waves) ** 2
    return float(np.sqrt(np.dot(density[1:] + density[:-1], np.diff(np.log(waves))) / 2))


def _shape_of(cosmology: Cosmology, k: Floats, shape: float | None) -> Floats:
    """Return (1) without A; zero at k = 0."""
    safe = np.where(k > 0, k, 1.0)
    transfer = eisenstein_hu(cosmology, safe) if shape is None else _gamma_transfer(safe, shape)
    return np.where(k > 0, safe**cosmology.index * transfer**2, 0.0)


def _sphere(x: Floats) -> Floats:
    """Return the window W(x) of (2)."""
    return 3 * (np.sin(x) - x * np.cos(x)) / x**3


def _gamma_transfer(k: Floats, shape: float) -> Floats:
    """Return T(k) for a shape parameter Gamma."""
    q = k / shape
    return (1 + (6.4 * q + (3.0 * q) ** 1.5 + (1.7 * q) ** 2) ** 1.13) ** (-1 / 1.13)


def eisenstein_hu(cosmology: Cosmology, k: Floats) -> Floats:
    """Return T(k) with baryon oscillations; k is in h/Mpc."""
    h = cosmology.hubble
    matter, baryons = cosmology.matter * h * h, max(cosmology.baryons, 1e-8) * h * h
    share = baryons / matter
    theta = _CMB_KELVIN / 2.7
    z_equal, k_equal = 2.5e4 * matter / theta**4, 7.46e-2 * matter / theta**2
    b1 = 0.313 * matter**-0.419 * (1 + 0.607 * matter**0.674)
    z_drag = (
        1291
        * matter**0.251
        / (1 + 0.659 * matter**0.828)
        * (1 + b1 * baryons ** (0.238 * matter**0.223))
    )
    r_drag, r_equal = (31.5e3 * baryons / theta**4 / z for z in (z_drag, z_equal))
    sound = 2 / (3 * k_equal) * math.sqrt(6 / r_equal)
    sound *= math.log(
        (math.sqrt(1 + r_drag) + math.sqrt(r_drag + r_equal)) / (1 + math.sqrt(r_equal))
    )
    waves = k * h  # 1/Mpc
    q = waves / (13.41 * k_equal)
    phase = waves * sound
    cold = _cold_transfer(q, phase, matter, share)
    silk = 1.6 * baryons**0.52 * matter**0.73 * (1 + (10.4 * matter) ** -0.95)
    y = (1 + z_equal) / (1 + z_drag)
    root = math.sqrt(1 + y)
    strength = 2.07 * k_equal * sound * (1 + r_drag) ** -0.75
    strength *= y * (-6 * root + (2 + 3 * y) * math.log((root + 1) / (root - 1)))
    onset = 0.5 + share + (3 - 2 * share) * math.sqrt((17.2 * matter) ** 2 + 1)
    shifted = phase / (1 + (8.41 * matter**0.435 / phase) ** 3) ** (1 / 3)
    damped = strength / (1 + (onset / phase) ** 3) * np.exp(-((waves / silk) ** 1.4))
    wavy = (_pressureless(q, 1.0, 1.0) / (1 + (phase / 5.2) ** 2) + damped) * np.sinc(
        shifted / np.pi
    )
    return share * wavy + (1 - share) * cold


def _cold_transfer(q: Floats, phase: Floats, matter: float, share: float) -> Floats:
    """Return the transfer function of the cold matter."""
    a1 = (46.9 * matter) ** 0.670 * (1 + (32.1 * matter) ** -0.532)
    a2 = (12.0 * matter) ** 0.424 * (1 + (45.0 * matter) ** -0.582)
    alpha = a1**-share * a2 ** -(share**3)
    b1, b2 = 0.944 / (1 + (458 * matter) ** -0.708), (0.395 * matter) ** -0.0266
    beta = 1 / (1 + b1 * ((1 - share) ** b2 - 1))
    mix = 1 / (1 + (phase / 5.4) ** 4)
    return mix * _pressureless(q, 1.0, beta) + (1 - mix) * _pressureless(q, alpha, beta)


def _pressureless(q: Floats, alpha: float, beta: float) -> Floats:
    """Return the transfer function of matter without pressure."""
    log = np.log(math.e + 1.8 * beta * q)
    return log / (log + (14.2 / alpha + 386 / (1 + 69.9 * q**1.08)) * q * q)
