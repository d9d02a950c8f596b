"""Displace a lattice or a glass so that its density is a seeded random field of a spectrum.

With delta(k) the linear contrast at the start and phi its potential, laplace(phi) = delta,

    (1)  x = q - grad(phi) + (D2 / D1^2) grad(phi2),
         p = a^2 H [ -f1 grad(phi) + f2 (D2 / D1^2) grad(phi2) ],
    (2)  laplace(phi2) = sum over i < j of phi_ii phi_jj - phi_ij^2,
         D2 / D1^2 = -3/7 Om(a)^(-1/143),   f2 = 2 Om(a)^(6/11):

Zel'dovich's approximation is the first term, second-order Lagrangian perturbation theory (2LPT)
both. The noise is drawn in real space, so equal seed and lattice give equal particles.
Displacements are computed on a lattice; at the particles of a glass they are interpolated with the
clouds of ``cloud``, whose transform is divided out before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import StrEnum

import numpy as np
import scipy.fft

from argosy.errors import bad_input
from argosy.nbody.cosmology import Cosmology
from argosy.nbody.force.cloud import interpolate
from argosy.nbody.force.mesh import Modes, frequencies, wave_squares
from argosy.nbody.force.settings import Cloud
from argosy.nbody.initial.glass import glass
from argosy.nbody.initial.spectrum import linear_power
from argosy.nbody.initial.spectrum_table import SpectrumTable
from argosy.nbody.particles import Box, Floats, Particles, wrapped

# The accepted range of box sizes, Mpc/h: from a star's neighbourhood to beyond the horizon.
_SMALLEST, _LARGEST = 1e-6, 1e6
# The largest number of particles per side: more than fits into a machine, and countable by an
# array.
_MOST_PER_SIDE = 100_000
# Redshifts beyond this are taken for input errors: radiation is not modelled.
_EARLIEST = 1e6


class Order(StrEnum):
    """The orders to which the displacement can be expanded."""

    ZELDOVICH = "zeldovich"
    SECOND = "2lpt"


class ParticleLoad(StrEnum):
    """The arrangements that particles can have before they are displaced."""

    GRID = "grid"
    GLASS = "glass"


def initial_conditions(
    *,
    box: float,
    per_side: int,
    redshift: float,
    seed: int,
    cosmology: Cosmology | None = None,
    order: Order = Order.SECOND,
    shape: float | None = None,
    table: SpectrumTable | None = None,
    load: ParticleLoad = ParticleLoad.GRID,
) -> Box:
    """Create ``per_side``^3 particles in a box of ``box`` Mpc/h.

    If a ``table`` is given, it replaces the spectrum of the cosmology.
    """
    if not 4 <= per_side <= _MOST_PER_SIDE:
        raise bad_input(f"4 to {_MOST_PER_SIDE:,} particles per side", per_side, "per_side")
    if not _SMALLEST <= box <= _LARGEST:
        raise bad_input(f"a size from {_SMALLEST:g} to {_LARGEST:g} Mpc/h", box, "box")
    if not 0 < redshift <= _EARLIEST:
        raise bad_input(f"a positive redshift, at most {_EARLIEST:g}", redshift, "redshift")
    cosmology = cosmology or Cosmology()
    a = 1 / (1 + redshift)
    wave = np.sqrt(wave_squares(per_side, box))
    power = (
        linear_power(cosmology, wave.ravel(), shape) if table is None else table.at(wave.ravel())
    )
    contrast = _linear_field(box, per_side, cosmology.growth(a), power.reshape(wave.shape), seed)
    potential = _potential(contrast, box, per_side)
    places, displaced = _unperturbed(box, per_side, load, seed)
    first = -displaced(potential)
    shift, speed = first, cosmology.growth_rate(a) * first
    if order is Order.SECOND:
        density = cosmology.matter_at(a)
        second = (
            -3 / 7 * density ** (-1 / 143) * displaced(_second_potential(potential, box, per_side))
        )
        shift, speed = shift + second, speed + 2 * density ** (6 / 11) * second
    particles = Particles(
        positions=wrapped(places + shift, box),
        momenta=a * a * cosmology.hubble_rate(a) * speed,
        ids=np.arange(1, per_side**3 + 1),
    )
    return Box(size=box, expansion=a, cosmology=cosmology, particles=particles)


def _unperturbed(
    box: float, side: int, load: ParticleLoad, seed: int
) -> tuple[Floats, Callable[[Modes], Floats]]:
    """Return the undisplaced positions, and a function that returns the gradient of a potential
    there."""
    if load is ParticleLoad.GLASS:
        places = glass(side, box, seed)
        return places, lambda potential: _gradient_at(places, potential, box, side)
    line = (np.arange(side) + 0.5) * (box / side)
    lattice = np.stack(np.meshgrid(line, line, line, indexing="ij"), axis=-1).reshape(-1, 3)
    return lattice, lambda potential: _gradient(potential, box, side)


def _gradient_at(places: Floats, potential: Modes, box: float, side: int) -> Floats:
    """Return the gradient between the points of the lattice."""
    cloud = Cloud.PCS
    full, last = (
        np.sinc(k * box / (2 * np.pi * side)) ** cloud.order for k in frequencies(side, box)
    )
    sharpened = potential / (full[:, None, None] * full[None, :, None] * last[None, None, :])
    slopes = _gradient(sharpened, box, side).T.reshape(3, side, side, side)
    ghosts = cloud.order - 1
    fields = np.pad(slopes, ((0, 0), *((0, ghosts),) * 3), mode="wrap").astype(np.float32)
    # The lattice's first point is half a cell from the edge.
    points = wrapped(places - box / side / 2, box)
    return interpolate(points, side / box, cloud.order, 0, fields)


def _linear_field(box: float, side: int, growth: float, power: Floats, seed: int) -> Modes:
    """Return delta(k) of the lattice's modes, as scipy's transform of delta(x)."""
    noise = scipy.fft.rfftn(np.random.default_rng(seed).standard_normal((side, side, side)))
    return noise * np.sqrt(power * side**3 / box**3) * growth


def _potential(contrast: Modes, box: float, side: int) -> Modes:
    """Return the inverse Laplacian of a field."""
    squares = wave_squares(side, box)
    squares[0, 0, 0] = 1
    potential: Modes = -contrast / squares
    potential[0, 0, 0] = 0
    return potential


def _slopes(box: float, side: int) -> tuple[Modes, Modes, Modes]:
    """Return i k along each axis, shaped to multiply modes; the highest frequency has no slope."""
    full, last = (np.asarray(1j * k, np.complex128) for k in frequencies(side, box))
    if side % 2 == 0:
        full[side // 2] = last[side // 2] = 0
    return full[:, None, None], full[None, :, None], last[None, None, :]


def _gradient(potential: Modes, box: float, side: int) -> Floats:
    """Return the gradient of a potential at the points of the lattice."""
    parts = [
        scipy.fft.irfftn(slope * potential, s=(side,) * 3).ravel() for slope in _slopes(box, side)
    ]
    return np.stack(parts, axis=-1)


def _second_potential(potential: Modes, box: float, side: int) -> Modes:
    """Return the second-order potential phi2 of (2)."""
    slopes = _slopes(box, side)

    def curvature(i: int, j: int) -> Floats:
        """Return the second derivative of the potential along two axes."""
        return scipy.fft.irfftn(slopes[i] * slopes[j] * potential, s=(side,) * 3)

    diagonal = [curvature(axis, axis) for axis in range(3)]
    source = np.zeros((side, side, side))
    for i, j in itertools.combinations(range(3), 2):
        source += diagonal[i] * diagonal[j] - curvature(i, j) ** 2
    return _potential(scipy.fft.rfftn(source), box, side)
