"""Particles of one mass in a periodic box, at one moment of the expansion."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.errors import InputError, Problem
from argosy.nbody.cosmology import Cosmology

Floats = NDArray[np.float64]
Names = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Particles:
    """Rows of the same particle; the order means nothing, ``ids`` do."""

    positions: Floats
    """Comoving, in [0, box)."""
    momenta: Floats
    """p = a^2 dx/dt, km/s x a."""
    ids: Names

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        return f"{len(self)} particles"

    def taken(self, rows: Names) -> Particles:
        """These of them, in this order."""
        return Particles(
            positions=self.positions[rows], momenta=self.momenta[rows], ids=self.ids[rows]
        )


@dataclass(frozen=True, kw_only=True)
class Box:
    """A snapshot: particles, and what is needed to go on from them."""

    size: float
    """Mpc/h."""
    expansion: float
    """a."""
    cosmology: Cosmology
    particles: Particles

    @property
    def redshift(self) -> float:
        return 1 / self.expansion - 1

    def __repr__(self) -> str:
        return f"{self.particles!r} in {self.size:g} Mpc/h at z = {self.redshift:.4g}"


def wrapped(positions: Floats, box: float) -> Floats:
    """Positions moved back into [0, box); the upper edge itself, which rounding can reach, is the
    lower one."""
    inside = np.mod(positions, box)
    inside[inside >= box] = 0.0
    return inside


def check_finite(particles: Particles, where: str) -> None:
    """Raise ``InputError`` where a coordinate or momentum is not a number."""
    for name, values in (("positions", particles.positions), ("velocities", particles.momenta)):
        bad = ~np.isfinite(values).all(axis=1)
        if bad.any():
            first = int(np.argmax(bad))
            found = f"{values[first].tolist()} for particle {particles.ids[first]}"
            raise InputError(
                [Problem(file=where, path=name, found=found, expected="finite numbers")]
            )
