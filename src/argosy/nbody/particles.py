"""Define particles of one mass in a periodic box, at one expansion factor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.errors import invalid
from argosy.nbody.cosmology import Cosmology

# Arrays of numbers, and of ids.
Floats = NDArray[np.float64]
Names = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Particles:
    """A set of particles, one per row; their order has no meaning, only ``ids`` identify them."""

    positions: Floats
    """Comoving positions in [0, box), Mpc/h."""
    momenta: Floats
    """Canonical momenta p = a^2 dx/dt, km/s x a."""
    ids: Names

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        return f"{len(self)} particles"

    def taken(self, rows: Names) -> Particles:
        """Return the particles of these rows, in this order."""
        return Particles(
            positions=self.positions[rows], momenta=self.momenta[rows], ids=self.ids[rows]
        )


@dataclass(frozen=True, kw_only=True)
class Box:
    """A snapshot that holds particles and everything needed to continue from them."""

    size: float
    """The side of the box in Mpc/h."""
    expansion: float
    """The expansion factor a."""
    cosmology: Cosmology
    particles: Particles

    @property
    def redshift(self) -> float:
        """Return the redshift."""
        return 1 / self.expansion - 1

    def __repr__(self) -> str:
        return f"{self.particles!r} in {self.size:g} Mpc/h at z = {self.redshift:.4g}"


def wrapped(positions: Floats, box: float) -> Floats:
    """Return positions moved back into [0, box); the upper edge, which rounding can reach, becomes
    0."""
    inside = np.mod(positions, box)
    inside[inside >= box] = 0.0
    return inside


def check_finite(particles: Particles, where: str) -> None:
    """Raise ``InputError`` if a coordinate or momentum is not finite."""
    for name, values in (("positions", particles.positions), ("velocities", particles.momenta)):
        bad = ~np.isfinite(values).all(axis=1)
        if bad.any():
            first = int(np.argmax(bad))
            actual = f"{values[first].tolist()} for particle {particles.ids[first]}"
            raise invalid(name, actual, "finite numbers", file=where)
